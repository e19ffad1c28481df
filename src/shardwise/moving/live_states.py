"""States: `{Piece: Tensor}` on some ranks becomes `{Piece: Tensor}` on others."""

from collections.abc import Iterator, Mapping, MutableMapping

import torch

from shardwise.comm import Channel
from shardwise.comm.given_channel import given_or_default
from shardwise.comm.local_tensors import dtype_name, extent, first_shared, is_dtensor, share_elements, torch_dtype
from shardwise.errors import PlanError
from shardwise.moving.mover import carry_out_plan
from shardwise.moving.piece_exchange import Gathering, consent
from shardwise.routes.reshard import DEFAULT_MAX_BYTES
from shardwise.space import Piece


def reshard(
    source: Mapping[Piece, torch.Tensor],
    target: Mapping[Piece, torch.Tensor | None],
    channel: Channel | None = None,
    *,
    free_sources: bool = False,
    cast: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    compare: bool = True,
) -> dict[Piece, torch.Tensor]:
    """Fill the pieces that this rank wants out of those that all ranks hold; returns them with their tensors.

    source: what this rank holds, maybe nothing; tensors of the piece's shape with any strides, or flat.
    target: the pieces that it wants, maybe none, with tensors that are written in place. A None is allocated on the
        channel's device when its first bytes come: flat for a piece with a run, else of the piece's shape. Memory that
        is written is none that is read, and none that is written for another piece.
    channel: the ranks that hold or want something; all of them call this. Default: see `default_channel`.
    free_sources: take each entry out of `source` after its last use, so that its memory can go; at the end `source` is
        empty.
    cast: targets may be of other dtypes than what is held; the narrower of the two travels.
    max_bytes: the memory of a rank for messages, in addition to sources and targets.
    compare: refuse pieces that ranks hold with different values, as far as samples of them show it. With False one of
        them counts; the same on all ranks.

    What a rank wants and holds itself is copied there; else a replica comes from the holder that has least to send.
    Unrequested elements are not moved. Outside of autograd; see `reshard_tensor`.
    Raises PlanError, with every problem in it, or MismatchError, the same on all ranks, before anything is moved.
    Where a rank is lost on the way (PeerError), targets have been written in part and freed sources are gone.
    """
    with given_or_default(channel, "a reshard") as used:
        return reshard_told(
            source, target, used, free_sources=free_sources, cast=cast, max_bytes=max_bytes, compare=compare
        )


def reshard_told(
    source: Mapping[Piece, torch.Tensor],
    target: Mapping[Piece, torch.Tensor | None],
    channel: Channel,
    gathering: Gathering | None = None,
    *,
    free_sources: bool = False,
    cast: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    compare: bool = True,
) -> dict[Piece, torch.Tensor]:
    """As `reshard`. Texts of pieces that `gathering` knows from an earlier call do not travel again."""
    findings = [*_wrong_arguments(source, target, max_bytes), *findings_of(source, target)]
    if free_sources and not isinstance(source, MutableMapping):
        findings.append(f"free_sources takes entries out of the source, but it is a {type(source).__name__}")
    # A rank with wrong arguments takes part all the same, with nothing, and says why: all raise then, and none
    # waits.
    plan, _ = consent(
        channel,
        [] if findings else list(source),
        [] if findings else list(target),
        max_bytes=DEFAULT_MAX_BYTES if findings else max_bytes,
        cast=cast,
        refusal=PlanError(*findings) if findings else None,
        replicas=source if compare else None,
        gathering=gathering,
    )
    filled = dict(target)

    def room(piece: Piece) -> torch.Tensor:
        tensor = filled[piece]
        if tensor is None:
            dtype = torch_dtype(piece.dtype)
            tensor = filled[piece] = torch.empty(stored_shape(piece), dtype=dtype, device=channel.device)
        return tensor

    def let_go(piece: Piece) -> None:
        if isinstance(source, MutableMapping):
            # The entry is the last thing that holds the tensor, unless the caller keeps it elsewhere.
            del source[piece]

    carry_out_plan(
        plan,
        channel,
        sources=list(source),
        targets=list(target),
        take=source.__getitem__,
        room=room,
        let_go=let_go if free_sources else None,
    )
    return {piece: room(piece) for piece in target}  # those without elements are made only now


def stored_shape(piece: Piece) -> tuple[int, ...]:
    """The shape of a tensor that holds just the piece."""
    return piece.shape if piece.run is None else (piece.num_elements,)


def _wrong_arguments(source: object, target: object, max_bytes: object) -> list[str]:
    """What is of another kind than `reshard` takes."""
    found = [
        f"the {name} is a {type(given).__name__}; give a dict of tensors by Piece"
        for name, given in (("source", source), ("target", target))
        if not isinstance(given, Mapping)
    ]
    if type(max_bytes) is not int:
        found.append(f"max_bytes is {max_bytes!r}, a {type(max_bytes).__name__}; give a whole number of bytes")
    return found


