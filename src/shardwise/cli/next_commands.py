"""What a user may do with a run that is over: commands that work as they are printed."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.space import AXES, Mesh

if TYPE_CHECKING:
    from shardwise.train import RunConfig

_OF_TRANSFORMERS = "transformers:"
_STEPS = "train.steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    """One command, and what it does."""

    purpose: str
    line: str


def next_commands(config: "RunConfig", name: str, overrides: Sequence[str]) -> list[NextCommand]:
    """What to do with the saves of the run `train NAME --set OVERRIDES`; nothing where it has none."""
    if config.checkpoint.every is None:
        return []
    saves, program = shlex.quote(config.saves), _program()
    commands = [NextCommand(purpose="look into the checkpoint", line=f"{program} ckpt ls {saves}")]
    if _is_of_transformers(config):
        files = shlex.quote(str(config.output / "hf"))
        line = f"{program} ckpt convert {saves} {files} --to hf --dtype float32"
        commands.append(NextCommand(purpose="write files that from_pretrained loads", line=line))
    return [*commands, *_under_another_layout(config, name, overrides, program)]


def _under_another_layout(
    config: "RunConfig", name: str, overrides: Sequence[str], program: str
) -> Iterator[NextCommand]:
    """More updates under another layout, where the configuration allows one."""
    from shardwise.train import read_config

    num_steps = config.train.steps + max(1, config.train.steps // 5)
    steps = f"{_STEPS}={num_steps}"
    kept = [each for each in overrides if not each.startswith(f"{_STEPS}=")]
    mesh = config.plan.mesh
    # Any model of transformers can be cut into stages. Of others we know only that they run on data ranks.
    if _is_of_transformers(config) and mesh.pp == 1:
        wanted = Mesh(pp=2)
    else:
        wanted = Mesh() if mesh.size > 1 else Mesh(dp_shard=2)
    sizes = list(zip(AXES, wanted.shape, mesh.shape, strict=True))
    short = [f"mesh.{axis}={size}" for axis, size, _ in sizes if size > 1]
    # A configuration with a mesh of its own needs a word on each axis that it uses.
    whole = [f"mesh.{axis}={size}" for axis, size, now in sizes if size != now]
    for layout in (short, whole):
        changes = [*kept, *layout, steps]
        try:
            read = read_config(Path(name), overrides=changes, num_processes=wanted.size)
        except ConfigError:
            continue
        if read.plan.mesh == wanted:
            words = ["train", name, "--nproc", str(wanted.size), "--resume", "auto"]
            words += [word for change in changes for word in ("--set", change)]
            purpose = f"go on to step {num_steps} under another layout, {wanted}"
            yield NextCommand(purpose=purpose, line=f"{program} {shlex.join(words)}")
            return


def _is_of_transformers(config: "RunConfig") -> bool:
    return config.model.factory.startswith(_OF_TRANSFORMERS)


def _program() -> str:
    """How a shell in this folder calls the command that belongs to this interpreter."""
    script = Path(sys.executable).with_name("shardwise")
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m shardwise.cli"
    found = shutil.which("shardwise")
    if found is not None and os.path.samefile(found, script):
        return "shardwise"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
