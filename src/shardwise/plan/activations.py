"""The setting of a plan that says what becomes of the tensors that forwards save for backward."""

import re
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import PlanError

Modules = tuple[str, ...] | Literal["blocks"]
"""Names or globs of modules; "blocks": the repeated ones."""

_OPERATOR = re.compile(r"\w+\.\w+(\.\w+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What becomes of the tensors that forwards save for backward. The numbers are those without."""

    checkpoint: Modules | None = None
    """Names or globs of the modules whose inputs alone are kept: backward runs them again (Chen et al., 2016,
    arXiv:1604.06174). "blocks": each repeated block; None: no module."""
    save: tuple[str, ...] | None = None
    """Operators whose outputs checkpointed modules keep, with or without the overload: ("aten.mm",); None: none."""
    offload: Modules | None = None
    """Names or globs of the modules whose saved tensors wait in host memory; "blocks": each repeated block."""
    budget_bytes: int | None = None
    """Most bytes of saved tensors that a rank holds at a time. The first step measures, and the cheapest modules to run
    again or to offload are chosen: among those that the other fields name, without them among blocks."""

    def __post_init__(self) -> None:
        for name in ("checkpoint", "offload", "save"):
            if isinstance(value := getattr(self, name), list):  # as TOML gives it; a tuple can be hashed
                object.__setattr__(self, name, tuple(value))
        problems = [
            f'activations.{name}: {value!r} is neither "blocks" nor a tuple of names; write {name}=("layers.*",)'
            for name in ("checkpoint", "offload")
            if (value := getattr(self, name)) is not None and value != "blocks" and not _are_names(value)
        ]
        if self.save is not None and not (
            _are_names(self.save) and all(_OPERATOR.fullmatch(each) for each in self.save)
        ):
            problems.append(
                f'activations.save: {self.save!r} is not a tuple of operators of torch; write save=("aten.mm",)'
            )
        elif self.save and self.checkpoint is None and self.budget_bytes is None:
            problems.append(
                "activations.save: given without activations.checkpoint: no module is run again, and all are saved; "
                'give checkpoint="blocks" too'
            )
        budget = self.budget_bytes
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            problems.append(f"activations.budget_bytes: {budget!r} is not a whole number of at least 1")
        if problems:
            raise PlanError(*problems)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, str) for each in value)
