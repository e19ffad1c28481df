"""Loading: a checkpoint of any layout into a state of any other.

[1] contents   what is stored, from metadata only, the same on all ranks, maybe under the names of a rewrite
[2] match      what every rank wants, and from which stored tensor it comes; all refuse together, with all findings
[3] places     the stored pieces of all that is wanted, and the views of the target that take their elements
[4] rounds     every rank reads and verifies a batch of blocks; all agree; what others need of it is handed on
[5] finish     the target makes the values its own

Before the first byte there are three exchanges: in [1], in [2], and one that settles the rounds.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any, Literal

import torch

from shardwise.checkpoint.comparison import joined_numbers
from shardwise.checkpoint.contents import Contents, Place, StoredPiece, model_name_of_master, without_followers
from shardwise.checkpoint.holdings import RankFacts, facts_of
from shardwise.checkpoint.manifest import unpacked
from shardwise.checkpoint.matching import Match, match, prefix_hint, twin_pairs, untied
from shardwise.checkpoint.numbered_state import as_numbered, is_unsettled
from shardwise.checkpoint.read_plan import ReadPlan, missing, plan_reads
from shardwise.checkpoint.read_rounds import ReadRounds, agree_on_rounds
from shardwise.checkpoint.reading import DataFiles, check_files
from shardwise.checkpoint.rewritten import metas_of_pieces, ranks_along_tp, rewritten_for_load
from shardwise.checkpoint.sources import Source, agree_on_source, was_removed, with_newest
from shardwise.checkpoint.state_pieces import Held, check_targets, hold
from shardwise.checkpoint.states import (
    CURSOR_KEY,
    Numbering,
    Restorable,
    Restoration,
    SomeData,
    State,
    holds_several,
    positioned,
    wrong_rewrite,
)
from shardwise.checkpoint.stores import Address
from shardwise.checkpoint.windows import (
    ReadTarget,
    pieces_of_scales,
    targets_at,
    targets_of_scales,
)
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, json_as, understood, understood_once
from shardwise.comm.given_channel import channel_of, given_or_default
from shardwise.errors import CheckpointError, DataError
from shardwise.moving.piece_exchange import AT_ONCE_BYTES, Gathering, pack_pieces, unpack_alike, unpack_pieces
from shardwise.plan.names import is_state_name
from shardwise.plan.saved_settings import KEPT
from shardwise.rewrite import Rewrite, TensorMeta
from shardwise.rewrite.sections import uncollected
from shardwise.space import Piece
from shardwise.space.pieces import tensor_of

Verify = bool | Literal["first"]
"""True: every block is verified as it is read. "first": all blocks are, before the target is touched. False: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What was loaded, and what was let pass."""

    location: str
    """Path or address of the save."""
    step: int | None
    """The step at which it was saved; None where none is known."""
    verified: bool
    """Whether every byte was compared with its checksum; other formats than ours have none."""
    num_tensors: int
    """Tensors that were read, by any rank."""
    read_bytes: int
    """Bytes of data files that this rank read."""
    received_bytes: int
    """Bytes that it got from other ranks in messages."""
    in_place: bool
    """Whether ranks of one host took what others had read out of their memory, without messages."""
    missing: tuple[str, ...] = ()
    """What the target wants and the checkpoint does not have (only with strict=False)."""
    unexpected: tuple[str, ...] = ()
    """What the checkpoint has and the target does not want, or settings that do not fit (only with strict=False)."""
    casts: tuple[str, ...] = ()
    """What was read in another dtype than it is wanted in (only with cast=True)."""
    dropped: tuple[str, ...] = ()
    """What the checkpoint has and the rewrite dropped (`a -> _`)."""
    added: tuple[str, ...] = ()
    """What keeps the values that it had, because the rewrite says so (`_ -> b`)."""
    notes: tuple[str, ...] = ()
    """What the load decided though the checkpoint does not say it, such as averages of weights that begin anew."""


class Loaded(dict[str, Any]):
    """The `extra` of a save: a dict, with the report of the load as an attribute."""

    def __init__(self, extra: Mapping[str, object], report: LoadReport) -> None:
        super().__init__(extra)
        self.report = report
        """What was loaded, and what was let pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    strict: bool
    cast: bool
    verify: Verify
    shared: bool
    rewrite: Rewrite | None
    weights_alone: bool = False
    """Whether optimizers go on with the state that they have."""


