"""Targets that cannot be written are found before the first of them is written, whatever the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import shardwise as sw
from shardwise.checkpoint.state_pieces import Held, check_targets
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.engine.refusals import same_error_everywhere
from tests.properties import tried
from tests.refusals import Refusals


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 2)


def mapped(folder: Path) -> torch.Tensor:
    (folder / "array").write_bytes(bytes(16))
    return torch.from_numpy(numpy.memmap(folder / "array", dtype=numpy.float32, mode="r", shape=(2, 2)))


def freed() -> torch.Tensor:
    tensor = torch.zeros(2, 2)
    tensor.untyped_storage().resize_(0)
    return tensor


def batched() -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def see(row: torch.Tensor) -> torch.Tensor:
        seen.append(row)
        return row

    torch.vmap(see)(torch.zeros(3, 2, 2))
    return seen[0]


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 2)


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("not me")


def refused(folder: Path, make: Callable[[], torch.Tensor], *, rank: int = 0, size: int = 1) -> None:
    """On one rank `b` is such a tensor: all ranks are told, and nothing of any rank is written."""
    path = save(folder, torch.zeros(1))
    targets = [{"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(3)} for _ in range(size)]
    targets[rank]["b"] = make()
    error = same_error_everywhere(size, lambda channel: sw.load(path, targets[channel.rank], channel=channel))
    assert not any(each[name].any() for each in targets for name in "ac")
    raise error


REFUSED = Refusals(
    "checkpoint.targets",
    {
        "inference": lambda folder: refused(folder, inference),
        "inference on another rank": lambda folder: refused(folder, inference, rank=1, size=3),
        "mapped for reading": lambda folder: refused(folder, lambda: mapped(folder)),
        "memory given back": lambda folder: refused(folder, freed),
        "expanded": lambda folder: refused(folder, lambda: torch.zeros(2).expand(2, 2)),
        "interlocking rows": lambda folder: refused(folder, lambda: torch.zeros(9).as_strided((2, 2), (3, 3))),
        "meta": lambda folder: refused(folder, lambda: torch.zeros(2, 2, device="meta")),
        "sparse": lambda folder: refused(folder, lambda: torch.zeros(2, 2).to_sparse()),
        "nested": lambda folder: refused(folder, lambda: torch.nested.nested_tensor([torch.zeros(2)] * 2)),
        "batched": lambda folder: refused(folder, batched),
        "fake": lambda folder: refused(folder, fake_tensor),
        "masked": lambda folder: refused(folder, lambda: masked_tensor(torch.zeros(2, 2), torch.ones(2, 2).bool())),
        "refusing": lambda folder: refused(folder, lambda: torch.zeros(2, 2).as_subclass(Refusing)),
    },
)

GOOD: dict[str, Callable[[], torch.Tensor]] = {
    "leaf": lambda: torch.zeros(2, 2, requires_grad=True),
    "result": lambda: torch.zeros(2, 2, requires_grad=True) * 2,
    "view of a leaf": lambda: torch.zeros(4, 2, requires_grad=True)[:2],
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2, 2)),
    "conjugated": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.zeros(2, 2).T,
    "every second row": lambda: torch.zeros(4, 2)[::2],
    "shared": lambda: torch.zeros(2, 2).share_memory_(),
    "of a locked array": lambda: torch.from_numpy(numpy.zeros((2, 2), dtype=numpy.float32)),
}


def save(folder: Path, like: torch.Tensor) -> Path:
    values = torch.arange(1.0, 5.0).view(2, 2).to(like.dtype)
    sw.save(folder / "saves", {"a": torch.ones(3), "b": values, "c": torch.ones(3)}, channel=alone())
    return folder / "saves"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_a_target_that_cannot_be_written_refuses_before_others_are(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("kind", GOOD)
def test_every_other_kind_of_tensor_is_filled_and_saved(kind: str, tmp_path: Path) -> None:
    tensor = GOOD[kind]()
    path = save(tmp_path, tensor)
    sw.load(path, {"a": torch.zeros(3), "b": tensor, "c": torch.zeros(3)}, channel=alone())
    expected = torch.arange(1.0, 5.0).view(2, 2).to(tensor.dtype)
    assert torch.equal(tensor.detach().resolve_conj().resolve_neg(), expected)
    sw.save(tmp_path / "again", {"b": tensor})
    assert torch.equal(sw.checkpoint.open(tmp_path / "again").read("b"), expected)


def test_an_inference_tensor_is_filled_in_inference_mode(tmp_path: Path) -> None:
    path = save(tmp_path, torch.zeros(1))
    target = {"a": torch.zeros(3), "b": inference(), "c": torch.zeros(3)}
    with torch.inference_mode():
        sw.load(path, target, channel=alone())
    assert target["b"].tolist() == [[1, 2], [3, 4]]


@tried(40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
def test_indices_that_share_a_place_are_found_exactly(dims: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.arange(200).as_strided(shape, strides)
    held = Held(tensors={Piece(name="x", dtype="int64", global_shape=tuple(shape)): tensor})
    if len(torch.unique(tensor)) < tensor.numel():
        with pytest.raises(CheckpointError, match="share memory"):
            check_targets(held)
    else:
        check_targets(held)
