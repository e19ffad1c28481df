"""Piece exchange: what ranks hold and want is made known to all, and they consent to one plan before a byte moves.

Ranks first exchange digests of their texts. What several ranks say travels once, from the first of them, and what was
said the last time not at all::

    rank       0     1     2     3          texts: A = rows of stage 0, B = rows of stage 1
    text       A     A     B     B
    digests    a     a     b     b          16 bytes from each rank to each
    texts      A     -     B     -          what not all say, and is not known
"""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import a_table, agreed, compare, json_as, of_form, texts_in, understood, understood_once
from shardwise.comm.digests import digest_of
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import MismatchError, PeerError, PlanError, ShardwiseError
from shardwise.moving.replica_samples import SharedPieces, compare_samples, samples_of
from shardwise.plan.saved_settings import merge_apart
from shardwise.routes.holders import holders_by_tensor, shared_pieces
from shardwise.routes.reshard import plan_reshard
from shardwise.routes.reshard_plan import ReshardPlan
from shardwise.space import Piece
from shardwise.space.pieces import tensor_of

_DIGEST_BYTES = 16

_LENGTH = struct.Struct("<I")

PIECES = "pieces to reshard"
"""The purpose of what ranks tell each other of them."""

AT_ONCE_BYTES = 1 << 20
"""What all ranks say together goes in one exchange where it is no more than this, and is said once."""


@dataclass(slots=True)
class Gathered:
    """What this rank gives, and once all ranks have agreed what all have given."""

    own: Sequence[bytes] = ()
    """The texts of this rank, as many on each."""
    value: bytes = b""
    texts: list[list[bytes]] = field(default_factory=list)
    """For every text that a rank gave: those of all ranks, in rank order."""
    values: list[bytes] = field(default_factory=list)
    """The values of all ranks, in rank order."""


class Gathering:
    """Gathers texts that all ranks have to know. Ranks make the same calls.

    What several ranks say travels once, and what was said the last time not at all.
    """

    def __init__(self, purpose: str, *, at_once_bytes: int = 0) -> None:
        """at_once_bytes: where all ranks together give less, texts go with their digests, and need no second exchange.

        Equal ones travel then, too.
        """
        self._purpose = purpose
        self._at_once_bytes = at_once_bytes
        self._known: dict[bytes, bytes] = {}

    def gather(self, channel: Channel, texts: Sequence[bytes]) -> list[list[bytes]]:
        """For every text: those of all ranks, in rank order."""
        with self.agreed(channel) as gathered:
            gathered.own = texts
        return gathered.texts

    @contextmanager
    def agreed(self, channel: Channel) -> Iterator[Gathered]:
        """As `agreement.agreed`: inside, each rank sets its own texts and value, or raises what all raise then."""
        gathered = Gathered()
        with agreed(channel, purpose=f"digests of {self._purpose}") as agreement:
            yield gathered
            own = {digest_of(text): text for text in gathered.own}
            mine = [digest_of(text) for text in gathered.own]
            given = json.dumps([text.decode() for digest, text in own.items() if digest not in self._known]).encode()
            if len(given) * channel.size > self._at_once_bytes:
                given = b"[]"
            agreement.value = b"".join([*mine, _LENGTH.pack(len(given)), given, gathered.value])
        width = len(mine) * _DIGEST_BYTES
        begin = width + _LENGTH.size

        def taken_apart(answer: bytes) -> tuple[list[bytes], dict[bytes, bytes], bytes]:
            (length,) = _LENGTH.unpack_from(answer, width)
            texts = texts_in(answer[begin : begin + length])
            return (
                [*struct.unpack(f"{_DIGEST_BYTES}s" * len(mine), answer[:width])],
                _by_digest(texts),
                answer[begin + length :],
            )

        said = understood(agreement.values, taken_apart, purpose=self._purpose)
        digests = [each for each, _, _ in said]
        # The first rank that says a text sends it to all: each knows from the digests who that is, and in what order.
        first_of: dict[bytes, int] = {}
        for rank, each in enumerate(digests):
            for digest in each:
                first_of.setdefault(digest, rank)
        known = dict(self._known)
        for _, given_at_once, _ in said:
            known |= given_at_once
        # What all say, each has: its own. So it is with replicas, and in most calls.
        sayers = Counter(chain.from_iterable(map(set, digests)))
        unknown = [digest for digest in first_of if digest not in known and sayers[digest] < channel.size]
        if unknown:
            texts = [own[digest].decode() for digest in unknown if first_of[digest] == channel.rank]
            answers = channel.exchange(json.dumps(texts).encode(), purpose=self._purpose)
            # A text is what its digest says, from whichever rank it comes.
            sent = understood(answers, lambda answer: _by_digest(texts_in(answer)), purpose=self._purpose)
            for digest in unknown:
                if digest not in sent[first_of[digest]]:
                    rank = first_of[digest]
                    text = f"rank {rank} gave a digest in exchange for {self._purpose!r}, and not the text that has it"
                    raise PeerError(text, rank=rank, operation="exchange", purpose=self._purpose)
                known[digest] = sent[first_of[digest]][digest]
        known |= own
        # Only the last texts are kept: a state that changes its cut would otherwise be remembered in all its forms.
        self._known = {digest: known[digest] for digest in first_of}
        gathered.texts = [[self._known[each[at]] for each in digests] for at in range(len(mine))]
        gathered.values = [value for _, _, value in said]