def load(
    path: Address,
    state: State,
    *,
    step: int | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: Verify = True,
    shared: bool = True,
    rewrite: Rewrite | None = None,
    channel: Channel | None = None,
    data: SomeData | None = None,
) -> Loaded:
    """Fill `state`, in place, from the checkpoint at `path`, whatever layout wrote it. Returns its `extra`.

    path: a folder of saves (the newest is taken, or the newest of `step`), or the folder of one save. It may be an
        address ("s3://bucket/run", "hf://owner/name"), a Store, a folder of safetensors files, a
        torch.distributed.checkpoint directory, or what `torch.save` wrote: one file, or a folder of
        `pytorch_model.bin`.
    state: tensors by name (plain or DTensor), tensors by `Piece`, or an engine or `TorchState`, which also take over
        the settings of their optimizers.
    strict: refuse missing names on either side, and settings that do not fit. With False they are in the report. Shapes
        always have to agree. Tensors that are tied in the target and stored under each of their names have to be equal
        to the bit.
    cast: allow another dtype than the wanted one.
    verify: compare every block with its checksum as it is read. "first" reads everything twice and verifies all
        of it before the target is touched.
    shared: whether all ranks see the storage. If not, those that find the checkpoint read for the others.
    rewrite: from the names and shapes of the checkpoint to those of `state`; the same on all ranks. Optimizer state
        and settings go along. What it drops and adds is in the report.
    channel: the ranks that load together; all of them call this. Default: that of an engine, else see
        `default_channel`.
    data: a `sw.Data` of the same samples, or several by name, which then go on where the saved run was. Their cursor
        leaves the result; without `data` it stays there as `extra["sw.Data"]`.

    Metadata alone shows every misfit. All ranks raise it as one CheckpointError, while the target is as it was; a
    rewrite that does not fit the stored tensors raises RewriteError. Damage to data is found while reading: the target
    is as it was where no rank reads more than 16 MiB (48 MiB in one process), and with verify="first". Otherwise the
    error says that the target is partly overwritten. The report is the result's `.report`.
    """
    options = _Options(strict=strict, cast=cast, verify=verify, shared=shared, rewrite=rewrite)
    with given_or_default(channel or channel_of(state), "a load") as used:
        return _loaded(used, path, state, options, step, data, lambda contents: contents)


def load_seen(
    see: Callable[[Contents], Contents], path: Address, state: State, *, strict: bool, weights_alone: bool = False
) -> Loaded:
    """As `load` with casts, of what `see` makes of the contents, the same on all ranks.

    weights_alone: optimizers go on with the state that they have.
    """
    options = _Options(strict=strict, cast=True, verify=True, shared=True, rewrite=None, weights_alone=weights_alone)
    with given_or_default(channel_of(state), "a load") as used:
        return _loaded(used, path, state, options, None, None, see)


@uncollected()
def _loaded(
    used: Channel,
    path: Address,
    state: State,
    options: _Options,
    step: int | None,
    data: SomeData | None,
    see: Callable[[Contents], Contents],
) -> Loaded:
    def find() -> Source:
        given = partial(_said, state, options, step, data)
        source = agree_on_source(used, path, step=step, shared=options.shared, options=given)
        return replace(source, contents=see(source.contents))

    def read(source: Source) -> tuple[Loaded, Restoration | None, Mapping[str, Any] | None]:
        # Before anything is read: an extra that cannot be understood must not leave a loaded target behind.
        extra = unpacked(source.contents.extra)
        cursor = None if data is None else _cursor_for(used, data, extra, source)
        restoration, report = _read(used, source, state, options)
        return Loaded(extra, report), restoration, cursor

    loaded, restoration, cursor = with_newest(find, read, partial(_was_removed, used))
    # All ranks are here together, after the last read: what an engine does there may take all of them.
    if restoration is not None:
        with torch.no_grad():
            restoration.finish()
    if data is not None and cursor is not None:
        positioned(data).resume(cursor)
        del loaded[CURSOR_KEY]
    return loaded


