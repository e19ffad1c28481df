"""Ranks compare before they act: equal descriptions, and one verdict."""

import json
from collections.abc import Sequence

import torch
import xxhash

from shardwise import errors
from shardwise.comm.channel import Channel
from shardwise.errors import MismatchError, ShardwiseError


def agree(channel: Channel, error: ShardwiseError | None, *, purpose: str, value: bytes = b"") -> list[bytes]:
    """Give every rank's `value`, in rank order; raise the same error on every rank when one must refuse."""
    mine = b"+" + value if error is None else b"-" + json.dumps([type(error).__name__, str(error)]).encode()
    answers = channel.exchange(mine, purpose=purpose)
    refusals = {rank: json.loads(each[1:]) for rank, each in enumerate(answers) if each[:1] == b"-"}
    if not refusals:
        return [each[1:] for each in answers]
    kind, text = next(iter(refusals.values()))
    if len(refusals) < channel.size or len({each for _, each in refusals.values()}) > 1:
        text = "\n".join(f"rank {rank}: {each}" for rank, (_, each) in refusals.items())
    raise getattr(errors, kind)(text) from error


def compare(channel: Channel, lines: Sequence[str], *, subject: str, hint: str) -> None:
    """Raise MismatchError on every rank unless all have the same lines; it names who differs, and where."""
    mine = json.dumps(list(lines)).encode()
    digests = channel.exchange(xxhash.xxh3_128_digest(mine), purpose=f"digest of {subject}")
    if len(set(digests)) == 1:
        return
    texts = [json.loads(each) for each in channel.exchange(mine, purpose=f"lines of {subject}")]
    different = [rank for rank, text in enumerate(texts) if text != texts[0]]
    position, rank = min((_first_difference(texts[0], texts[rank]), rank) for rank in different)
    listed = f"rank {rank}" if len(different) == 1 else "ranks " + ", ".join(map(str, different))
    raise MismatchError(
        f"{listed} and rank 0 were given different {subject}; first difference: rank 0 has "
        f"{_line(texts[0], position)}, rank {rank} has {_line(texts[rank], position)}. {hint}"
    )


def digest_of_values(tensor: torch.Tensor) -> str:
    """A short digest of the values of a tensor (xxh3 over its row-major bytes)."""
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().tobytes())


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)  # one may be a beginning of the other
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _line(lines: Sequence[str], position: int) -> str:
    return lines[position] if position < len(lines) else "nothing there"
