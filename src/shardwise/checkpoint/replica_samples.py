"""Samples of replicas: what several ranks hold as one piece is saved from one of them, and has to be alike on all.

    rank 0    experts.0.w   0.1 0.3 ...      digest 5e1f
    rank 1    experts.0.w   0.7 0.2 ...      digest 09ab      refused: another tensor under the same name

Each rank takes digests of some elements, and reports them with the checksums of its file. So a save has no further
round, and a replica costs some ten microseconds. Tensors of up to 256 elements are compared whole, larger ones by 64
elements all over them: replicas that differ in more than a few elements are found, others may not be.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
import xxhash

from shardwise.comm.local_tensors import bytes_of
from shardwise.errors import CheckpointError, few_of
from shardwise.space import Piece

SharedPieces = Sequence[tuple[Piece, Sequence[int]]]
"""The pieces that several ranks hold, each with these ranks: see `holders.shared_pieces`."""

_WHOLE, _SOME = 256, 64
_DIGEST_BYTES = 8
_NOT_COMPARED = bytes(_DIGEST_BYTES)
_GOLDEN = 0.6180339887498949
"""Its multiples fall into no pattern that rows or columns of a matrix could share."""


@torch.no_grad()
def samples_of(shared: SharedPieces, rank: int, tensors: Mapping[Piece, torch.Tensor]) -> bytes:
    """A digest of each replica that `rank` holds. tensors: those that are compared."""
    return b"".join(
        _digest(tensors[piece]) if piece in tensors else _NOT_COMPARED for piece, ranks in shared if rank in ranks
    )


def compare_samples(shared: SharedPieces, samples: Sequence[bytes]) -> None:
    """Raise CheckpointError where the samples of ranks differ. Ranks without samples are not compared."""
    if not any(samples):
        return
    at = [0] * len(samples)
    different: dict[str, tuple[int, int]] = {}
    for piece, ranks in shared:
        found = {}
        for rank in ranks:
            found[rank] = samples[rank][at[rank] : at[rank] + _DIGEST_BYTES]
            at[rank] += _DIGEST_BYTES
        known = [(rank, each) for rank, each in found.items() if each not in (b"", _NOT_COMPARED)]
        if (other := next((rank for rank, each in known if each != known[0][1]), None)) is not None:
            different.setdefault(piece.name, (known[0][0], other))
    if not different:
        return
    pairs = dict.fromkeys(different.values())
    ranks_in_words = few_of([f"{one} and {other}" for one, other in pairs], quotes=False)
    raise CheckpointError(
        f"{few_of(list(different))}: ranks {ranks_in_words} hold different values under one name, of which one "
        "counts. Give what is a rank's own a name of its own (experts.4.w on rank 1), or as its part of one tensor "
        "({sw.Piece(...): tensor}). Of replicas that may differ, such as running statistics, give those of one rank "
        "and leave them out on the others"
    )


@lru_cache(maxsize=256)
def _places(num_elements: int) -> torch.Tensor:
    """The elements of a sample, spread over all: one in each of equal parts, at another place in each part."""
    width = num_elements / _SOME
    return torch.tensor([int((number + number * _GOLDEN % 1) * width) for number in range(_SOME)])


def _digest(tensor: torch.Tensor) -> bytes:
    is_large = tensor.numel() > _WHOLE
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # By numpy, which takes elements some 20 times faster than torch takes so few.
        # One element is contiguous whatever its stride, which a view of bytes would refuse.
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        elements = flat.numpy().view(f"V{tensor.element_size()}")
        return xxhash.xxh3_64_digest((elements[_places(len(elements)).numpy()] if is_large else elements).tobytes())
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # of narrow floats no operation but this is sure to be there
    if is_large:
        # By index: a tensor that is not contiguous would be copied as a whole.
        at = _places(tensor.numel()).to(tensor.device)
        tensor = tensor.view(-1)[at] if tensor.is_contiguous() else tensor[torch.unravel_index(at, tensor.shape)]
    plain = tensor.resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
    return xxhash.xxh3_64_digest(bytes_of(plain.view(torch.uint8)))
