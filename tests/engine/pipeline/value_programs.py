"""Random programs on the values of stages: views, writes in place, copies, and modules that do the same inside.

Every number is a small integer, so that sums are exact in every order and one wrong element shows.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

Registers = list[torch.Tensor]
Seen = list[Any]


class Step(NamedTuple):
    """One instruction: an operation, the registers that it takes (counted from the newest), and a number."""

    name: str
    first: int
    second: int
    number: int
    has_no_grad: bool = False


class _Block(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((1,), start))


class Affine(_Block):
    def forward(self, x: torch.Tensor) -> Any:
        return 2 * x + self.bias


class Turning(_Block):
    """Gives a tensor that is not contiguous, and a view of it."""

    def forward(self, x: torch.Tensor) -> Any:
        out = (x + self.bias).transpose(0, -1)
        return out, out[..., :1]


class Writing(_Block):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> Any:
        x.mul_(2)
        return x + self.bias


class Copying(_Block):
    """Writes to a copy, which is its input where that is contiguous."""

    def forward(self, x: torch.Tensor) -> Any:
        x.contiguous().add_(1)
        return x + self.bias, x.contiguous(), x[..., -1:]


class Looking(_Block):
    """Asks for what is no element."""

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.bias * (1 + x.is_contiguous() + 2 * (x.stride()[0] > x.stride()[-1]) + 4 * x.requires_grad)


class Returning(_Block):
    """Gives its input, a view of it, and something new."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, x[..., :1], x + self.bias


class Hiding(_Block):
    """Writes to its input where no version shows it."""

    def forward(self, x: torch.Tensor) -> Any:
        out = x + self.bias
        x.data.add_(1)
        return out


MODULES: tuple[type[_Block], ...] = (Affine, Turning, Writing, Copying, Looking, Returning, Hiding)


def _along(x: torch.Tensor, number: int) -> int:
    return number % max(1, x.dim())


def _branch(x: torch.Tensor, number: int) -> torch.Tensor:
    return x * 2 if x.is_contiguous() else x + number


def _write_slice(x: torch.Tensor, number: int) -> None:
    x.narrow(_along(x, number), 0, 1).add_(number)


UNARY: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "slice": lambda x, n: x.narrow(_along(x, n), 1, x.shape[_along(x, n)] - 1),
    "last": lambda x, n: x[..., -1],
    "shift": lambda x, n: x[..., :-1, :],
    "every second": lambda x, n: x[..., ::2],
    "transpose": lambda x, n: x.transpose(0, -1),
    "mT": lambda x, n: x.mT,
    "permute": lambda x, n: x.permute(*range(1, x.dim()), 0),
    "expand": lambda x, n: x.unsqueeze(_along(x, n)).expand(*x.shape[: _along(x, n)], 2, *x.shape[_along(x, n) :]),
    "expand_as": lambda x, n: x[..., :1].expand_as(x),
    "unfold": lambda x, n: x.unfold(_along(x, n), 2, 1),
    "contiguous": lambda x, n: x.contiguous(),
    "view": lambda x, n: x.view(-1, x.shape[-1]),
    "reshape": lambda x, n: x.reshape(-1, x.shape[-1]),
    "flatten": lambda x, n: x.flatten(),
    "channels last": lambda x, n: x[None].to(memory_format=torch.channels_last)[0],
    "detach": lambda x, n: x.detach(),
    "data": lambda x, n: x.data,
    "clone": lambda x, n: x.clone(),
    "like": lambda x, n: torch.zeros_like(x) + x,
    "double": lambda x, n: x * 2,
    "square": lambda x, n: x.square(),
    "chunk": lambda x, n: x.chunk(2, _along(x, n)),
    "unbind": lambda x, n: x.unbind(_along(x, n)),
    "branch": _branch,
    "as_strided": lambda x, n: x.as_strided((2, 2), (2, 1)),
    "mul_": lambda x, n: x.mul_(2),
    "add_": lambda x, n: x.add_(n),
    "unsqueeze_": lambda x, n: x.unsqueeze_(0),
    "write a slice": _write_slice,
    "write an item": lambda x, n: x.__setitem__((Ellipsis, 0), n),
    "requires_grad": lambda x, n: x.detach().requires_grad_(),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "add": lambda x, y, n: x + y.sum(),
    "broadcast": lambda x, y, n: x + y,
    "times": lambda x, y, n: x * y,
    "add_ values": lambda x, y, n: x.add_(y),
    "copy_": lambda x, y, n: x.copy_(y),
    "write to an item": lambda x, y, n: x.__setitem__((Ellipsis, 0), y.sum()),
    "is": lambda x, y, n: x + (3 if x is y else 0),
    "view_as": lambda x, y, n: x.view_as(y),
}
CALLS = [f"module {at}" for at in range(4)]


