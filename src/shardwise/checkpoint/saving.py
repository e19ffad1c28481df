"""Saving: what each rank holds becomes one save, which is there as a whole or not at all.

[1] describe   every rank says what it holds; all decide alike who writes what, or refuse together
[2] write      every rank its own file, straight from the tensors' memory, and makes it durable
[3] report     checksums go to rank 0; a rank that failed makes all refuse
[4] commit     rank 0 creates the manifest, which is the save
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from shardwise.checkpoint.arrangement import Arrangement, FileLayout, arrange
from shardwise.checkpoint.commit import Attempt, Description, SaveReport, Written, begin, commit, discard
from shardwise.checkpoint.contents import BLOCK_BYTES
from shardwise.checkpoint.full_tensors import stream_whole
from shardwise.checkpoint.holdings import Holdings, RankFacts, compared_replicas
from shardwise.checkpoint.manifest import packed
from shardwise.checkpoint.renamed_settings import layout_of, renamed_settings
from shardwise.checkpoint.safetensors_files import FileFilling, Sink, row_major_bytes
from shardwise.checkpoint.saves import Listing, check_retention, remove_older, storing
from shardwise.checkpoint.state_pieces import Held, KnownDTensors, hold
from shardwise.checkpoint.states import CURSOR_KEY, SomeData, State, positioned, wrong_rewrite
from shardwise.checkpoint.stores import Address, Store, store_of
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, json_as, understood
from shardwise.comm.given_channel import channel_of, given_or_default
from shardwise.comm.local_tensors import bytes_of
from shardwise.errors import CheckpointError, MismatchError, PlanError
from shardwise.moving.piece_exchange import AT_ONCE_BYTES, Gathering, merged_settings, pack_pieces
from shardwise.moving.replica_samples import samples_of
from shardwise.plan import Plan
from shardwise.plan.saved_settings import settings_apart
from shardwise.rewrite import Rewrite
from shardwise.space import Piece

VISIBLE_SECONDS = 30.0
"""After so long every network file system shows what another host has written, unless it is configured otherwise."""

_PAUSE_SECONDS = 0.05

_FACTS = "request, pieces, ties and settings of a save"
_COMMIT, _WAITING = "verdict on the commit of a save", b"waiting"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The caller's options of a save, apart from the state."""

    extra: Mapping[str, object] | None
    step: int | None
    file_layout: FileLayout
    rewrite: Rewrite | None = None
    data: SomeData | None = None

    def checked(self) -> "Arguments":
        """With all defaults filled in. Raises CheckpointError for what cannot be saved."""
        extra = {} if self.extra is None else self.extra
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra is a {type(extra).__name__}; give a dict of JSON values")
        if strange := [key for key in extra if not isinstance(key, str)]:
            raise CheckpointError(f"extra has the key {strange[0]!r}; its own keys are strings")
        if self.data is not None:
            data = positioned(self.data)
            if CURSOR_KEY in extra:
                raise CheckpointError(f"extra has the key {CURSOR_KEY!r}, which is that of data; leave it out of extra")
            extra = {**extra, CURSOR_KEY: dict(data.cursor())}
        step = self.step
        given = extra.get("step")
        if step is None and type(given) is int:
            step = given
        # A copy: an asynchronous save writes it later, and the caller may have changed its dict by then.
        extra = packed(dict(extra), "extra")
        if self.file_layout not in get_args(FileLayout):
            raise CheckpointError(
                f"layout {self.file_layout!r} was asked for; a save is laid out as {' or '.join(get_args(FileLayout))}"
            )
        if step is not None and type(step) is not int:
            raise CheckpointError(f"step is {step!r}, a {type(step).__name__}; give a whole number (int) or None")
        if problems := wrong_rewrite(self.rewrite):
            raise CheckpointError(*problems)
        return Arguments(extra, step, self.file_layout, self.rewrite)

    def text(self) -> bytes:
        """What has to be equal on all ranks."""
        text = None if self.rewrite is None else str(self.rewrite)
        # Sorted: dicts are equal whatever the order in which ranks filled them.
        return json.dumps([self.extra, self.step, self.file_layout, text], sort_keys=True).encode()


