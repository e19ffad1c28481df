"""Any pieces of any tensors on any ranks come back in any other pieces on any other ranks, to the bit."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import arrangement, read_rounds, reading, safetensors_files, saving, windows
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Box, Piece
from tests.checkpoint.small_states import bits, same, same_tensor, unsigned
from tests.properties import tried

SMALL = [
    (read_rounds, each)
    for each in ("ROUND_BYTES", "OWN_BYTES", "IN_PLACE_BYTES", "ONE_ROUND_BYTES", "ONE_ROUND_BYTES_ALONE")
]
SMALL += [
    (windows, "WINDOW_BYTES"),
    (safetensors_files, "_CHUNK_BYTES"),
    (reading, "_STRETCH_BYTES"),
    (reading, "_PART_BYTES"),
    (safetensors_files, "_BOUNCE_BYTES"),
    (arrangement, "_SPLIT_BYTES"),
]
"""Limits that small states do not reach by themselves, in bytes."""

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Held = list[dict[Piece, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_synced() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def filled(shape: tuple[int, ...], dtype: str, numbers: Random) -> torch.Tensor:
    """A tensor of random bits; truth values are 0 or 1."""
    num_bytes = math.prod(shape) * ITEMSIZE_BYTES[dtype]
    data = [numbers.randrange(2 if dtype == "bool" else 256) for _ in range(num_bytes)]
    return torch.tensor(data, dtype=torch.uint8).view(dtype_of(dtype)).view(shape)


def boxes(shape: tuple[int, ...], numbers: Random, num_cuts: int) -> list[Box]:
    """Disjoint boxes that make up a tensor: cut again and again anywhere."""
    found = [Box((0,) * len(shape), shape)]
    for _ in range(num_cuts if shape else 0):
        box = found.pop(numbers.randrange(len(found)))
        dim = numbers.randrange(len(shape))
        at = numbers.randint(0, box.shape[dim])
        first = tuple(at if each == dim else size for each, size in enumerate(box.shape))
        rest = tuple(size - at if each == dim else size for each, size in enumerate(box.shape))
        offset = tuple(start + at if each == dim else start for each, start in enumerate(box.offset))
        found += [Box(box.offset, first), Box(offset, rest)]
    return found


def partition(name: str, tensor: torch.Tensor, num_ranks: int, numbers: Random) -> list[dict[Piece, torch.Tensor]]:
    """Who holds what of a tensor: boxes, or runs of boxes, some of them on several ranks, in memory of any order."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    held: Held = [{} for _ in range(num_ranks)]
    for box in boxes(shape, numbers, numbers.choice((0, 0, 1, 2, 4))):
        num_elements = math.prod(box.shape)
        cuts = sorted(numbers.randint(0, num_elements) for _ in range(numbers.choice((0, 0, 1, 3))))
        for start, stop in zip([0, *cuts], [*cuts, num_elements], strict=True):
            run = None if not cuts and numbers.random() < 0.7 else (start, stop)
            piece = Piece(name=name, dtype=dtype, global_shape=shape, offset=box.offset, shape=box.shape, run=run)
            part = tensor[box.slices()]
            part = part if run is None else part.reshape(-1)[start:stop]
            for rank in numbers.sample(range(num_ranks), numbers.choice((1, 1, 1, num_ranks))):
                held[rank][piece] = in_any_memory(part, numbers)
    return held


def in_any_memory(part: torch.Tensor, numbers: Random) -> torch.Tensor:
    """The same values, in memory with another order of dims, with gaps, or somewhere inside of other memory."""
    if not part.numel():
        return part.clone()
    how = numbers.randrange(4)
    if how == 0 or not part.dim():
        return part.clone(memory_format=torch.contiguous_format)
    raw = part.contiguous().view(unsigned(part.dtype)) if part.dim() else part
    if how == 1:  # transposed
        order = numbers.sample(range(raw.dim()), raw.dim())
        back = [order.index(dim) for dim in range(raw.dim())]
        return raw.permute(order).clone(memory_format=torch.contiguous_format).permute(back).view(part.dtype)
    room = torch.zeros([size + 3 for size in raw.shape], dtype=raw.dtype)
    inner = room[tuple(slice(1, 1 + size) for size in raw.shape)]
    if how == 2 and raw.dim() == 1:  # every other element
        inner = torch.zeros(2 * raw.numel() + 1, dtype=raw.dtype)[1::2]
    inner.copy_(raw)
    return inner.view(part.dtype)


def blank(held: Held) -> Held:
    """The same pieces, in the same kind of memory, with other values."""
    other: Held = []
    for pieces in held:
        other.append({})
        for piece, tensor in pieces.items():
            other[-1][piece] = tensor
            for view in raw_views(tensor):
                view.fill_(1)
    return other


def raw_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.view(unsigned(tensor.dtype))] if tensor.numel() else []


def check(held: Held, whole: dict[str, torch.Tensor]) -> None:
    """Every element against the whole tensors."""
    for pieces in held:
        for piece, tensor in pieces.items():
            expected = whole[piece.name][piece.box.slices()].reshape(-1)[piece.elements.start : piece.elements.stop]
            assert torch.equal(bits(tensor), bits(expected)), piece


shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5]), max_size=5).map(tuple)
names = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["", "a b", "a/b", "w", "w[0:2]", "w[0:2] run 0:1", "w" * 3000, "__metadata__", "optimizer/w/master", "ä" * 40, "."]
)


@st.composite
def states(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a few tensors."""
    chosen = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    return [(name, draw(st.sampled_from(sorted(ITEMSIZE_BYTES))), draw(shapes)) for name in chosen]


@tried(50)
@given(
    state=states(),
    seed=st.integers(0, 1 << 32),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layout=st.sampled_from(["pieces", "whole"]),
    block_bytes=st.sampled_from([16, 32, 64, 1 << 18]),
    limit_bytes=st.sampled_from([16, 48, 100, 1 << 20]),
    verify=st.sampled_from([True, False, "first"]),
)
def test_any_pieces_come_back_as_any_others(
    state: list[tuple[str, str, tuple[int, ...]]],
    seed: int,
    sizes: tuple[int, int],
    layout: Literal["pieces", "whole"],
    block_bytes: int,
    limit_bytes: int,
    verify: Literal[True, False, "first"],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    numbers = Random(seed)
    path = tmp_path_factory.mktemp("save")
    whole = {name: filled(shape, dtype, numbers) for name, dtype, shape in state}
    source, target = (
        [merged(parts) for parts in zip(*(partition(*each, size, numbers) for each in whole.items()), strict=True)]
        for size in sizes
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "BLOCK_BYTES", block_bytes)
        for module, limit in SMALL:
            patch.setattr(module, limit, limit_bytes)
        sw.simulate(sizes[0], lambda channel: sw.save(path, source[channel.rank], layout=layout, channel=channel))
        assert checkpoint.verify(path).findings == ()
        blank(target)
        sw.simulate(sizes[1], lambda channel: sw.load(path, target[channel.rank], verify=verify, channel=channel))
        check(target, whole)
        check_catalogue(path, whole, numbers)


def merged(parts: tuple[dict[Piece, torch.Tensor], ...]) -> dict[Piece, torch.Tensor]:
    return {piece: tensor for each in parts for piece, tensor in each.items()}


def check_catalogue(path: Path, whole: dict[str, torch.Tensor], numbers: Random) -> None:
    """Whole tensors, and any box of them."""
    catalogue = checkpoint.open(path)
    assert {name: tuple(stored.shape) for name, stored in catalogue.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }
    for name, tensor in whole.items():
        assert same_tensor(catalogue.read(name), tensor), name
        box = numbers.choice(boxes(tuple(tensor.shape), numbers, 2))
        expected = tensor[box.slices()]
        assert same_tensor(catalogue.read(name, box, verify=numbers.random() < 0.5), expected), (name, box)


def held_transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def held_with_an_offset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(3, dtype=tensor.dtype), tensor.reshape(-1)])[3:].view(tensor.shape)


def held_with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(2 * tensor.shape[0], tensor.shape[1] + 1, dtype=tensor.dtype)
    room[::2, 1:] = tensor
    return room[::2, 1:]


def held_conjugated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj().clone().conj()


def held_as_a_parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor.clone())


MEMORIES = [held_transposed, held_with_an_offset, held_with_gaps, held_conjugated, held_as_a_parameter]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("target_memory", MEMORIES)
@pytest.mark.parametrize("source_memory", MEMORIES)
def test_tensors_in_any_memory_are_saved_and_filled(
    source_memory: object, target_memory: object, verify: bool, tmp_path: Path
) -> None:
    values = torch.randn(6, 5, dtype=torch.complex64)
    source, target = source_memory(values), target_memory(torch.zeros_like(values))  # type: ignore[operator]
    checkpoint.save(tmp_path, {"w": source})
    assert torch.equal(checkpoint.open(tmp_path).read("w"), values)
    checkpoint.load(tmp_path, {"w": target}, verify=verify)
    assert torch.equal(target.resolve_conj(), values)


def test_targets_whose_elements_share_memory_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"w": torch.ones(4), "other": torch.ones(2)})
    target = {"w": torch.zeros(1).expand(4), "other": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"w\[0:4\] would be read into .* whose elements share memory"):
        checkpoint.load(tmp_path, target)
    assert same(target, {"w": torch.zeros(4), "other": torch.zeros(2)})
    checkpoint.save(tmp_path, {"w": torch.ones(1).expand(4)})
    assert torch.equal(checkpoint.open(tmp_path).read("w"), torch.ones(4))


def test_names_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="half of a surrogate pair, which no file can hold; rename it"):
        checkpoint.save(tmp_path, {"\ud800": torch.ones(1)})
    checkpoint.save(tmp_path, {"😀": torch.ones(1)})
    assert list(checkpoint.open(tmp_path).tensors) == ["😀"]


def test_a_state_of_nothing_is_saved_and_loaded(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        sw.save(tmp_path, {}, extra={"at": 3}, channel=channel)
        assert sw.load(tmp_path, {}, channel=channel) == {"at": 3}

    sw.simulate(2, run)
    assert checkpoint.verify(tmp_path).good
