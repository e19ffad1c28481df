"""Small states that several ranks hold together, what they are as a whole, and what lies in a folder of saves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Address, LocalStore
from shardwise.checkpoint.saves import list_saves, strays
from shardwise.comm import Channel
from shardwise.space import Piece

Whole = dict[str, torch.Tensor]


def whole_state(seed: int) -> Whole:
    """Whole tensors: some that ranks share, some that all have, one without elements."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(7, 5, generator=numbers),
        "flat": torch.randn(11, 3, generator=numbers).bfloat16(),
        "same": torch.randint(0, 1 << 40, (6,), generator=numbers),
        "scalar": torch.randn((), generator=numbers, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }


def empty_state() -> Whole:
    """Tensors to load `whole_state` into."""
    return {name: torch.full_like(tensor, 99) for name, tensor in whole_state(0).items()}


def share_of_state(whole: Whole, rank: int, size: int) -> dict[Piece, torch.Tensor]:
    """What a rank holds: some rows, a run of the elements, and all of the small ones."""
    pieces: dict[Piece, torch.Tensor] = {}
    for name, tensor in whole.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        if name == "rows":
            first, last = 7 * rank // size, 7 * (rank + 1) // size
            piece = Piece(name=name, dtype=dtype, global_shape=shape, offset=(first, 0), shape=(last - first, 5))
            pieces[piece] = tensor[first:last].clone()
        elif name == "flat":
            run = 33 * rank // size, 33 * (rank + 1) // size
            piece = Piece(name=name, dtype=dtype, global_shape=shape, run=run)
            pieces[piece] = tensor.view(-1)[run[0] : run[1]].clone()
        else:
            pieces[Piece(name=name, dtype=dtype, global_shape=shape)] = tensor.clone()
    return pieces


def save_state(path: Address, seed: int, *, size: int = 1, layout: Literal["pieces", "whole"] = "pieces") -> None:
    """A save of `whole_state(seed)` by so many ranks."""

    def run(channel: Channel) -> None:
        state = share_of_state(whole_state(seed), channel.rank, size)
        sw.save(path, state, extra={"state": seed}, step=10 * seed, layout=layout, channel=channel)

    sw.simulate(size, run)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Equal to the bit, names, dtypes and shapes included."""
    return one.keys() == other.keys() and all(same_tensor(tensor, other[name]) for name, tensor in one.items())


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(bits(one), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, row-major."""
    raw = tensor.detach().resolve_conj().view(unsigned(tensor.dtype))
    return raw.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def unsigned(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size, of which torch can copy and fill every tensor."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[dtype.itemsize]


def loaded(path: Path, **arguments: object) -> tuple[Whole, dict[str, object]]:
    """The newest save as one process loads it, and its extra."""
    target = empty_state()
    extra = checkpoint.load(path, target, **arguments)  # type: ignore[arg-type]
    return target, extra


def rubbish(path: Path) -> list[str]:
    """Files in a folder of saves that no committed save owns."""
    store = LocalStore(path)
    listing = list_saves(store)
    torn = [name for number in listing.torn for name in listing.files[number]]
    return torn + [name for number in listing.committed for name in strays(store, listing, number)]


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
