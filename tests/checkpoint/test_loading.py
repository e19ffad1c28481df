"""Any pieces of any tensors on any ranks come back in any other pieces on any other ranks; mistakes are refused."""

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Box, Piece
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import bits, same_tensor, unsigned
from tests.engine.refusals import same_error_everywhere
from tests.properties import tried
from tests.refusals import Refusals

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


def blank(held: Held) -> None:
    """Other values in the same memory."""
    for tensor in [each for pieces in held for each in pieces.values() if each.numel()]:
        tensor.view(unsigned(tensor.dtype)).fill_(1)


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
    with small_limits(limit_bytes, block_bytes=block_bytes):
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


def test_a_state_of_nothing_is_saved_and_loaded(tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        sw.save(tmp_path, {}, extra={"at": 3}, channel=channel)
        assert sw.load(tmp_path, {}, channel=channel) == {"at": 3}

    sw.simulate(2, run)
    assert checkpoint.verify(tmp_path).good


STATE = {"w": torch.arange(6.0).view(2, 3)}


def saved(folder: Path, state: Mapping[str, torch.Tensor] = STATE, **options: Any) -> Path:
    sw.save(folder, dict(state), **options)
    return folder


def on_ranks(size: int, call: Callable[[Channel], object]) -> None:
    raise same_error_everywhere(size, call)


def cast(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    saved(folder, {"w": torch.ones(3, dtype=stored)})
    sw.load(folder, {"w": torch.zeros(3, dtype=wanted)}, cast=True)


def of_another_option(folder: Path, **option: Any) -> None:
    for step in (1, 2):
        saved(folder, step=step)
    target = {"w": torch.zeros(2, 3)}
    on_ranks(
        3,
        lambda channel: sw.load(
            folder, target, channel=channel, **{"step": 1, **(option if channel.rank == 1 else {})}
        ),
    )


def linked(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def piped(folder: Path) -> Path:
    (data,) = saved(folder).glob("*/*.safetensors")
    data.unlink()
    os.mkfifo(data)
    return data.parents[1]


def big_endian(folder: Path) -> Path:
    (folder / "be.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    return folder / "be.gguf"


def foreign(folder: Path) -> Path:
    safetensors.torch.save_file(STATE, folder / "model.safetensors")
    return folder


def shared(folder: Path) -> None:
    saved(folder, {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4, 4)})
    base = torch.zeros(16)
    target = {"a": base[:4], "b": base[2:6], "c": base.as_strided((4, 4), (1, 1))}
    try:
        sw.load(folder, target)
    finally:
        assert not base.any(), "nothing of them is written"


MANY: Any = {f"w{at}": torch.zeros(64, 64) for at in range(200)}
NO: Any = None

REFUSED = Refusals(
    "checkpoint.calls",
    {
        # What differs between ranks.
        "another step": lambda folder: of_another_option(folder, step=2),
        "another verify": lambda folder: of_another_option(folder, verify="first"),
        "another strict": lambda folder: of_another_option(folder, strict=False),
        "another cast": lambda folder: of_another_option(folder, cast=True),
        # Options.
        "verify": lambda folder: sw.load(saved(folder), dict(STATE), verify=cast_to_any("First")),
        "strict": lambda folder: sw.load(saved(folder), dict(STATE), strict=cast_to_any("no")),
        "a step of a load": lambda folder: sw.load(saved(folder), dict(STATE), step=cast_to_any("3")),
        "a step that is not there": lambda folder: sw.load(saved(folder, step=5), dict(STATE), step=7),
        "a step of a save": lambda folder: on_ranks(
            2, lambda channel: sw.save(folder, STATE, step=cast_to_any(2.5), channel=channel)
        ),
        "a bool as step": lambda folder: sw.save(folder, STATE, step=True),
        "a list as extra": lambda folder: sw.save(folder, STATE, extra=cast_to_any([1])),
        "no rewrite": lambda folder: AsyncSaver(folder, rewrite=cast_to_any("a -> c")),
        "keep none": lambda folder: sw.save(folder, STATE, keep=0),
        "keep a bool": lambda folder: AsyncSaver(folder, keep=True),
        "keep every none": lambda folder: sw.save(folder, STATE, keep=1, keep_every=0),
        "keep every half": lambda folder: sw.save(folder, STATE, keep=1, keep_every=cast_to_any(2.5)),
        "keep every alone": lambda folder: AsyncSaver(folder, keep_every=2),
        "prune to none": lambda folder: checkpoint.prune(saved(folder), keep=0),
        # Places.
        "no path": lambda: sw.save(NO, STATE),
        "a number as path": lambda: sw.load(cast_to_any(5), dict(STATE)),
        "bytes as path": lambda: sw.load(cast_to_any(b"bytes"), dict(STATE)),
        "an empty path": lambda: sw.save("", STATE),
        "a path with a nul": lambda: sw.save("a\0b", STATE),
        "a state as path": lambda folder: sw.save(MANY, cast_to_any(folder / "a")),
        "a state as path of a load": lambda folder: sw.load(MANY, cast_to_any(folder / "a")),
        "a state as path to open": lambda: checkpoint.open(MANY),
        "a state as an option": lambda folder: sw.load(saved(folder), {}, verify=MANY),
        "a state as a step": lambda folder: sw.save(folder, {}, step=MANY),
        "nothing there": lambda folder: sw.load(folder / "nothing", dict(STATE)),
        "nothing there to open": lambda folder: checkpoint.open(folder / "nothing"),
        "an empty folder": lambda folder: checkpoint.verify(folder),
        "a link to nothing": lambda folder: sw.save(linked(folder), STATE),
        "another format": lambda folder: sw.save(foreign(folder), STATE),
        "a pipe": lambda folder: sw.load(piped(folder), dict(STATE)),
        "big-endian": lambda folder: checkpoint.open(big_endian(folder)),
        # Tensors.
        "a name that no file can hold": lambda folder: sw.save(folder, {"\ud800": torch.ones(1)}),
        "shared memory": shared,
        "floats as integers": lambda folder: cast(folder, torch.float32, torch.int32),
        "floats as truth": lambda folder: cast(folder, torch.float32, torch.bool),
        "complex as real": lambda folder: cast(folder, torch.complex64, torch.float32),
    },
)


def cast_to_any(value: object) -> Any:
    return value


@pytest.mark.parametrize("case", REFUSED)
def test_what_users_do_by_mistake_is_refused_in_words(case: str) -> None:
    REFUSED.check(case)
    assert len(REFUSED.said(case)) < 5000, "a state is not printed"


def test_extra_that_holds_itself_is_refused(tmp_path: Path) -> None:
    extra: dict[str, Any] = {}
    extra["deep"] = extra
    with pytest.raises(CheckpointError, match="extra cannot be written as JSON"):
        sw.save(tmp_path, STATE, extra=extra)


def test_targets_that_interleave_share_nothing_and_any_other_name_is_kept(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.ones(4), "b": torch.ones(4), "😀": torch.ones(1).expand(4)})
    columns = torch.zeros(4, 4)
    sw.load(tmp_path, {"a": columns[:, 0], "b": columns[:, 1]}, strict=False)
    assert columns.sum() == 8
    assert torch.equal(checkpoint.open(tmp_path).read("😀"), torch.ones(4))
