"""Masters, working copies, one cast per update, and parameters of any dtype: to the bit, on any number of ranks."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.plan.dtypes import ITEMSIZE_BYTES, promote
from tests.covering import covering
from tests.oracle.batches import points, square_loss
from tests.oracle.comparison import assert_same
from tests.oracle.one_process import expected
from tests.oracle.places import train
from tests.oracle.program import Program, adamw, plan_of, seeded, sgd
from tests.oracle.programs import PROGRAMS
from tests.oracle.rank_order import in_rank_order
from tests.oracle.words import words

KEPT = PROGRAMS["words"]
WORDS = replace(KEPT, make=words, keep=(), name="")
FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def test_promotion_and_sizes_of_names_are_those_of_torchs_dtypes() -> None:
    for first in FLOATING:
        for second in FLOATING:
            both = torch.promote_types(getattr(torch, first), getattr(torch, second))
            assert promote(first, second) == str(both).removeprefix("torch.")
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE_BYTES} == dict(ITEMSIZE_BYTES)


PRECISIONS = {
    "bfloat16": sw.Precision(compute="bfloat16"),
    "accumulated in bfloat16": sw.Precision(compute="bfloat16", accumulate="bfloat16"),
    "reduced in bfloat16": sw.Precision(compute="bfloat16", reduce="bfloat16"),
    "norm kept": sw.Precision(compute="bfloat16", keep=("*norm*",)),
    "norm kept, reduced in bfloat16": sw.Precision(compute="bfloat16", reduce="bfloat16", keep=("norm",)),
    "float16": sw.Precision(compute="float16"),
    "float32 reduced in bfloat16": sw.Precision(compute="float32", reduce="bfloat16"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"mesh": "dp_shard=2"},
    "stage 0": {"mesh": "dp_shard=3", "stage": 0},
    "stage 2": {"mesh": "dp_shard=2", "stage": 2},
    "stage 3": {"mesh": "dp_shard=3", "stage": 3},
    "whole": {"mesh": "dp_shard=3", "partition": "whole"},
    "replicas": {"mesh": "dp_replicate=2,dp_shard=2", "owners": "dp_shard", "bucket_bytes": 300},
}


class Adapted(nn.Module):
    """A base that does not train, and an adapter that does, or of it one parameter."""

    def __init__(self, *, one: bool = False) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(6, 2), requires_grad=not one)
        self.up = nn.Parameter(torch.ones(2, 1))
        self.head = nn.Linear(6, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.base(x.to(self.down.dtype))
        y: torch.Tensor = self.head(hidden) + hidden @ self.down @ self.up
        return y.float()


class MixedDtypes(nn.Module):
    """float32, bfloat16 and float64 in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 5)
        self.narrow = nn.Linear(5, 5).bfloat16()
        self.exact = nn.Linear(5, 3).double()
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(torch.tanh(self.single(x)).bfloat16())
        y: torch.Tensor = self.last(torch.tanh(self.exact(hidden.double())).float())
        return y


class KeptHere(nn.Module):
    """Layers that compute in bfloat16 with ones in float32 between, small and large by turns."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 4, 40, 4, 4, 30, 4)
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in pairwise(widths))
        self.kept = nn.ModuleList(nn.Linear(width, width) for width in widths[1:])
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute, master = self.last.weight.dtype, self.kept[0].get_parameter("weight").dtype
        for layer, kept in zip(self.layers, self.kept, strict=True):
            x = kept(torch.tanh(layer(x.to(compute))).to(master))
        y: torch.Tensor = self.last(x.to(compute))
        return y.float()


def program(make: Any, compute: str | None = None, *, keep: tuple[str, ...] = ()) -> tuple[Program, sw.Precision]:
    batches = [points(seed, 12) for seed in range(3)]
    made = Program(make=seeded(make), batches=batches, loss=square_loss, rounds_by_hand=True)
    return made, sw.Precision(compute=compute, keep=keep)


class Complex(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.linear = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear((x.to(torch.complex64) @ self.turn).abs())
        return y


PROGRAMS_IN: dict[str, tuple[Program, sw.Precision]] = {
    **{name: (KEPT if "kept" in name else WORDS, each) for name, each in PRECISIONS.items()},
    "a frozen base": program(Adapted),
    "a frozen base in bfloat16": program(Adapted, "bfloat16"),
    "a narrow model in float32": program(lambda: Adapted().bfloat16(), "float32"),
    "all but one frozen": program(lambda: Adapted(one=True)),
    "several dtypes": program(MixedDtypes),
    "two dtypes by turns": program(KeptHere, "bfloat16", keep=("kept",)),
    "float64": (WORDS.in_float64(), sw.Precision()),
    "built in bfloat16": (replace(WORDS, make=lambda: words().bfloat16()), sw.Precision()),
}
"""Frozen, narrow and wide: several in one model."""


@pytest.mark.parametrize(
    ("name", "layout"),
    # Each with some layouts: all layouts with every third.
    [(name, layout) for at, name in enumerate(PROGRAMS_IN) for layout in list(LAYOUTS)[at % 3 :: 3]],
)
@pytest.mark.parametrize("is_other", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_a_step_rounds_where_it_is_written_by_hand(name: str, layout: str, is_other: bool) -> None:
    made, asked = PROGRAMS_IN[name]
    settings: dict[str, Any] = {"k": 1 if is_other else 2, "bucket_bytes": 1 << 20 if is_other else 100}
    if name in PRECISIONS:  # others may have a norm in float64, which has no one order
        settings = {"k": 3} if is_other else {"k": 1, "clip": 0.3}
    plan = plan_of(made, **{**LAYOUTS[layout], **settings}, precision=asked)
    got = train(made, plan)
    for state in got.states:
        for key, each in made.make().named_parameters():
            master = None if each.requires_grad else state.get(f"optimizer/{key}/master")
            assert master is None or torch.equal(master, each.to(master.dtype)), key
    assert_same(got, in_rank_order(made, plan))


@pytest.mark.parametrize(
    ("optimizer", "layout", "k"),
    covering((adamw, sgd), [each for each in LAYOUTS if each != "replicas"], (1, 2), strength=2),
)
def test_complex_parameters_train_as_in_one_process(optimizer: Any, layout: str, k: int) -> None:
    made = replace(program(Complex)[0], optimizer=optimizer)
    plan = plan_of(made, **LAYOUTS[layout], k=k, clip=0.5)
    got, wanted = train(made, plan), expected(made, k * plan.mesh.num_data_ranks, clip=0.5)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-5)
    for state, other in zip(got.states, wanted.states, strict=True):
        torch.testing.assert_close(state, other, rtol=1e-5, atol=1e-6)
