"""Running averages of the weights: of what this rank owns, one fused operation per bucket and update, no messages.

    master     | w2 | w1[0:32] |  --lerp_(master, weight)-->  | w2 | w1[0:32] |   average, in the dtype of the master

    n weights are averaged already     weight of the next
    decay                              n = 0: 1 (a copy), later: 1 - decay
    decay and warmup                   9 / (9 + n), at least 1 - decay
    no decay: the mean (SWA)           1 / (1 + n)

These are the bits of `torch.optim.swa_utils.AveragedModel`. Like it, buffers are not averaged. In their places:

    averaged()    [1] all ranks agree   [2] masters and averages change places   [3] as after an update: cast, gather
    its end       the same; where no rank can talk any more, this one has its own weights again
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.step.edges import EntryRestoration, StateEntry
from shardwise.engine.zero.bucket_memory import WholeBucket
from shardwise.engine.zero.flat_params import FlatParams, placed
from shardwise.errors import CheckpointError, ModelError, PeerError, ShardwiseError, few_of, in_words
from shardwise.plan import Segment
from shardwise.plan.names import AVERAGE, split_state_name, state_name
from shardwise.plan.saved_settings import stored_names, stored_ties
from shardwise.plan.specs import Average
from shardwise.space import Piece

_AT_ONCE = 1 << 18
"""Elements that change places at a time, through memory of their number."""


class WeightAverages:
    """The averages that a rank has."""

    def __init__(self, rule: Average, buffers: FlatParams, inventory: Inventory) -> None:
        self._rule = rule
        self._buffers = buffers
        self._spec_of = {spec.name: spec for spec in inventory.specs}
        self._floor = 0.0 if rule.decay is None else 1 - rule.decay
        self._lag = 1 if rule.decay is None else 9 if rule.warmup else 0
        # What is frozen keeps its values, which are their average.
        self._averages = [(each, each.master.clone()) for each in buffers.buckets if each.plan.trainable]
        self._num = 0
        self._num_on_device: torch.Tensor | None = None
        """How often was averaged, where only the device knows which updates it has skipped."""
        self.are_in = False
        """Whether they are in the place of the weights, and the weights in theirs."""

    @property
    def num_averaged(self) -> int:
        """How often weights were averaged; waits for the device where it alone knows."""
        if self._num_on_device is not None:
            self._num, self._num_on_device = int(self._num_on_device), None
        return self._num

    def refuse_inside(self, call: str) -> None:
        """Raise ModelError for a call that needs the weights, while averages are in their place."""
        if self.are_in:
            raise ModelError(
                f"{call} was called inside engine.averaged(), where the averages are in the place of the weights. Call "
                "it after the block"
            )

    def pieces(self) -> dict[Piece, torch.Tensor]:
        """The averages of what this rank owns, as views."""
        return {piece: view for segment, average in self._parts() for piece, view in self._placed(segment, average)}

    def settings(self) -> dict[str, Any]:
        """The entry of a checkpoint's settings."""
        return {"average": {"averaged": self.num_averaged}}

    def _placed(self, segment: Segment, average: torch.Tensor) -> Collection[tuple[Piece, torch.Tensor]]:
        return placed(state_name(segment.name, AVERAGE), average, self._spec_of[segment.name], segment).items()

    def _parts(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """What this rank owns of each parameter, and its average."""
        for bucket, average in self._averages:
            for segment in bucket.segments.values():
                yield segment, average[segment.start : segment.start + segment.run.num_elements]

    @torch.no_grad()
    def update(self, step: int, found_inf: torch.Tensor | None) -> None:
        """Average the weights after a step, where it is the turn of this one.

        found_inf: on the device, 1 where it has skipped the update; None: there was one.
        """
        if not self._rule.averages(step):
            return
        if found_inf is None:
            weight = max(self._floor, self._lag / (self._lag + num) if (num := self.num_averaged) else 1.0)
            for bucket, average in self._averages:
                average.lerp_(bucket.master, weight)
            self._num += 1
            return
        # The device decides, and nobody waits for it: the weight of weights that did not change is 0.
        if self._num_on_device is None:
            self._num_on_device = torch.full((), self._num, dtype=torch.int64, device=found_inf.device)
        taken = found_inf == 0
        weights: dict[torch.dtype, torch.Tensor] = {}
        for bucket, average in self._averages:
            dtype = torch.promote_types(average.dtype, torch.float32)
            if dtype not in weights:
                weights[dtype] = self._weight_on_device(self._num_on_device.to(dtype.to_real())).mul_(taken).to(dtype)
            if dtype == average.dtype:
                average.lerp_(bucket.master, weights[dtype])
            else:  # as with a weight that the host knows, which is not rounded to a narrow dtype
                average.copy_(average.to(dtype).lerp_(bucket.master.to(dtype), weights[dtype]))
        self._num_on_device.add_(taken)

    def _weight_on_device(self, num: torch.Tensor) -> torch.Tensor:
        weight = self._lag / (self._lag + num) if self._lag else (num == 0).to(num.dtype)
        return weight.clamp_(min=self._floor)

    def restoration(
        self, stored: Mapping[str, Piece], settings: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> EntryRestoration:
        """Find the averages of a checkpoint; where it has none of a parameter, its average begins anew."""
        names = {segment.name for segment, _ in self._parts()}
        saved = {split[0] for split in map(split_state_name, stored) if split is not None and split[1] == AVERAGE}
        found = stored_names(sorted(names), aliases, dict.fromkeys(saved), stored_ties(settings))
        notes: tuple[str, ...] = ()
        if begun := names - found.keys():
            which = few_of(sorted(begun)) if saved else "any parameter"
            notes = (f"the checkpoint has no average of {which}; it begins with the weights that are loaded",)
        wanted = {
            piece: view
            for segment, average in self._parts()
            if segment.name in found
            for piece, view in self._placed(segment, average)
        }
        num_averaged = _num_averaged_in(settings) if saved else 0
        return EntryRestoration(wanted=wanted, notes=notes, finish=partial(self._restore, num_averaged, begun))

    @torch.no_grad()
    def _restore(self, num_averaged: int, begun: Collection[str]) -> None:
        """Go on from averages that were read, of so many weights; those of `begun` begin with the weights."""
        self._num, self._num_on_device = num_averaged, None
        for bucket, average in self._averages:
            for name, segment in bucket.segments.items():
                if name in begun:
                    span = slice(segment.start, segment.start + segment.run.num_elements)
                    average[span].copy_(bucket.master[span])

    @contextmanager
    def in_place(self, world: Channel, adopt_writes: Callable[[], None], publish: Callable[[], None]) -> Iterator[None]:
        """Averages in the place of the weights; afterwards the weights again, to the bit, whatever happens inside.

        All ranks go in and out together. adopt_writes: takes over what was written to parameters. publish: gives all
        ranks the new values of what each owns.
        """
        if self.are_in:
            yield
            return
        failure: BaseException | None = None
        self._change_places()
        try:
            publish()
            try:
                yield
            finally:
                # What was written inside belongs to the averages: found later, it would replace masters by casts.
                adopt_writes()
        except (PeerError, GeneratorExit):
            self._change_places(alone=True)
            raise
        except BaseException as error:
            failure = error
        try:
            # Also keeps this rank from writing what another one still reads in place (stage 3).
            said = b"" if failure is None else in_words(failure).encode()
            answers = world.exchange(said, purpose="end of engine.averaged()")
        except ShardwiseError:
            self._change_places(alone=True)
            if failure is not None:
                raise failure from None
            raise
        self._change_places()
        publish()
        if failure is not None:
            raise failure
        if (rank := next((rank for rank, answer in enumerate(answers) if answer), None)) is not None:
            raise PeerError(
                f"rank {rank} left engine.averaged() with {answers[rank].decode(errors='replace')}; the weights are "
                "in their places again on all ranks",
                rank=rank,
                operation="exchange",
                purpose="end of engine.averaged()",
            )

    @torch.no_grad()
    def _change_places(self, *, alone: bool = False) -> None:
        """Exchange masters and averages. alone: no rank gathers afterwards; own working copies are made here."""
        self._buffers.settle()
        self._averages = [(bucket, _exchanged(bucket, average)) for bucket, average in self._averages]
        self.are_in = not self.are_in
        for bucket, _ in self._averages if alone else ():
            bucket.publish()
            bucket.master_memory.note()


def _exchanged(bucket: WholeBucket, average: torch.Tensor) -> torch.Tensor:
    """Put the average in the place of the master; the tensor that has the master now."""
    if bucket.has_master:
        # What optimizers hold views the memory of the master, which no step changes meanwhile.
        master, bucket.master = bucket.master, average
        return master
    for mine, other in zip(bucket.master.split(_AT_ONCE), average.split(_AT_ONCE), strict=True):
        kept = mine.clone()
        mine.copy_(other)
        other.copy_(kept)
    return average


def check_in_place(averages: StateEntry | None, world: Channel, check: Callable[[], None]) -> WeightAverages:
    """The averages, once all ranks can exchange them. Raises ModelError, the same on all ranks."""
    with agreed(world, purpose="verdict on averages", doing="engine.averaged()"):
        check()
        if averages is None:
            raise ModelError(
                "engine.averaged() was called, and the plan keeps no average of the weights; give "
                "Plan(average=sw.Average(decay=0.999)), average.decay in TOML"
            )
    assert isinstance(averages, WeightAverages), "else it was refused"
    return averages


def _num_averaged_in(settings: Mapping[str, Any]) -> int:
    """Of how many weights the averages of a checkpoint are. Raises CheckpointError."""
    entry = settings.get("average")
    num = entry.get("averaged") if isinstance(entry, dict) else None
    if type(num) is int and num >= 0:
        return num
    raise CheckpointError(
        f"the checkpoint has averages of weights, and its settings have average={entry!r}, which is no number of "
        "averaged weights. Load it under a plan without an average, or write the averages as a model first: shardwise "
        "ckpt convert --weights average"
    )
