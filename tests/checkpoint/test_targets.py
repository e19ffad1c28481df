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
from shardwise.checkpoint.state_pieces import _shares_within, check_targets
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.properties import tried


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


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, 2)


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("not me")


BAD: dict[str, tuple[Callable[[Path], torch.Tensor], str]] = {
    "inference": (lambda folder: inference(), "b[0:2, 0:2] would be read into an inference tensor"),
    "mapped for reading": (mapped, "into read-only memory, such as a mapped file"),
    "memory given back": (lambda folder: freed(), "'b' has no memory at present"),
    "expanded": (lambda folder: torch.zeros(2).expand(2, 2), "whose elements share memory (expand())"),
    "interlocking rows": (lambda folder: torch.zeros(9).as_strided((2, 2), (3, 3)), "whose elements share memory"),
    "meta": (lambda folder: torch.zeros(2, 2, device="meta"), "'b' is on the meta device"),
    "sparse": (lambda folder: torch.zeros(2, 2).to_sparse(), "'b' has layout torch.sparse_coo"),
    "nested": (lambda folder: torch.nested.nested_tensor([torch.zeros(2)] * 2), "'b' is nested"),
    "batched": (lambda folder: batched(), "'b' refuses to be read (RuntimeError"),
    "fake": (lambda folder: fake(), "into a FakeTensor, which cannot be written"),
    "masked": (
        lambda folder: masked_tensor(torch.zeros(2, 2), torch.ones(2, 2).bool()),
        "into a MaskedTensor, which cannot be written",
    ),
    "refusing": (lambda folder: torch.zeros(2, 2).as_subclass(Refusing), "'b' refuses to be read (TypeError: not me)"),
}

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
@pytest.mark.parametrize("kind", BAD)
def test_a_target_that_cannot_be_written_refuses_before_others_are(kind: str, tmp_path: Path) -> None:
    make, said = BAD[kind]
    path = save(tmp_path, torch.zeros(1))
    target = {"a": torch.zeros(3), "b": make(tmp_path), "c": torch.zeros(3)}
    with pytest.raises(CheckpointError) as caught:
        sw.load(path, target, channel=alone())
    assert said in str(caught.value)
    assert not target["a"].any()
    assert not target["c"].any()


@pytest.mark.parametrize("kind", GOOD)
def test_every_other_kind_of_target_is_filled(kind: str, tmp_path: Path) -> None:
    tensor = GOOD[kind]()
    path = save(tmp_path, tensor)
    sw.load(path, {"a": torch.zeros(3), "b": tensor, "c": torch.zeros(3)}, channel=alone())
    assert torch.equal(tensor.detach().resolve_conj().resolve_neg(), torch.arange(1.0, 5.0).view(2, 2).to(tensor.dtype))


def test_an_inference_tensor_is_filled_in_inference_mode(tmp_path: Path) -> None:
    path = save(tmp_path, torch.zeros(1))
    target = {"a": torch.zeros(3), "b": inference(), "c": torch.zeros(3)}
    with torch.inference_mode():
        sw.load(path, target, channel=alone())
    assert target["b"].tolist() == [[1, 2], [3, 4]]


def test_every_rank_says_which_target_of_any_rank_cannot_be_written(tmp_path: Path) -> None:
    path = save(tmp_path, torch.zeros(1))
    targets = [{"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros(3)} for _ in range(3)]
    targets[1]["b"] = inference()
    told = []

    def run(channel: sw.Channel) -> None:
        try:
            sw.load(path, targets[channel.rank], channel=channel)
        except CheckpointError as error:
            told.append(str(error))

    sw.simulate(3, run)
    assert len(told) == 3
    assert len(set(told)) == 1
    assert "rank 1: b[0:2, 0:2] would be read into an inference tensor" in told[0]
    assert not any(each.any() for target in targets for each in target.values())


@tried(40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
def test_indices_that_share_a_place_are_found_exactly(dims: list[tuple[int, int]]) -> None:
    shape, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.arange(200).as_strided(shape, strides)
    assert _shares_within(tensor) == (len(torch.unique(tensor)) < tensor.numel())
    piece = Piece(name="x", dtype="int64", global_shape=tuple(shape))
    from shardwise.checkpoint.state_pieces import Held

    held = Held(tensors={piece: tensor})
    if len(torch.unique(tensor)) < tensor.numel():
        with pytest.raises(CheckpointError, match="share memory"):
            check_targets(held)
    else:
        check_targets(held)