def findings_of(
    source: Mapping[Piece, torch.Tensor], target: Mapping[Piece, torch.Tensor | None], *, renamed: bool = False
) -> list[str]:
    """What of this rank's tensors does not fit their pieces.

    renamed: a piece of the target has other elements than the piece of the source that is called like it.
    """
    if not (isinstance(source, Mapping) and isinstance(target, Mapping)):
        return []
    found = [text for piece, tensor in source.items() for text in _faults(piece, tensor, "held")]
    for piece, tensor in target.items():
        if isinstance(piece, Piece) and tensor is None:
            if not isinstance(getattr(torch, piece.dtype, None), torch.dtype):
                found.append(f"{piece} is wanted as {piece.dtype!r}, which is no dtype of torch")
            continue
        faults = list(_faults(piece, tensor, "wanted"))
        found += faults
        if not faults and tensor is not None and _folds(tensor):
            found.append(f"{piece} would be written into a tensor whose elements share memory (expanded); clone() it")
    # Faulty entries may have no memory that could be compared.
    if found:
        return found
    written = {
        piece: tensor
        for piece, tensor in target.items()
        # What stays as it is.
        if tensor is not None and (renamed or piece not in source or not _are_one(tensor, source[piece]))
    }
    return [*_read_and_written(source, written), *_written_twice(written)] if written else []


def _written_twice(written: Mapping[Piece, torch.Tensor]) -> Iterator[str]:
    """Memory that several targets would write."""
    pieces = list(written)
    # Sorted by where they begin, tensors that overlap are neighbours: groups are looked at closely, not all pairs.
    spans = [(str(each.device), *extent(each), at) for at, each in enumerate(written.values()) if each.numel()]
    together: list[int] = []
    device_of, end = "", 0
    for device, start, stop, at in [*sorted(spans), ("", 0, 0, -1)]:
        if together and (device != device_of or start >= end):
            if shared := first_shared([written[pieces[each]] for each in together]):
                one, other = (pieces[together[each]] for each in shared)
                yield f"{one} and {other} would be written into memory that they share; give each its own tensor"
            together, end = [], 0
        together.append(at)
        device_of, end = device, max(end, stop)


def _read_and_written(source: Mapping[Piece, torch.Tensor], written: Mapping[Piece, torch.Tensor]) -> Iterator[str]:
    """Memory that would be overwritten before it was read."""
    entries = [*((*each, False) for each in source.items()), *((*each, True) for each in written.items())]
    spans = sorted(
        (str(tensor.device), *extent(tensor), at) for at, (_, tensor, _) in enumerate(entries) if tensor.numel()
    )
    # A sweep over memory: those that end before the next one begins are dropped, so that few pairs are compared.
    reaching: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    """Of what is read, and of what is written: where it ends, and which it is, as long as a later one may overlap."""
    last_device = ""
    for device, start, stop, at in spans:
        piece, tensor, is_written = entries[at]
        if device != last_device:
            reaching, last_device = {False: [], True: []}, device
        others = reaching[not is_written] = [each for each in reaching[not is_written] if each[0] > start]
        for _, other_at in others:
            other_piece, other, _ = entries[other_at]
            if share_elements(tensor, other):
                over, read = (piece, other_piece) if is_written else (other_piece, piece)
                yield f"{over} would be written into memory of {read}, which is read; clone() one"
        reaching[is_written].append((stop, at))


def _are_one(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one piece have the same memory for the same elements."""
    if tensor.data_ptr() != other.data_ptr() or other.is_conj() or other.is_neg():
        return False
    is_alike = tensor.shape == other.shape and tensor.stride() == other.stride()
    return is_alike or (tensor.is_contiguous() and other.is_contiguous())


def _faults(piece: object, tensor: object, how: str) -> Iterator[str]:
    if not isinstance(piece, Piece):
        yield f"key {piece!r} is a {type(piece).__name__}; what is {how} is named by a Piece"
    elif is_dtensor(tensor):
        yield f"{piece} is {how} as a DTensor; give its local tensor, under the piece that it is"
    elif not isinstance(tensor, torch.Tensor):
        yield f"{piece} is {how} as a {type(tensor).__name__}, which is no tensor"
    elif tensor.layout != torch.strided or tensor.is_meta:
        yield f"{piece} is {how} as a tensor of layout {tensor.layout} on {tensor.device}; give a dense one with memory"
    elif dtype_name(tensor.dtype) != piece.dtype:
        yield f"{piece} is of dtype {piece.dtype}, but its tensor of {dtype_name(tensor.dtype)}"
    elif tuple(tensor.shape) not in (stored_shape(piece), (piece.num_elements,)):
        yield (
            f"{piece} has {piece.num_elements} elements, but its tensor has shape {list(tensor.shape)}; give it in "
            f"shape {list(stored_shape(piece))} or flat"
        )


def _folds(tensor: torch.Tensor) -> bool:
    """Whether several indices are one element in memory, or the memory does not stand for the values."""
    folded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return folded or tensor.is_conj() or tensor.is_neg()
