"""What an update looks at, keeps and sends; torch's own optimizers are known by a table.

Nothing in an optimizer says whether its update of an element looks at others. A wrong guess would train, and badly. So
doubles of what is not in the table are tried: see `trials`.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, prod
from typing import Any, Literal, TypeAlias

import torch

from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.torch_private import OF_SCHEDULERS, tensor_leaves
from shardwise.errors import OptimizerError
from shardwise.plan.optimizer_entries import NEVER_ALONG

STAGE_0 = "Use sw.Sharding(stage=0) (sharding.stage), where each rank updates everything"
"""What to do with an optimizer that no rank can update a part of."""


@dataclass(frozen=True, slots=True)
class TensorFlag:
    """A tensor of one element in the state of a parameter."""

    number: bool | int | float | complex
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def made(self) -> torch.Tensor:
        """Another one like it."""
        return torch.full(self.shape, self.number, dtype=self.dtype, device=self.device)


Flags: TypeAlias = tuple[tuple[str, Any], ...]
"""Truth values, texts, numbers and tensors of one element in the state of a parameter, with their keys."""

Scope: TypeAlias = Literal["element", "parameter", "group"]
_SCOPES: Sequence[Scope] = ("element", "parameter", "group")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTraits:
    """What is known of the updates of one group, of parameters with one kind of state."""

    looks_at: Scope
    """What the update of an element depends on."""
    has_products: bool = False
    """Whether it multiplies or decomposes matrices."""
    steps_apart: bool = True
    """Whether a step on each parameter does, to the bit, what one step on all of them does."""
    keeps_gradients: bool = False
    """Whether the optimizer keeps memory of a gradient after a step."""
    whole_keys: frozenset[str] = NEVER_ALONG
    """Keys of state that an elementwise update has once per parameter, not once per element."""
    made: frozenset[str] = frozenset()
    """Settings that steps put into the group, as a count of them; also those that are there already."""
    sent_by: str = ""
    """The operation that sends something to other ranks."""
    needs_closure: bool = False


def _by_elements(*whole_keys: str) -> UpdateTraits:
    return UpdateTraits(looks_at="element", whole_keys=NEVER_ALONG.union(whole_keys))


_OF_TORCH: Mapping[str, UpdateTraits] = {
    **dict.fromkeys(
        ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Rprop", "SGD"), _by_elements()
    ),
    "ASGD": _by_elements("eta", "mu"),
    "NAdam": _by_elements("mu_product"),
    "Adafactor": UpdateTraits(looks_at="parameter"),
    "Muon": UpdateTraits(looks_at="parameter", has_products=True),
}
"""By the class of `torch.optim` whose step it is."""

_BESIDE_STEPS = frozenset({"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict", "hooked"})
"""Names of an optimizer that no step of torch calls; `step` itself is looked at in another way."""
_READ_BY_STEPS = frozenset({"__getattribute__", "param_groups", "state"})
"""Names by which a class changes a step that calls none of its methods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """What is known of the updates of an optimizer."""

    optimizer: torch.optim.Optimizer
    of_groups: Sequence[Mapping[Flags, UpdateTraits]]
    """For each group, by the flags in the state of its parameters."""

    of_all: UpdateTraits
    """Of all of them together."""


def together(every: Sequence[UpdateTraits]) -> UpdateTraits:
    """What is known where an optimizer updates in several ways."""
    return UpdateTraits(
        looks_at=max((each.looks_at for each in every), key=_SCOPES.index),
        has_products=any(each.has_products for each in every),
        steps_apart=all(each.steps_apart for each in every),
        keeps_gradients=any(each.keeps_gradients for each in every),
        whole_keys=frozenset[str]().union(*(each.whole_keys for each in every)),
        made=frozenset[str]().union(*(each.made for each in every)),
        sent_by=next((each.sent_by for each in every if each.sent_by), ""),
        needs_closure=any(each.needs_closure for each in every),
    )


def flags_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Flags:
    """What some optimizers note in the state of a parameter before the first step: how they update it."""
    state = dict.get(optimizer.state, parameter) or {}  # as it is: see `StateOfMasters`
    # Next to moments, numbers are counts of steps: a double would go on from them without the moments.
    sizes = {each.numel() for each in tensor_leaves(state)}
    has_moments = parameter.numel() == 1 or not sizes <= {1}
    found = []
    for key, each in state.items():
        if type(each) in (bool, str) or (not has_moments and type(each) in (int, float, type(None))):
            found.append((key, each))
        elif not has_moments and type(each) is torch.Tensor and not each.is_meta:
            number = each.item()
            number = number if number == number else nan  # flags are looked up, and NaNs equal only themselves
            found.append((key, TensorFlag(number, each.dtype, tuple(each.shape), each.device)))
    return tuple(found)


