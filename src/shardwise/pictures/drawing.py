"""Pictures of what a user has: a plan, a configuration, a checkpoint, a rewrite of one."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardwise.checkpoint import open as open_checkpoint
from shardwise.engine.forward.inventory import take_inventory
from shardwise.errors import CheckpointError, ConfigError
from shardwise.pictures.contents_picture import contents_picture
from shardwise.pictures.plan_pictures import bucket_picture, mesh_picture, step_picture
from shardwise.pictures.rewrite_picture import rewrite_picture
from shardwise.pictures.svg import Picture, stacked
from shardwise.plan import Plan, plan_ownership
from shardwise.rewrite import find_rewrite
from shardwise.train.config import RunConfig, find_config, is_shipped, read_config
from shardwise.train.run_build import build_model


def draw(
    source: str,
    *,
    rewrite: str | None = None,
    parameters: Mapping[str, int | str] | None = None,
    names: Sequence[str] = (),
    num_processes: int | None = None,
    overrides: Sequence[str] = (),
) -> str:
    """The SVG text of a picture of `source`.

    source: a plan (`Plan.text()`) or a configuration of `shardwise train`, as a TOML file. The buckets of a
        configuration are drawn too if pp and tp are 1. Else a checkpoint of any format.
    rewrite: of a checkpoint, the file of a rewrite or the name of one that comes along; its outputs are drawn.
    names: which tensors. num_processes, overrides: of a configuration, as for `shardwise train`. None: as many
        processes as its mesh has ranks.
    Raises PlanError, ConfigError, CheckpointError or RewriteError.
    """
    path = Path(source)
    found = path if path.is_dir() else find_config(path)  # a folder may be a checkpoint
    if found.suffix == ".toml" and found.is_file():
        if rewrite is not None or names or parameters:
            raise ConfigError(
                f"{source} is a plan or a configuration; a rewrite and names of tensors go with a checkpoint"
            )
        return stacked(_of_toml(found, num_processes, overrides))
    if overrides or num_processes is not None:
        raise ConfigError(f"{source} is no configuration; settings and a number of processes go with one")
    if parameters and rewrite is None:
        raise ConfigError("parameters belong to a rewrite; name one")
    try:
        contents = open_checkpoint(source).contents
    except CheckpointError as error:
        if is_shipped(path):
            raise CheckpointError(
                f"{error}. This folder hides the configuration {source!r} that comes with shardwise: draw that one in "
                "another folder"
            ) from error
        raise
    if rewrite is None:
        known = contents.tensors
        pictures = [contents_picture(contents, names)] if _all_known(names, known, source) else []
    else:
        read = find_rewrite(rewrite).with_parameters(parameters or {})
        checked = read.check({name: (each.shape, each.dtype) for name, each in contents.tensors.items()})
        pictures = [rewrite_picture(checked, names)] if _all_known(names, checked.outputs, rewrite) else []
    return stacked(pictures)


def _all_known(names: Sequence[str], known: Mapping[str, object], where: str) -> bool:
    if unknown := [name for name in names if name not in known]:
        raise CheckpointError(
            f"{where} has no tensor {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known)[:8])}"
        )
    return True


def _of_toml(path: Path, num_processes: int | None, overrides: Sequence[str]) -> list[Picture]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if not tables:
        raise ConfigError(
            f"{path} has no settings; write a plan there (such as mesh.dp_shard = 2) or a configuration (with [model])"
        )
    is_configuration = not tables.keys().isdisjoint(("model", "data", "train", "checkpoint"))
    if not is_configuration and (overrides or num_processes is not None):
        raise ConfigError(f"{path} is a plan; settings and a number of processes go with a configuration")
    config = read_config(path, overrides=overrides, num_processes=num_processes) if is_configuration else None
    plan = Plan.parse(text) if config is None else config.plan
    pictures = [mesh_picture(plan), step_picture(plan)]
    if config is not None and plan.mesh.pp * plan.mesh.tp == 1:
        pictures.append(_buckets(config, plan))
    return pictures


def _buckets(config: RunConfig, plan: Plan) -> Picture:
    """The buckets of the model that the configuration names, which is built without values."""
    with torch.device("meta"):
        model = build_model(config)
    num_owners = len(plan.mesh.peers(0, plan.sharding.owner_axes))
    specs = take_inventory(model, plan.precision).specs
    return bucket_picture(
        plan_ownership(specs, plan.sharding, num_owners=num_owners, num_replicas=plan.mesh.num_data_ranks // num_owners)
    )
