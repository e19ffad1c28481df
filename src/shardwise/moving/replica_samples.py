"""Samples of replicas: what several ranks hold as one piece is saved from one of them, and has to be equal on all.

    rank 0    experts.0.w   0.1 0.3 ...      digest 5e1f
    rank 1    experts.0.w   0.7 0.2 ...      digest 09ab      refused: another tensor under the same name

Each rank takes digests of some elements, and reports them with what ranks tell each other anyway: the checksums of its
file, or its verdict on a plan. So there is no further round, and a replica costs some ten microseconds. What is on a
device comes to the host in one copy. Tensors of up to 256 elements are compared whole, larger ones by 64 elements all
over them: replicas that differ in more than a few elements are found, others may not be.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from shardwise.comm.digests import checksum
from shardwise.comm.local_tensors import bytes_of
from shardwise.errors import CheckpointError, PlanError, few_of
from shardwise.moving.queued_copies import QueuedCopies
from shardwise.space import Piece

SharedPieces = Sequence[tuple[Piece, Sequence[int]]]
"""The pieces that several ranks hold, each with these ranks: see `holders.shared_pieces`."""

_WHOLE, _SOME = 256, 64
_DIGEST_BYTES = 8
_NOT_COMPARED = bytes(_DIGEST_BYTES)
_GOLDEN = 0.6180339887498949
"""Its multiples fall into no pattern that rows or columns of a matrix could share."""


@torch.no_grad()
def samples_of(shared: SharedPieces, rank: int, tensors: Mapping[Piece, torch.Tensor]) -> Callable[[], bytes]:
    """Take a sample of each replica that `rank` holds; returns a function that gives their digests.

    tensors: those that are compared. Copies out of devices are queued behind what these have to do. The digests wait
        for them, in any thread.
    """
    digests = {piece: _NOT_COMPARED for piece, ranks in shared if rank in ranks}
    on_devices: dict[torch.device, list[tuple[Piece, torch.Tensor]]] = {}
    for piece in digests:
        if (tensor := tensors.get(piece)) is None:
            continue
        if tensor.device.type == "cpu":
            digests[piece] = _digest(tensor)
        else:
            on_devices.setdefault(tensor.device, []).append((piece, _sample(tensor)))
    copies = [(each, *_on_host([sample for _, sample in each])) for each in on_devices.values()]

    def taken() -> bytes:
        for each, host, mark in copies:
            mark.synchronize()
            ends = accumulate((len(sample) for _, sample in each), initial=0)
            for (piece, _), (start, stop) in zip(each, pairwise(ends), strict=True):
                digests[piece] = checksum(bytes_of(host[start:stop]))
        return b"".join(digests.values())

    return taken


def _on_host(samples: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Event]:
    """The bytes of samples on a device in one copy, and the mark behind it."""
    together = torch.cat(list(samples))
    copies = QueuedCopies(together.device)
    host = copies.room(len(together))
    copies.put(host, together)
    return host, torch.accelerator.current_stream(together.device).record_event()


def compare_samples(
    shared: SharedPieces, samples: Sequence[bytes], *, kind: type[CheckpointError | PlanError] = CheckpointError
) -> None:
    """Raise an error of this kind where the samples of ranks differ. Ranks without samples are not compared."""
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
    raise kind(
        f"{few_of(list(different))}: ranks {ranks_in_words} hold different values under one name, and only one of them "
        "counts. Give what is a rank's own a name of its own (experts.4.w on rank 1), or as its part of one tensor "
        "({sw.Piece(...): tensor}). Of replicas that may differ, such as running statistics, give those of one rank "
        "and leave them out on the others"
    )


@lru_cache(maxsize=1024)
def _places(num_elements: int, device: torch.device | None = None) -> torch.Tensor:
    """The elements of a sample, spread over all: one in each of equal parts, at another place in each part."""
    width = num_elements / _SOME
    return torch.tensor([int((number + number * _GOLDEN % 1) * width) for number in range(_SOME)], device=device)


def _digest(tensor: torch.Tensor) -> bytes:
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        # By numpy, which takes elements some 20 times faster than torch takes so few.
        # One element is contiguous whatever its stride, which a view of bytes would refuse.
        flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        elements = flat.numpy().view(f"V{tensor.element_size()}")
        is_large = len(elements) > _WHOLE
        return checksum((elements[_places(len(elements)).numpy()] if is_large else elements).tobytes())
    return checksum(bytes_of(_sample(tensor)))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements that are compared, where the tensor is."""
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # of narrow floats no operation but this is sure to be there
    if tensor.numel() > _WHOLE:
        # By index: a tensor that is not contiguous would be copied as a whole.
        at = _places(tensor.numel(), tensor.device)
        tensor = tensor.view(-1)[at] if tensor.is_contiguous() else tensor[torch.unravel_index(at, tensor.shape)]
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