def state_of(flags: Flags) -> dict[str, Any]:
    """A state that has these flags."""
    return {key: each.made() if isinstance(each, TensorFlag) else each for key, each in flags}


def in_table(optimizer: torch.optim.Optimizer) -> UpdateTraits | None:
    """What the table says of an optimizer with a step of torch, in which no code of others runs."""
    kind = type(optimizer)
    # Torch puts wrappers around the step of each class, which have its names. So have those of others.
    step = inspect.unwrap(kind.step, stop=_is_foreign)
    if _is_foreign(step) or has_own_step(optimizer) or _is_changed(optimizer):
        return None
    return _OF_TORCH.get(step.__qualname__.partition(".")[0])


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the object has another step than its class."""
    own = vars(optimizer).get("step")
    # A learning-rate scheduler puts a function around the step of the class, which only notes that there was one.
    is_noted = getattr(own, OF_SCHEDULERS, False) and getattr(own, "__wrapped__", None) is type(optimizer).step
    return own is not None and not is_noted


def _is_foreign(function: object) -> bool:
    return not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.")


def _is_changed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a class around torch's, or the object, has replaced something that a step of torch may reach."""
    kinds = type(optimizer).__mro__[:-1]
    first = next(each for each in kinds if each.__module__.startswith("torch."))
    replaced = {name for each in kinds if not each.__module__.startswith("torch.") for name in vars(each)}
    replaced |= {name for name, value in vars(optimizer).items() if callable(value)}
    reached = {name for name in dir(first) if not name.startswith("__")} - _BESIDE_STEPS
    return not replaced.isdisjoint(reached | _READ_BY_STEPS)


def refusal_of_closure(optimizer: torch.optim.Optimizer) -> OptimizerError:
    """What to say of an optimizer that asks for the loss again."""
    return OptimizerError(
        f"{type(optimizer).__name__}.step needs a closure that computes the loss again; shardwise computes each loss "
        "once per update. Give an optimizer that steps on gradients"
    )


def check_steps(every: Sequence[OptimizerTraits], *, is_alone: bool) -> None:
    """Raise OptimizerError for an optimizer whose step needs the loss again, or sends something to other ranks."""
    for each in every:
        if each.of_all.needs_closure:
            raise refusal_of_closure(each.optimizer)
        if each.of_all.sent_by and not is_alone:
            raise OptimizerError(
                f"{type(each.optimizer).__name__} talks to other ranks in its step ({each.of_all.sent_by}), and "
                "shardwise does that. Use its class for one process: each matrix is then updated on one rank, for all"
            )


def check_apart(every: Sequence[OptimizerTraits], *, instead: str) -> None:
    """Raise OptimizerError for an optimizer whose update of one parameter depends on the others.

    instead: what to do then.
    """
    for each in every:
        if each.of_all.looks_at == "group":
            raise OptimizerError(
                f"{type(each.optimizer).__name__} cannot update parameters one by one: its update of one depends on "
                f"the others, and each rank holds only some. {instead}"
            )


def work_of_wholes(every: Sequence[OptimizerTraits], inventory: Inventory) -> dict[str, int]:
    """Of each parameter that its optimizer must see whole: the work of one update, in operations."""
    spec_of = {spec.name: spec for spec in inventory.specs}
    work: dict[str, int] = {}
    for traits in every:
        for group, by_flags in zip(traits.optimizer.param_groups, traits.of_groups, strict=True):
            if all(each.looks_at == "element" for each in by_flags.values()):
                continue
            for parameter in group["params"]:
                name = inventory.name_of[parameter]
                known = by_flags.get(flags_of(traits.optimizer, parameter)) or by_flags[()]
                work[name] = _work(spec_of[name].global_shape, known.has_products)
    return work


def _work(shape: Sequence[int], has_products: bool) -> int:
    """Of an update: as for Newton-Schulz of m x n, which has products n x m x n and n x n x n, or by elements.

    What is balanced by it is a sum over parameters, so constants that all of them have do not matter.
    """
    size = prod(shape)
    rows = shape[0] if shape else 1
    short, long = sorted((rows, size // max(rows, 1)))
    return max(1, 10 * short * short * (2 * long + short) if has_products and short > 1 else 100 * size)
