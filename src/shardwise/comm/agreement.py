"""Ranks compare before they act: equal descriptions, and one verdict.

A rank that raised alone would leave the others in the next collective call until their deadline. So what one rank may
refuse is decided inside `agreed`, on every rank, and ends with one exchange. Only rank 1 has no room on its disk::

    rank 0    decides: yes       gives b"+" + value                             raises CheckpointError: rank 1: no room
    rank 1    decides: refuses   gives b"-" + [kind, text, problems, notes]     raises the same, from its own error
    rank 2    decides: yes       gives b"+" + value                             raises the same
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash

from shardwise import errors
from shardwise.comm.channel import Channel
from shardwise.errors import CheckpointError, MismatchError, PlanError, RewriteError, ShardwiseError


@dataclass(slots=True)
class Agreement:
    """What this rank gives to the others with its consent, and what all ranks have given once they have agreed."""

    value: bytes = b""
    """This rank's, set inside `agreed`."""
    values: Sequence[bytes] = ()
    """All ranks', in rank order, there after `agreed`."""


@contextmanager
def aborting(channel: Channel, doing: str) -> Iterator[None]:
    """An error inside that the ranks have not agreed on aborts the channel, with what this rank was `doing`."""
    try:
        yield
    except ShardwiseError:
        # The ranks have agreed on it, or know of it: an abort would put another error in its place.
        raise
    except BaseException as error:
        channel.abort(f"{type(error).__name__} in {doing}: {error}")
        raise


@contextmanager
def agreed(channel: Channel, *, purpose: str, doing: str | None = None, only: int | None = None) -> Iterator[Agreement]:
    """Decide inside; where one rank raises a ShardwiseError, every rank raises the same one, with all its problems.

    Costs one exchange. Other errors leave at once, without it. The peers wait then until somebody aborts the channel:
    this does, where it is given what the rank is `doing`; else a caller does.
    only: the rank that decides for all, so that its error need not name it.
    """
    agreement = Agreement()
    refusal: ShardwiseError | None = None
    try:
        yield agreement
    except ShardwiseError as error:
        refusal = error
    except BaseException as error:
        # A fault of the program, such as a KeyError: nobody can promise that the rank still reaches an exchange.
        if doing is not None:
            channel.abort(f"{type(error).__name__} in {doing}: {error}")
        raise
    mine = b"+" + agreement.value if refusal is None else b"-" + _packed(refusal)
    answers = channel.exchange(mine, purpose=purpose)
    refusals = {rank: json.loads(each[1:]) for rank, each in enumerate(answers) if each[:1] == b"-"}
    if refusals:
        # Each rank builds the error from the same answers: nothing of its own goes in, so the texts cannot differ.
        raise _joined(refusals, names_ranks=only is None and len(refusals) < channel.size) from refusal
    agreement.values = [each[1:] for each in answers]


def _packed(error: ShardwiseError) -> bytes:
    # The nearest class that `shardwise.errors` has: a subclass from elsewhere may be unknown to other ranks.
    kind = next(each.__name__ for each in type(error).__mro__ if vars(errors).get(each.__name__) is each)
    problems, notes = getattr(error, "problems", ()), getattr(error, "__notes__", ())
    return json.dumps([kind, str(error), problems, notes]).encode()


def _joined(refusals: Mapping[int, tuple[str, str, list[str], list[str]]], *, names_ranks: bool) -> ShardwiseError:
    """One error for all that ranks refuse with. Where not all say the same, each line says which rank does."""
    names_ranks = names_ranks or len({text for _, text, _, _ in refusals.values()}) > 1
    # Ranks that say the same are one line. Where all do, none is named: the refusal is not about a rank.
    lines: dict[str, None] = {}  # keys of dicts keep each text once, in the order of the ranks
    problems: dict[str, None] = {}
    notes: dict[str, None] = {}
    for rank, (_, text, own_problems, own_notes) in refusals.items():
        label = f"rank {rank}: " if names_ranks else ""
        lines[label + text] = None
        problems |= dict.fromkeys(label + each for each in own_problems or [text])
        notes |= dict.fromkeys(label + each for each in own_notes)
    kind = next(kind for kind, _, _, _ in refusals.values())
    error: ShardwiseError = getattr(errors, kind)("\n".join(lines))
    if isinstance(error, PlanError | CheckpointError | RewriteError):
        error.problems = tuple(problems)
    for note in notes:
        error.add_note(note)
    return error


def compare(channel: Channel, lines: Sequence[str], *, subject: str, hint: str) -> None:
    """Raise MismatchError on every rank unless all have the same lines; it names who differs, and where."""
    # Two steps: 16 bytes where all agree, which is nearly always; the lines only where they have to be shown.
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
    # Of the bytes, not of the values: NaNs and the sign of zero count.
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().tobytes())


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)  # one may be a beginning of the other
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _line(lines: Sequence[str], position: int) -> str:
    return lines[position] if position < len(lines) else "nothing there"