def programs(max_size: int = 14) -> st.SearchStrategy[list[Step]]:
    """Lists of instructions, of which those that one process refuses are left out later."""
    small = st.integers(0, 3)
    calls = st.builds(Step, st.sampled_from(CALLS), small, small, small, st.integers(0, 4).map(lambda n: n == 0))
    others = st.builds(Step, st.sampled_from([*UNARY, *BINARY]), small, small, small)
    return st.lists(st.one_of(calls, others), min_size=1, max_size=max_size)


class Program(nn.Module):
    """Four modules, and a forward that runs a program on what they give."""

    def __init__(self, steps: Sequence[Step], kinds: Sequence[int]) -> None:
        super().__init__()
        self.steps = list(steps)
        self.blocks = nn.ModuleList(MODULES[kind](float(at + 1)) for at, kind in enumerate(kinds))
        self.last = Affine(1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Seen]:
        """The loss, and what could be seen of every register after every instruction."""
        registers: Registers = [x * 1, self.last(x)]  # one that all ranks have
        of_modules = [False, False]
        seen: Seen = []
        for step in self.steps:
            self._take(registers, of_modules, step)
            seen.append([_seen(each) for each in registers])
        # A module that gives its input itself gives another object across stages, of the same memory: see `describe`.
        plain = [each for each, is_given in zip(registers, of_modules, strict=True) if not is_given][1:]
        seen.append([[one is other for one in plain] for other in plain])
        sums = [each.sum() * (at + 1) for at, each in enumerate(registers)]
        return torch.stack(sums).sum() + self.last(registers[-1].sum()).sum(), seen

    def valid(self, x: torch.Tensor) -> list[Step]:
        """The instructions that one process runs."""
        registers: Registers = [x * 1, self.last(x)]
        of_modules = [False, False]
        found = []
        for step in self.steps:
            try:
                self._take(registers, of_modules, step)
            except (RuntimeError, IndexError, TypeError):
                continue
            found.append(step)
        return found

    def _take(self, registers: Registers, of_modules: list[bool], step: Step) -> None:
        """`of_modules`: which registers modules gave, or operations on such ones."""
        first, second = (-1 - at % len(registers) for at in (step.first, step.second))
        x, y = registers[first], registers[second]
        is_given = of_modules[first] or of_modules[second] or step.name in CALLS
        made: Any
        with torch.no_grad() if step.has_no_grad else nullcontext():
            if step.name in UNARY:
                made = UNARY[step.name](x, step.number)
            elif step.name in BINARY:
                made = BINARY["broadcast" if step.name == "is" and is_given else step.name](x, y, step.number)
            else:
                made = self.blocks[int(step.name.removeprefix("module "))](x)
        registers += made if isinstance(made, tuple | list) else [] if made is None else [made]
        of_modules += [is_given] * (len(registers) - len(of_modules))


def _seen(x: torch.Tensor) -> tuple[Any, ...]:
    strides = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]  # of one element: any
    strides = strides if x.numel() else []
    return (
        *(tuple(x.shape), strides, x.dtype, x.requires_grad, x.is_leaf, x.is_contiguous()),
        x.storage_offset(),
    )
