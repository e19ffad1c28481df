"""The LAYOUT of the command: "pp=2,tp=2" or "dp_shard=4,sharding.stage=3", as settings of a configuration."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import ConfigError, PlanError
from shardwise.plan import Plan
from shardwise.plan.specs import toml_text
from shardwise.space import Mesh
from shardwise.train.config import find_config, overridden

SETTINGS = ("sharding", "pipeline", "tensor")
"""The tables whose settings belong to a layout; others change the arithmetic or the data of both sides."""

_OPENING, _CLOSING = "[{(", "]})"


def read_layout(text: str) -> tuple[Mesh, list[str]]:
    """The mesh, and the other settings, in the form of `--set`.

    Commas or spaces separate words. Those without a dot in their key are axes of the mesh ("pp=2"), which is replaced
    as a whole. Raises PlanError with every problem.
    """
    words = split_words(text)
    # Settings have a table before a dot, axes of the mesh have none.
    axes = [word for word in words if "." not in word.partition("=")[0]]
    settings = [word for word in words if word not in axes]
    problems = [] if words else [f"layout {text!r} says nothing; write, for example, pp=2,tp=2"]
    for word in settings:
        table, _, _ = word.partition("=")[0].strip().partition(".")
        if table not in SETTINGS or "=" not in word:
            problems.append(
                f"layout: {word!r} is no setting of a layout (sharding.*, pipeline.* and tensor.*). Write for "
                "example sharding.stage=3, and use --set for settings of both sides"
            )
    mesh = Mesh()
    try:
        mesh = Mesh.parse(",".join(axes)) if axes else mesh
    except PlanError as error:
        problems += [f"layout: {problem}" for problem in error.problems]
    if problems:
        raise PlanError(*problems)
    return mesh, settings


def layout_plan(text: str, overrides: Sequence[str]) -> Plan:
    """The plan of a program that has no configuration: LAYOUT, and `overrides` of both sides. Raises PlanError."""
    _, everything = layout_overrides(None, text, overrides)
    problems: list[str] = []
    tables = overridden({}, everything, problems)
    if problems:
        raise PlanError(*problems)
    return Plan.parse("\n".join(f"{name} = {toml_text(table)}" for name, table in tables.items()))


def layout_overrides(path: Path | None, text: str, overrides: Sequence[str]) -> tuple[Mesh, list[str]]:
    """The mesh, and `overrides` with all that LAYOUT sets, for the configuration in `path`, where there is one.

    With tp and no word on `tensor.rules` anywhere, the plan that the model carries is taken ("auto").
    """
    mesh, settings = read_layout(text)
    sizes = zip(("pp", "dp_replicate", "dp_shard", "tp"), mesh.shape, strict=True)
    # The layout comes last: it wins over `--set`, which is for settings of both sides.
    everything = [*overrides, *(f"mesh.{axis}={size}" for axis, size in sizes), *settings]
    # A mesh with tp alone does not say which parameters are cut, and a plan without rules cuts none of them.
    if mesh.tp > 1 and not any(each.startswith("tensor.rules") for each in everything) and not _has_rules(path):
        everything.append("tensor.rules=auto")
    return mesh, everything


def split_words(text: str) -> list[str]:
    """Words between commas and spaces; those inside quotes or brackets do not separate words."""
    words, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in _OPENING) - (character in _CLOSING) if not quote else 0
        if not depth and not quote and (character == "," or character.isspace()):
            words.append("")
        else:
            words[-1] += character
    return [word for word in words if word]


def _has_rules(path: Path | None) -> bool:
    if path is None:
        return False
    try:
        table = tomllib.loads(find_config(path).read_text(encoding="utf-8")).get("tensor")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the config {path} cannot be read as TOML: {error}") from error
    return isinstance(table, dict) and "rules" in table