def _cursor_for(channel: Channel, data: SomeData, extra: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """The cursor of the save; all ranks raise CheckpointError where it has none, or one of other samples."""
    location = source.contents.location
    with agreed(channel, purpose="cursor of the data"):
        one = positioned(data)
        if CURSOR_KEY not in extra:
            raise CheckpointError(
                f"{location} was saved without data, so it does not say which samples come next. Leave data out of the "
                "load, and the run reads them from the first one on"
            )
        if holds_several(extra[CURSOR_KEY]) and one is data:
            names = ", ".join(f"{name!r}: ..." for name in extra[CURSOR_KEY])
            raise CheckpointError(f"{location} was saved with several data; give all of them: data={{{names}}}")
        try:
            one.check(extra[CURSOR_KEY])
        except DataError as error:
            raise CheckpointError(f"{location} does not fit the data: {error}") from error
    cursor: Mapping[str, Any] = extra[CURSOR_KEY]
    return cursor


_TARGET = "tensors of the target of a rewrite"


def _said(state: State, options: _Options, step: int | None, data: SomeData | None) -> tuple[str, bytes]:
    """What a call of `load` asks for, in words, and what a rewrite has to know of this rank's target."""
    words = _in_words(options, step, data)
    if options.rewrite is None:
        return words, b""
    held = hold(state, what="the target")
    facts = [each.decode() for each in facts_of(state, held)]
    return words, json.dumps([*facts, bool(held.settings.get("optimizers"))]).encode()


def _in_words(options: _Options, step: int | None, data: SomeData | None) -> str:
    """What a call of `load` asks for, the same on all ranks. Raises CheckpointError for options that cannot be."""
    flags: dict[str, object] = {"strict": options.strict, "cast": options.cast, "shared": options.shared}
    problems = [f"{name} is {value!r}; give True or False" for name, value in flags.items() if type(value) is not bool]
    if type(options.verify) is not bool and options.verify != "first":
        problems.append(f'verify is {options.verify!r}; give True, False or "first"')
    if step is not None and type(step) is not int:
        problems.append(f"step is {step!r}, a {type(step).__name__}; give a whole number or None")
    problems += wrong_rewrite(options.rewrite)
    if problems:
        raise CheckpointError(*problems)
    flags["rewrite"] = None if options.rewrite is None else str(options.rewrite)
    given = f"step={step!r}, verify={options.verify!r}, " + ", ".join(f"{name}={flags[name]!r}" for name in flags)
    return given + ("" if data is None else ", and data")


def _was_removed(channel: Channel, source: Source) -> bool:
    """Whether any rank sees that the save was removed while it was read, so that all begin anew with a newer one."""
    mine = channel.rank in source.readers and was_removed(source.store, source.contents)
    return b"1" in channel.exchange(b"1" if mine else b"0", purpose="whether the save is still there")


def _read(channel: Channel, source: Source, state: State, options: _Options) -> tuple[Restoration | None, LoadReport]:
    """Fill the target; what makes the values its own, once all ranks have them."""
    store, contents, readers = source.store, source.contents, source.readers
    if options.rewrite is not None:
        live, takes_state = _live(source.words)
        contents = rewritten_for_load(contents, options.rewrite, live, takes_state=takes_state)
    held, restoration, wanted, found = _settle(channel, state, contents, options)
    rounds, paddings = _located(channel.rank, source, contents, held, wanted, found)
    findings = [finding for each in rounds for finding in each.findings]
    verify = bool(options.verify) and contents.verifiable
    may_read_exactly = options.shared and not verify
    with DataFiles(store) as files:
        if channel.rank in readers:
            # Each file is looked at by the ranks that read from it, and by one more: a thousand ranks would otherwise
            # open a thousand files each.
            names = sorted({piece.file for each in rounds for piece in each.stored})
            dealt = names[sorted(readers).index(channel.rank) :: len(readers)]
            read = {name for each in rounds for name in each.plan.files(read_for_others=not may_read_exactly)}
            heads = dealt if verify else ()
            for *_, found_here in check_files(files, contents, sorted(read.union(dealt)), heads=heads):
                findings += found_here
        reading = [
            ReadRounds(
                channel,
                files,
                contents,
                each.stored,
                each.plan,
                each.targets,
                verify=verify,
                may_read_exactly=may_read_exactly,
            )
            for each in rounds
        ]
        agree_on_rounds(channel, reading, findings, about=f"{contents.location} is not as it was written")
        # After the files were found whole, and before the target changes: it reads stored bytes, and may refuse.
        joined_numbers(files, contents, contents.effects.joined).compare(channel, readers)
        twin_pairs(files, contents, found.twins).compare(channel, readers)
        with torch.no_grad():
            for rounds_of in reading:
                rounds_of.fill(twice=options.verify == "first")
            # After the reads: damage leaves the target as it was, where it does.
            for pad in paddings:
                pad()
    report = LoadReport(
        location=contents.location,
        step=contents.step,
        verified=verify,
        num_tensors=sum(each.num_tensors for each in rounds),
        read_bytes=files.read_bytes,
        received_bytes=sum(each.received_bytes for each in reading),
        in_place=reading[-1].in_place,
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
        casts=tuple(found.casts),
        dropped=without_followers(contents.effects.dropped),
        added=without_followers(contents.effects.added),
        notes=(*found.notes, *(restoration.notes if restoration else ())),
    )
    return restoration, report


def _live(words: Sequence[bytes]) -> tuple[dict[str, TensorMeta], bool]:
    """The tensors of the target on all ranks, and whether it takes over the state of optimizers, as ranks have said.

    They tell what placeholders of a rewrite stand for, and how tensors are cut.
    """
    said = understood(words, cache(json_as(tuple[str, str, bool])), purpose=_TARGET)
    texts, known, takes_state = zip(*said, strict=True)
    pieces, packed = ([each.encode() for each in given] for given in (texts, known))
    facts = RankFacts.of(pieces, packed, purpose=_TARGET)
    every = chain.from_iterable(understood_once(pieces, unpack_pieces, purpose=_TARGET))
    metas = metas_of_pieces(every, num_ranks=ranks_along_tp(facts.layout))
    tied = {alias: metas[name] for ties in facts.ties for alias, name in ties.items() if name in metas}
    return {**metas, **tied}, any(takes_state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reads:
    """What is read of stored tensors for all ranks."""

    num_tensors: int
    stored: Sequence[StoredPiece]
    """All pieces of these tensors."""
    targets: Sequence[ReadTarget]
    """Those of this rank: one for each piece that the plan has as wanted here."""
    plan: ReadPlan
    findings: Sequence[str]
    """Pieces that this rank wants, and that the stored ones do not cover."""

    @classmethod
    def of(
        cls, rank: int, source: Source, wanted: Sequence[Sequence[Piece]], targets: Sequence[ReadTarget]
    ) -> "_Reads":
        """wanted: what each rank wants, as it is stored."""
        names = dict.fromkeys(piece.name for pieces in wanted for piece in pieces)
        pieces_of = {name: source.contents.tensors[name].pieces for name in names}
        stored = list(chain.from_iterable(pieces_of.values()))
        # Each rank looks at what it wants itself; together they have looked at all that is read.
        lacking = ((each, missing(pieces_of[each.name], each)) for each in wanted[rank])
        findings = [
            f"{each}: {number} of {each.num_elements} elements are in no piece of {each.name} that the checkpoint "
            "has; it is incomplete"
            for each, number in lacking
            if number
        ]
        if not all(pieces_of.values()):
            wanted = [[piece for piece in pieces if pieces_of[piece.name]] for pieces in wanted]
        plan = plan_reads(stored, wanted, rank, block_bytes=source.contents.block_bytes, readers=source.readers)
        return cls(num_tensors=len(names), stored=stored, targets=targets, plan=plan, findings=findings)


def _located(
    rank: int, source: Source, contents: Contents, held: Held, wanted: Sequence[Sequence[Piece]], found: Match
) -> tuple[list[_Reads], list[Callable[[], None]]]:
    """What ranks read, in order, and the acts that pad what is in no file."""

    def placed(pieces: Sequence[Piece]) -> list[Sequence[Place]]:
        return [contents.places(piece, found.source[piece.name, piece.dtype]) for piece in pieces]

    # Ranks that want the same have one list, whose places are found once.
    lists = {id(each): each for each in wanted}
    known = {at: placed(each) for at, each in lists.items()}
    targets, paddings = list[ReadTarget](), list[Callable[[], None]]()
    for piece, each in zip(wanted[rank], known[id(wanted[rank])], strict=True):
        takers, pads = targets_at(contents, each, held.tensors[piece], piece.dtype, keeps=True)
        targets += takers
        paddings += pads
    places = {at: list(chain.from_iterable(each)) for at, each in known.items()}
    elements_of = {at: [place.piece for place in each if place.fill is None] for at, each in places.items()}
    scales_of = {at: pieces_of_scales(contents, each) for at, each in places.items()}
    elements, scales = ([of[id(each)] for each in wanted] for of in (elements_of, scales_of))
    # Scales before the elements that are multiplied by them.
    before = [_Reads.of(rank, source, scales, targets_of_scales(targets))] if any(scales) else []
    return [*before, _Reads.of(rank, source, elements, targets)], paddings


_facts_in = json_as(tuple[dict[str, str], list[str], list[str]])
"""Ties of a target, names that it accounts for, and what of the stored settings does not fit it."""


def _settle(
    channel: Channel, state: State, contents: Contents, options: _Options
) -> tuple[Held, Restoration | None, list[list[Piece]], Match]:
    """What this rank fills, what makes it its own, and what every rank wants, without what is missing, and from where.

    Raises the same error on all ranks.
    """
    effects = contents.effects
    waits_for_order = is_unsettled(contents) and not options.weights_alone
    with Gathering("pieces, ties and findings of the target", at_once_bytes=AT_ONCE_BYTES).agreed(channel) as gathered:
        orders = state.numbering() if waits_for_order and isinstance(state, Numbering) else ()
        ordered = as_numbered(contents, orders)
        contents = ordered.contents
        held, restoration = _target(state, contents)
        check_targets(held)
        # A tensor without elements is wanted by its name alone, so that a checkpoint which lacks it is found out.
        own = [piece for piece in held.tensors if piece.num_elements or piece.whole]
        of_settings = (sorted(restoration.accounted), list(restoration.findings)) if restoration else ([], [])
        gathered.own = [pack_pieces(own), json.dumps([held.aliases, *of_settings]).encode()]
    texts, known_of = gathered.texts
    pieces_of = unpack_alike(texts, texts[channel.rank], own)
    # Of the different texts only: ranks that hold replicas say the same, and are looked at once.
    some = {(each.name, each.dtype, each.global_shape): each for pieces in pieces_of.values() for each in pieces}
    kinds = [tensor_of(piece) for piece in some.values()]
    known = understood_once(known_of, _facts_in, purpose="ties of the target")
    ties_of, names_of, misfits_of = zip(*known, strict=True)
    aliases = {alias: name for ties in ties_of for alias, name in ties.items()}
    placed = {kind.name for kind in kinds} | aliases.keys()
    kinds = [kind for kind in kinds if not effects.keeps(kind.name)]
    accounted = frozenset[str]().union(*names_of)
    found = match(kinds, contents, aliases=aliases, accounted=accounted)
    found.unexpected.extend(
        f"{name}: the rewrite adds it, and the target has no such tensor"
        for name in without_followers(effects.added)
        if name not in placed
    )
    unfit = dict.fromkeys(chain.from_iterable(misfits_of))
    if isinstance(state, Restorable):
        unfit |= dict.fromkeys(effects.unfit)
    findings = list(found.misfits)
    found.notes[:0] = ordered.notes
    if not options.cast:
        findings += [
            f"{each}; allow it with cast=True, or keep the saved dtypes (precision.master)" for each in found.casts
        ]
    if not options.strict:
        found.unexpected.extend(untied(name, twin, "lie apart") for name, twin in found.twins)
        found.twins.clear()
    else:
        findings += [*ordered.findings, *found.missing, *found.unexpected, *([] if options.weights_alone else unfit)]
    if findings:
        notes = (*ordered.notes, *effects.notes)
        remarks = [f"note: {each}" for each in notes if not any(finding.startswith(each) for finding in findings)]
        raise CheckpointError(
            *findings,
            *remarks,
            about=f"{contents.location} does not fit the target{prefix_hint(kinds, contents, found)}",
        )
    # Let pass (`strict=False`), these are in the report.
    found.unexpected.extend([*ordered.findings, *unfit])
    lacking = {kind.name for kind in kinds if (kind.name, kind.dtype) not in found.source}
    kept = sorted({model_name_of_master(name) or name for name in lacking} - {n for n in lacking if is_state_name(n)})
    if kept and isinstance(state, Restorable):
        # Found out only now. A state that keeps some of its values has to know it, for its next save says where values
        # come from; to prepare it once more changes nothing.
        held, restoration = _target(state, replace(contents, settings={**contents.settings, KEPT: kept}))
    # From here on under the names under which they are stored.
    found.source.update({kind: ordered.given.get(name, name) for kind, name in found.source.items()})
    found.twins[:] = [(ordered.given.get(one, one), ordered.given.get(two, two)) for one, two in found.twins]
    present = {
        text: [piece for piece in pieces if piece.num_elements and (piece.name, piece.dtype) in found.source]
        for text, pieces in pieces_of.items()
    }
    return held, restoration, [present[text] for text in texts], found


def _target(state: State, contents: Contents) -> tuple[Held, Restoration | None]:
    """What this rank fills, and what makes it its own."""
    if not isinstance(state, Restorable):
        return hold(state, what="the target"), None
    stored = {name: tensor.whole for name, tensor in contents.tensors.items()}
    restoration = state.restore(stored, contents.settings)
    held = hold(restoration.wanted, what="the target")
    return replace(held, aliases={**held.aliases, **restoration.aliases}), restoration
