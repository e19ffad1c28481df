"""What users hold on to, as texts: public names and their arguments, commands, keys of configs, bytes of saves."""

import dataclasses
import hashlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import click
import torch
from torch import nn

import shardwise as sw
from shardwise.cli import main
from shardwise.train.config import RunConfig
from shardwise.train.strict_tables import Table, table_at


def public_names() -> str:
    """Every name of `sw` and `sw.checkpoint`, with arguments, defaults and public members."""
    return "\n".join(line for module in (sw, sw.checkpoint) for line in _lines_of(module)) + "\n"


def _lines_of(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        each = getattr(module, name)
        if inspect.isclass(each):
            made = "" if each is sw.Engine else _arguments(each)  # `parallelize` makes it
            yield f"class {module.__name__}.{name}{made}"
            for member in sorted({name for kind in _own_kinds(each) for name in vars(kind)}):
                if not member.startswith("_"):
                    value = inspect.getattr_static(each, member)
                    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                    yield f"    {member}{_arguments(function) if inspect.isfunction(function) else ''}"
        elif callable(each):
            yield f"{module.__name__}.{name}{_arguments(each)}"


def _own_kinds(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each.__module__.startswith("shardwise")]


def _arguments(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a type alias, an exception
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x\w+", "", text)


def commands() -> str:
    """What every command says with --help."""
    return "\n".join(_help_of(main, ["shardwise"]))


def _help_of(command: click.Command, path: list[str]) -> Iterator[str]:
    context = click.Context(command, info_name=" ".join(path), terminal_width=100)
    yield command.get_help(context) + "\n"
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _help_of(command.commands[name], [*path, name])


def config_keys() -> str:
    """Every key of a config, its type and its default."""
    return "\n".join(_keys_of(RunConfig, "")) + "\n"


def _keys_of(kind: Any, path: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = hints[field.name]
        # What a plan may be without is written as the same table.
        inner = next((each for each in get_args(inner) if dataclasses.is_dataclass(each)), inner)
        if inspect.isclass(inner) and issubclass(inner, Table):
            yield from _keys_of_table(inner, f"{path}{field.name}.")
        elif dataclasses.is_dataclass(inner):
            yield from _keys_of(inner, f"{path}{field.name}.")
        elif inner is not Path or path:
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"{path}{field.name}: {_named(inner)}{default}"


def _keys_of_table(kind: type[Table], path: str) -> Iterator[str]:
    for name, known in kind.model_fields.items():
        default = "" if known.is_required() else f" = {known.default!r}"
        yield f"{path}{name}: {_named(known.annotation)}{default}"
        if (inner := table_at(kind, [name])) is not kind:
            yield from _keys_of_table(inner, f"{path}{name}.")


def _named(kind: Any) -> str:
    return kind.__name__ if inspect.isclass(kind) and not get_args(kind) else str(kind)


PLANS: dict[str, sw.Plan] = {
    "one rank": sw.Plan(mesh=sw.Mesh()),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(bucket_bytes=256)),
    "whole": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(partition="whole")),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "average": sw.Plan(mesh=sw.Mesh(dp_shard=2), average=sw.Average(decay=0.5)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"embedding": 0, "up": 0, "down": 1})),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"up": "column", "down": "row", "embedding": "vocab"})),
}


class _Net(nn.Module):
    """Filled with numbers that no processor rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(12, 4), nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.arange(5))
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters()):
                parameter.copy_((torch.arange(parameter.numel()) + 100 * at).view_as(parameter) / 8)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(self.embedding(words)).relu())
        return out


def saves() -> str:
    """The digest of every file of a save before training, by layout; what is drawn for names is zeros."""
    return "".join(f"{name}\n{_digests(plan)}" for name, plan in PLANS.items())


def _digests(plan: sw.Plan) -> str:
    def save(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            _Net(), plan, optimizer=torch.optim.AdamW, loss=lambda output, batch: output.mean(), channel=channel, seed=0
        )
        sw.save(folder, engine, extra={"step": 3})

    with tempfile.TemporaryDirectory() as folder, patch("secrets.token_hex", lambda num_bytes: "0" * (2 * num_bytes)):
        sw.simulate(plan.mesh.size, save)
        return "".join(_digest(path, folder) for path in sorted(Path(folder).rglob("*")) if path.is_file())


def _digest(path: Path, folder: str) -> str:
    # When the save was made, and the checksum over that.
    content = re.sub(rb'(?<="checksum": )"xxh3_64:\w+"|(?<="written_at": )"[^"]*"', b"", path.read_bytes())
    return f"    {path.relative_to(folder)} {len(content)} {hashlib.sha256(content).hexdigest()[:16]}\n"


TEXTS: dict[str, Callable[[], str]] = {
    "public-names": public_names,
    "commands": commands,
    "config-keys": config_keys,
    "saves": saves,
}