@dataclass(frozen=True, slots=True)
class Retention:
    """Which saves stay once a new one is committed; all do where `keep` is None. See `prune`."""

    keep: int | None
    keep_every: int | None

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_retention(self.keep, self.keep_every)
        elif self.keep_every is not None:
            raise CheckpointError("keep_every was given without keep, so that all saves stay; give both")

    def counted(self, arguments: Arguments, state: State) -> Arguments:
        """The same with the step by which `keep_every` goes: that of an engine, where the caller says none."""
        if self.keep_every is None or arguments.step is not None or "step" in (arguments.extra or {}):
            return arguments
        steps = getattr(state, "steps", None)
        if type(steps) is not int:
            raise CheckpointError("keep_every goes by steps, and this save has none; give step=")
        return replace(arguments, step=steps)

    def apply(self, store: Store, listing: Listing) -> None:
        """Remove the others of those that are listed after a commit; the rank that committed does."""
        if self.keep is not None:
            remove_older(store, listing, keep=self.keep, keep_every=self.keep_every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is decided before a byte is written."""

    store: Store
    attempt: Attempt
    arrangement: Arrangement
    description: Description
    held: Held
    samples: Callable[[], bytes]
    """Gives the digests of the replicas of this rank: see `replica_samples`."""

    def report(self, rank: int) -> SaveReport:
        """What `rank` tells its caller when all is done."""
        return SaveReport(
            location=f"{self.store.location}/{self.attempt.folder}".rstrip("/"),
            step=self.description.step,
            num_tensors=len(self.arrangement.tensors),
            num_bytes=self.arrangement.num_bytes,
            written_bytes=self.arrangement.file(rank).num_bytes if self.arrangement.file(rank).pieces else 0,
        )


def save(
    path: Address,
    state: State,
    *,
    extra: Mapping[str, object] | None = None,
    step: int | None = None,
    layout: FileLayout = "pieces",
    rewrite: Rewrite | None = None,
    channel: Channel | None = None,
    data: SomeData | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
) -> SaveReport:
    """Save `state` as a new save in the folder `path`, which may hold others: they stay as they are.

    path: a folder, an address ("s3://bucket/run"), or a Store, that all ranks see.
    state: tensors by name (plain or DTensor; plain ones are alike on all ranks), or tensors by `Piece`. Or an object
        with `state()`, such as an engine or `TorchState(model, optimizer)`.
    extra: JSON values to go with it, such as `scheduler.state_dict()`; every rank gives the same. Keys of dicts may
        be numbers too.
    step: by which it can be loaded later (default: `extra["step"]`, if that is a whole number).
    layout: "pieces": each rank writes its own elements, replicas once; "whole": every tensor is whole in one file.
    rewrite: from the names and shapes of `state` to those that are saved; the same on all ranks. Optimizer state and
        settings go along, and the save keeps what its inverse needs. Casts happen as the files are written.
    channel: the ranks that hold the state together; all of them call this. Default: that of an engine, else see
        `default_channel`.
    data: how far the run has read its samples goes along, as `extra["sw.Data"]`; a `sw.Data`, or several by name
        (`{"text": text, "code": code}`), at the same place on all ranks.
    keep: older saves are removed afterwards but for so many of the newest, this one included (see `prune`).
    keep_every: with `keep`: saves whose step is a multiple of it stay as well. An engine's step is its `steps`, if
        none is given.

    The save becomes visible in one atomic act, after all ranks have written and flushed their files. Raises
    CheckpointError, the same on all ranks, when the save fails, and RewriteError when the rewrite does not fit the
    state. Then older saves are untouched.
    """
    retention = Retention(keep, keep_every)
    with given_or_default(channel or channel_of(state), "a save") as used:
        arguments = retention.counted(Arguments(extra, step, layout, rewrite, data), state)
        return _save(used, path, state, arguments, retention)


def _save(
    channel: Channel,
    path: Address,
    state: State,
    arguments: Arguments,
    retention: Retention,
) -> SaveReport:
    prepared = prepare(channel, path, state, arguments)
    store = prepared.store
    arrangement, attempt = prepared.arrangement, prepared.attempt
    try:
        with agreed(channel, purpose="verdict on the files of a save") as files:
            files.value = _write_file(channel, prepared).pack()
        # Over network file systems rank 0 may not see a file yet that another rank has written. It says that it waits,
        # and all come back to the same exchange, so that no deadline of the channel passes.
        while True:
            with agreed(channel, purpose=_COMMIT) as committed:
                if channel.rank == 0:
                    parts = [
                        Written.unpack(report, arrangement.file(rank), prepared.description.block_bytes)
                        for rank, report in enumerate(files.values)
                    ]
                    saves = commit(store, attempt, arrangement, parts, prepared.description, again=_Again(channel))
                    retention.apply(store, saves)
            if committed.values[0] != _WAITING:
                break
    except CheckpointError:  # all ranks refuse; after a lost peer nobody knows whether it was committed
        discard(store, attempt, channel.rank or None)
        raise
    return prepared.report(channel.rank)


def _write_file(channel: Channel, prepared: Prepared) -> Written:
    """Write what this rank has to write; under the layout "whole" also send what others write."""
    store, attempt, arrangement = prepared.store, prepared.attempt, prepared.arrangement
    name = attempt.folder + attempt.data_file(channel.rank)
    file = arrangement.file(channel.rank)
    written = Written([], samples=prepared.samples())
    # Whole tensors are put together out of what all ranks hold: whatever becomes of its own file, a rank takes part in
    # that once, and no more than once.
    others_wait = arrangement.file_layout == "whole"
    try:
        if file.pieces:
            with storing(store, name, "written"), store.write(name, num_bytes=file.num_bytes) as writer:
                filling = FileFilling(file, writer, block_bytes=prepared.description.block_bytes)
                if others_wait:
                    others_wait = False
                    stream_whole(channel, arrangement, prepared.held, filling)
                else:
                    write_pieces(file.pieces, prepared.held, filling)
                filling.flush()
            written = replace(written, checksums=filling.checksums)
    except CheckpointError:
        if others_wait:  # also where this rank cannot write its own file
            stream_whole(channel, arrangement, prepared.held, None)
        raise
    if others_wait:
        stream_whole(channel, arrangement, prepared.held, None)
    return written


class _Again:
    """On rank 0: tells the others that it waits for a file of theirs, so that it does not seem stuck."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._deadline: float | None = None

    def __call__(self) -> bool:
        """Pause; whether to look once more."""
        if self._deadline is None:
            self._deadline = time.monotonic() + VISIBLE_SECONDS
        if time.monotonic() > self._deadline:
            return False
        with agreed(self._channel, purpose=_COMMIT) as agreement:
            agreement.value = _WAITING
        time.sleep(_PAUSE_SECONDS)
        return True


class SaveMemory:
    """What the last save found out, and holds for the next one of a state that is cut alike."""

    def __init__(self) -> None:
        self.known_dtensors = KnownDTensors()
        self.gathering = Gathering(_FACTS, at_once_bytes=AT_ONCE_BYTES)
        self._store: Store | None = None
        self._key: object = None
        self._kept: tuple[Holdings, Arrangement] | None = None

    def store_of(self, path: Address) -> Store:
        """The store; every save through this memory goes to the same one, and what it knows of its service is kept."""
        if self._store is None:
            self._store = store_of(path)
        return self._store

    def arranged(self, facts: RankFacts, held: Held, arguments: Arguments) -> tuple[Holdings, Arrangement]:
        """Who holds what, under the names of the rewrite if there is one, and who writes what."""
        # Every save through this memory has the same rewrite.
        key = (list(facts.pieces), list(map(repr, facts.ties)), facts.layout, arguments.file_layout)
        # Most saves of a run are of a state that is cut as the last one was: the texts of all pieces are the same, and
        # nothing is planned. Only numbers, such as the step, are looked at anew.
        if self._kept is None or key != self._key:
            known = Holdings.of(facts, list(held.tensors), arguments.rewrite)
            self._key, self._kept = key, (known, arrange(known.lists, arguments.file_layout, block_bytes=BLOCK_BYTES))
        return self._kept


def prepare(
    channel: Channel,
    path: Address,
    state: State,
    arguments: Arguments,
    memory: SaveMemory | None = None,
) -> Prepared:
    """Decide with all ranks who writes what, and where. Raises the same error on all ranks when one must refuse.

    Devices are not waited for.
    """
    memory = memory if memory is not None else SaveMemory()
    with memory.gathering.agreed(channel) as gathered:
        # All that may refuse on one rank alone is in here, so that every rank learns of it.
        arguments = arguments.checked()
        store = memory.store_of(path)
        held = hold(state, known=memory.known_dtensors)
        facts = [json.dumps(each).encode() for each in (held.aliases, *settings_apart(held.settings))]
        gathered.own = [arguments.text(), pack_pieces(list(held.tensors)), *facts]
        if channel.rank == 0:
            begun = begin(store)
            # Rank 0 alone looks at what is there: two ranks could see different saves, and begin different ones.
            gathered.value = begun.pack()
    requests, pieces, aliases_of_all, *settings_of_all = gathered.texts
    if different := [rank for rank, text in enumerate(requests) if text != requests[0]]:
        raise MismatchError(
            f"rank {different[0]} was called with other arguments than rank 0: extra, step, layout and rewrite are "
            f"{requests[different[0]].decode()} there and {requests[0].decode()} on rank 0. Make the same call on all"
        )
    (attempt,) = understood(gathered.values[:1], Attempt.unpack, purpose="place of a save")
    attempt = begun if channel.rank == 0 else attempt
    ties = understood(aliases_of_all, cache(json_as(dict[str, str])), purpose=_FACTS)
    # Ranks know different settings, such as the optimizers of their own stage.
    settings = merged_settings(settings_of_all, purpose=_FACTS)
    of_ranks = RankFacts(pieces=pieces, ties=ties, order=(), is_of_model=False, layout=layout_of(settings))
    known, arrangement = memory.arranged(of_ranks, held, arguments)
    held = known.held(channel, held)
    if known.checked is not None:
        settings, findings = renamed_settings(settings, known.checked)
        if findings:
            raise CheckpointError(*findings, about="the optimizers do not fit the rewrite")
    description = Description(
        step=arguments.step,
        layout=_layout_in_words(settings, channel.size),
        block_bytes=BLOCK_BYTES,
        aliases=known.aliases,
        settings=settings,
        extra=arguments.extra or {},
    )
    compared = compared_replicas(channel, state, held, settings, known.checked)
    return Prepared(
        samples=samples_of(arrangement.shared if compared else (), channel.rank, compared),
        store=store,
        attempt=attempt,
        arrangement=arrangement,
        description=description,
        held=held,
    )


def write_pieces(pieces: Sequence[Piece], held: Held, sink: Sink) -> None:
    """Fill a file with pieces out of the tensors that hold them, without a copy if they are in plain CPU memory.

    What comes from a device is hashed and written on a thread, while the next part is copied.
    """
    at_hand = all(tensor.device.type == "cpu" for tensor in held.tensors.values())
    with contextlib.nullcontext() if at_hand else ThreadPoolExecutor(1, thread_name_prefix="shardwise-write") as thread:
        writing: Future[None] | None = None
        for piece in pieces:
            holding = held.piece_with(piece)
            # A chunk may be memory of the tensor itself, or a bounce buffer that is taken over: by the next chunk, or
            # of a device by the one after it. It is written before that is asked for.
            for chunk in row_major_bytes(piece, holding, held.tensors[holding], held.dtypes_of(holding)):
                if thread is None:
                    sink.write(bytes_of(chunk))
                    continue
                if writing is not None:
                    writing.result()
                writing = thread.submit(sink.write, bytes_of(chunk))
                if held.tensors[holding].device.type == "cpu":
                    writing.result()
        if writing is not None:
            writing.result()


def _layout_in_words(settings: Mapping[str, Any], num_ranks: int) -> str:
    """What people call the layout that saves: of an engine its plan in short."""
    try:
        plan = Plan.parse(settings["plan"])
    except (KeyError, PlanError):
        return f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    return f"{plan.mesh}, stage {plan.sharding.stage}, {plan.sharding.partition}"