def _by_digest(texts: Sequence[str]) -> dict[bytes, bytes]:
    return {digest_of(text.encode()): text.encode() for text in texts}


def merged_settings(texts: Sequence[Sequence[bytes]], *, purpose: str) -> dict[str, Any]:
    """What `merge_apart` makes of the settings of all ranks, from the texts of each part of them."""
    return merge_apart([understood(each, cache(_settings_in), purpose=purpose) for each in texts])


def _settings_in(text: bytes) -> dict[str, Any]:
    settings = a_table(text)
    for each in of_form(settings.get("optimizers", []), list[dict[str, Any]]):
        of_form(each.get("groups"), list[dict[str, Any]] | None)
    return settings


def pack_pieces(pieces: Sequence[Piece]) -> bytes:
    """Pieces as text: a row per tensor, then its pieces."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[Any]] = {}
    for at, piece in enumerate(pieces):
        # Most pieces are whole or runs of whole tensors: without their boxes the texts are much shorter.
        whole = piece.shape == piece.global_shape
        box = None if whole else (piece.offset, piece.shape)
        rows.setdefault((piece.name, piece.dtype, piece.global_shape), []).append((at, box, piece.run))
    return json.dumps([[*tensor, parts] for tensor, parts in rows.items()], separators=(",", ":")).encode()


def unpack_pieces(text: bytes) -> list[Piece]:
    """The pieces of a text of `pack_pieces`, in the order in which they were given."""
    pieces = []
    for name, dtype, shape, parts in json.loads(text):
        for at, box, run in parts:
            offset, size = box or (None, None)
            piece = Piece(name=name, dtype=dtype, global_shape=shape, offset=offset, shape=size, run=run)
            pieces.append((at, piece))
    return [piece for _, piece in sorted(pieces, key=lambda each: each[0])]


def tensors_in(texts: Sequence[bytes]) -> dict[str, Piece]:
    """Every tensor that has a piece in a text of `pack_pieces`, as one piece, by name. `texts`: those of all ranks."""

    def parse(text: bytes) -> dict[str, Piece]:
        held = {each.name: each for each in unpack_pieces(text)}
        return {name: tensor_of(each) for name, each in held.items()}

    tables = understood_once(texts, parse, purpose=PIECES)  # replicas hold the same
    return dict(chain.from_iterable(table.items() for table in tables))


def unpack_alike(texts: Sequence[bytes], text: bytes, own: list[Piece]) -> dict[bytes, list[Piece]]:
    """The pieces of every different text, in the order of the ranks; `text` was packed from `own` and needs no work."""
    unpack = cache(lambda each: own if each == text else unpack_pieces(each))
    return dict(zip(texts, understood(texts, unpack, purpose="pieces of tensors"), strict=True))


def consent(
    channel: Channel,
    sources: Sequence[Piece],
    targets: Sequence[Piece],
    *,
    max_bytes: int,
    cast: bool,
    refusal: ShardwiseError | None = None,
    word: str = "",
    replicas: Mapping[Piece, torch.Tensor] | None = None,
    gathering: Gathering | None = None,
) -> tuple[ReshardPlan, list[str]]:
    """The plan of all ranks of the channel, and the words of each.

    sources, targets: what this rank holds and wants, in the order in which the plan counts them.
    refusal: why this rank cannot take part; then every rank raises it. word: a short text for all ranks. replicas: what
        it holds, where all ranks give that, and holders of one piece must have equal values. gathering: one that may
        know texts of these pieces already.
    Raises PlanError or MismatchError, the same on every rank.
    """
    texts = [pack_pieces(sources), pack_pieces(targets)]
    options = {"max_bytes": max_bytes, "cast": cast, "compare": replicas is not None}
    with (gathering or Gathering(PIECES)).agreed(channel) as gathered:
        if refusal is not None:
            raise refusal
        gathered.own, gathered.value = texts, json.dumps([options, word]).encode()
    asked = understood(gathered.values, json_as(tuple[dict[str, Any], str]), purpose=PIECES)
    for rank, (theirs, _) in enumerate(asked):
        if theirs != asked[0][0]:
            raise MismatchError(
                f"rank {rank} reshards with {theirs}, but rank 0 with {asked[0][0]}; make the same call on all ranks"
            )
    unpack = cache(unpack_pieces)
    held, wanted = (understood(each, unpack, purpose=PIECES) for each in gathered.texts)
    plan = agree_on_plan(channel, held, wanted, max_bytes=max_bytes, cast=cast, replicas=replicas)
    return plan, [word for _, word in asked]


def agree_on_plan(
    channel: Channel,
    held: Sequence[Sequence[Piece]],
    wanted: Sequence[Sequence[Piece]],
    *,
    max_bytes: int,
    cast: bool,
    replicas: Mapping[Piece, torch.Tensor] | None = None,
) -> ReshardPlan:
    """The plan that every rank makes of what all hold and want. Raises PlanError or MismatchError, the same on all."""
    shared: SharedPieces = ()
    with agreed(channel, purpose="verdicts on a reshard") as agreement:
        # Every rank plans for all, out of the same texts. The digest finds ranks that run different versions.
        plan = plan_reshard(held, wanted, max_bytes=max_bytes, cast=cast)
        _check_casts(plan, channel.device)
        text = plan.text()
        agreement.value = digest_of(text.encode())
        if replicas is not None and channel.size > 1:
            shared = shared_pieces(holders_by_tensor(held))
            agreement.value += samples_of(shared, channel.rank, replicas)()
    if len({each[:_DIGEST_BYTES] for each in agreement.values}) > 1:
        hint = "Run the same version of shardwise on all ranks"
        compare(channel, text.splitlines(), subject="plans of a reshard", hint=hint)
    if shared:
        compare_samples(shared, [each[_DIGEST_BYTES:] for each in agreement.values], kind=PlanError)
    return plan


def _check_casts(plan: ReshardPlan, device: torch.device) -> None:
    """Raise PlanError unless torch can make all casts of the plan."""
    problems = []
    for held, wanted in plan.casts():
        try:
            # torch does not say which casts it has: each is tried with one element.
            torch.zeros(1, dtype=torch_dtype(held), device=device).to(torch_dtype(wanted))
        except (NotImplementedError, RuntimeError) as error:
            problems.append(f"torch cannot cast {held} to {wanted}, which some targets ask for: {error}")
    if problems:
        raise PlanError(*problems)
