"""The run under the layout: every rank leaves its notes in a folder, and one process joins them.

    state-0/  gradients-0/  updated-0/  rank-000000-0.pt ..  gradients-1/  updated-1/  rank-000000-1.pt ..

`state-N` is the engine before update N, `gradients-N` what the optimizer was given in it, `updated-N` the engine after
it, all as checkpoints. After `state-0` there is one only where the program has changed values between two updates.
`rank-R-N.pt` has the notes of rank R (`RankNotes`). `LayoutNotes` joins the notes of all ranks of one update, numbered
and added up as one process would have them:

    2 data ranks x 2 microbatches     rank 0: 0, 1     rank 1: 0, 1     ->  microbatches 0, 1, 2, 3
    a parameter on stages 0 and 3     gradients of both ranks are added
    a parameter that is whole on tp   equal on all: one is taken; not equal: each has a part, they are added
    a parameter that is cut on tp     each part is compared for itself (`part`)
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path as FilePath
from typing import Any

import torch

from shardwise.checkpoint import save
from shardwise.comm import Channel
from shardwise.comm.digests import digest_of_values
from shardwise.engine import Engine
from shardwise.engine.forward.batches import Microbatch
from shardwise.engine.step.reports import StepReport
from shardwise.plan import Plan
from shardwise.space import Piece, Portion
from shardwise.verification.error_model import Path
from shardwise.verification.program import Subject
from shardwise.verification.run_recording import GradientKey, Noted, Notes, OutputKey
from shardwise.verification.watched_program import WatchedProgram, digests_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """The notes of one rank about one update."""

    notes: Notes
    report: StepReport
    inputs: tuple[str, ...]
    """Digests of its microbatches."""
    counted: tuple[int, ...]
    """Numbers of the microbatches that the rank computed: those with a weight of 0 are left out."""
    chained: dict[str, int]
    """Parameters whose gradients went down from stage to stage within the backward -> the owner, which has the sum."""
    digests: dict[str, str]
    """Of every piece that the rank owns after the update, and of its gradient."""
    portions: dict[str, Portion]
    """What the rank has of parameters that are cut along tp."""
    num_threads: int

    def write(self, path: FilePath) -> None:
        """Leave it in a file."""
        torch.save(self, path)

    @classmethod
    def read(cls, path: FilePath) -> "RankNotes":
        """The notes that `write` left."""
        # Only tensors and values of these classes are read: a file of notes can call nothing.
        with torch.serialization.safe_globals([cls, Notes, OutputKey, GradientKey, Noted, Path, Portion, StepReport]):
            found: RankNotes = torch.load(path, weights_only=True)
        return found


def state_before(folder: FilePath, step: int) -> FilePath:
    """The state before update `step`, counted from 0."""
    own = _state_folder(folder, step)
    return own if own.exists() else updated_folder(folder, step - 1)


def _state_folder(folder: FilePath, step: int) -> FilePath:
    return folder / f"state-{step}"


def updated_folder(folder: FilePath, step: int) -> FilePath:
    """The state after update `step`."""
    return folder / f"updated-{step}"


def gradients_folder(folder: FilePath, step: int) -> FilePath:
    """The gradients of update `step`."""
    return folder / f"gradients-{step}"


def notes_file(folder: FilePath, step: int, rank: int) -> FilePath:
    """The notes of a rank in update `step`."""
    return folder / f"rank-{rank:06}-{step}.pt"


def run_layout(subject: Subject, channel: Channel, folder: FilePath) -> int:
    """Run the program under the plan, on this rank; returns how many updates it made.

    All ranks of `channel` call it, with a folder that all see.
    """
    run = LayoutRun(subject, channel, folder)
    run.run()
    # Rank 0 goes on to read what all have written: no rank may be writing still.
    channel.exchange(b"", purpose="the end of the run under the layout")
    return run.num_updates


class LayoutRun(WatchedProgram):
    """The run of one rank."""

    def __init__(self, subject: Subject, channel: Channel, folder: FilePath) -> None:
        super().__init__(subject, subject.layout_plan, channel)
        self._folder = folder
        self._counted: tuple[int, ...] = ()
        self._inputs: tuple[str, ...] = ()
        self._left: tuple[dict[str, str], Mapping[str, Any]] = {}, {}
        """Digests of the state after the last update, and the settings: a schedule changes rates."""

    def made(self, model: torch.nn.Module) -> Sequence[Mapping[str, Portion]]:
        """None apart: a rank has its own part alone."""
        return ()

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Leave the state before the update."""
        self._counted, self._inputs = self.counted(microbatches), digests_of(microbatches)
        is_changed = b"" if (_digests(self.engine.state()), self.engine.settings()) == self._left else b"1"
        if any(self.channel.exchange(is_changed, purpose="changes between two updates")):
            save(_state_folder(self._folder, self.num_updates), self.engine, channel=self.channel)
        self.recorder.begin()

    def end(self, report: StepReport) -> None:
        """Leave notes, gradients and the state after the update."""
        engine, step = self.engine, self.num_updates
        notes = self.recorder.take()
        # Before anything else: the engine's gradients are views that the next update overwrites.
        save(gradients_folder(self._folder, step), engine.gradients(), channel=self.channel)
        save(updated_folder(self._folder, step), engine, channel=self.channel)
        # Pieces that several ranks hold are equal on all of them.
        state, gradients = _digests(engine.state()), _digests(engine.gradients())
        self._left = state, copy.deepcopy(engine.settings())
        RankNotes(
            notes=notes,
            report=report,
            inputs=self._inputs,
            counted=self._counted,
            chained=_chained(engine, len(self._counted)),
            digests={f"the gradient of {name}": each for name, each in gradients.items()} | state,
            portions=dict(engine.tensor_decision.plan.portions(self.plan.mesh.coordinates(self.channel.rank)["tp"])),
            num_threads=torch.get_num_threads(),
        ).write(notes_file(self._folder, step, self.channel.rank))


def _chained(engine: Engine, num_microbatches: int) -> dict[str, int]:
    runner = engine.pipeline
    if runner is None or runner.stages.num_chunks > 1 or num_microbatches != 1:
        return {}
    # In a chain each rank's gradient contains those of later stages: only the last link, the owner, has the whole
    # sum. To add them would count the uses twice.
    return {chain.name: chain.stages[-1] % runner.stages.num_ranks for chain in runner.chains}


def _digests(tensors: Mapping[Piece, torch.Tensor]) -> dict[str, str]:
    # Digests, not values: replicas of a large model would be written by every rank only to be compared.
    return {str(piece): digest_of_values(tensor) for piece, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchGradient:
    """The gradient of one microbatch, as several ranks have it together."""

    noted: Noted
    """Their sum."""
    sizes: torch.Tensor
    """The sum of the sizes of all parts, for the elements that are kept."""
    parts: tuple[tuple[int, torch.Tensor], ...]
    """The part of each rank: (its place along pp, the elements that are kept)."""

    @classmethod
    def on_one_rank(cls, noted: Noted, stage: int) -> "MicrobatchGradient":
        """The part of one rank."""
        return cls(noted=noted, sizes=noted.sample.abs(), parts=((stage, noted.sample),))

    @classmethod
    def of(cls, parts: "Sequence[MicrobatchGradient]") -> "MicrobatchGradient":
        """The sum of contributions."""
        if len(parts) == 1:
            return parts[0]
        total = torch.stack([each.noted.sample for each in parts]).sum(0)
        return cls(
            noted=parts[0].noted._replace(sample=total, digest=""),
            sizes=torch.stack([each.sizes for each in parts]).sum(0),
            parts=tuple(part for each in parts for part in each.parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNotes:
    """The notes of one update. Microbatches are numbered over all data ranks, as one process goes through them."""

    report: StepReport
    outputs: Mapping[OutputKey, Sequence[tuple[int, Noted]]]
    """The values of each output on ranks: (rank, value)."""
    gradients: Mapping[GradientKey, MicrobatchGradient]
    """Of parameters that are whole on the ranks that compute with them: the sum over these ranks."""
    inputs: Sequence[tuple[int, str]]
    """Of each microbatch a rank that was given it, and its digest."""
    counted: Sequence[int]
    """The microbatches that were computed, in order."""
    unequal_pieces: Sequence[tuple[str, int, int]]
    """Pieces that two ranks have with other values: (piece, the one rank, the other)."""
    portions: Sequence[Mapping[str, Portion]]
    """For each rank along tp, what it has of parameters that are cut."""

    def has_gradient(self, parameter: str, microbatch: int, *, cut: bool) -> bool:
        """Whether ranks have parts of the gradient of a microbatch, or else the whole one."""
        whole = GradientKey(microbatch, parameter)
        parts = (whole._replace(part=rank) for rank in range(len(self.portions)))
        return any(key in self.gradients for key in (parts if cut else (whole,)))

    @classmethod
    def read(cls, plan: Plan, folder: FilePath, step: int, shapes: Mapping[str, tuple[int, ...]]) -> "LayoutNotes":
        """From the notes of the ranks. shapes: of the whole parameters."""
        mesh = plan.mesh
        ranks = [RankNotes.read(notes_file(folder, step, rank)) for rank in range(mesh.size)]
        by_data_rank = {mesh.data_rank(rank): rank for rank in reversed(range(mesh.size))}
        holders = [by_data_rank[at] for at in range(mesh.num_data_ranks)]
        first = [0, *accumulate(len(ranks[holder].inputs) for holder in holders)]
        """The number of the first microbatch of each data rank."""
        outputs: dict[OutputKey, list[tuple[int, Noted]]] = {}
        parts: dict[GradientKey, dict[int, list[MicrobatchGradient]]] = {}
        counted: set[int] = set()
        for rank, own in enumerate(ranks):
            # `counted`: a rank leaves out microbatches of weight 0, and numbers those that it computed from 0 on.
            numbers = [first[mesh.data_rank(rank)] + at for at in own.counted]
            counted |= set(numbers)
            for key, noted in own.notes.outputs.items():
                outputs.setdefault(key._replace(microbatch=numbers[key.microbatch]), []).append((rank, noted))
            at = mesh.coordinates(rank)
            for gradient, noted in own.notes.gradients.items():
                holder = own.chained.get(gradient.parameter, at["pp"])
                if holder == at["pp"]:  # else this part is in what another rank has
                    renamed = gradient._replace(microbatch=numbers[gradient.microbatch])
                    parts.setdefault(renamed, {}).setdefault(at["tp"], []).append(
                        MicrobatchGradient.on_one_rank(noted, at["pp"])
                    )
        return cls(
            report=ranks[0].report,
            outputs=outputs,
            gradients=dict(_together(parts, shapes)),
            inputs=[(holder, digest) for holder in holders for digest in ranks[holder].inputs],
            counted=sorted(counted),
            unequal_pieces=list(_unequal(ranks)),
            portions=[own.portions for own in ranks[: mesh.tp]] if mesh.tp > 1 else [],
        )


def _together(
    parts: Mapping[GradientKey, Mapping[int, Sequence[MicrobatchGradient]]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[GradientKey, MicrobatchGradient]]:
    """Add up the parts of several stages, and then those of ranks along tp, where these differ."""
    for key, by_tp in parts.items():
        wholes = [MicrobatchGradient.of(each) for each in by_tp.values()]
        if any(each.noted.shape != shapes.get(key.parameter) for each in wholes):
            yield from ((key._replace(part=at), each) for at, each in zip(by_tp, wholes, strict=True))
            continue
        # Whether ranks along tp have the same gradient or parts of it is not declared anywhere that this may rely
        # on: the rules of tensor parallelism are what is verified.
        alike = all(torch.equal(each.noted.sample, wholes[0].noted.sample) for each in wholes)
        yield key, wholes[0] if alike else MicrobatchGradient.of(wholes)


def _unequal(ranks: Sequence[RankNotes]) -> Iterator[tuple[str, int, int]]:
    first: dict[str, tuple[int, str]] = {}
    for rank, own in enumerate(ranks):
        for piece, digest in own.digests.items():
            other, known = first.setdefault(piece, (rank, digest))
            if known != digest:
                yield piece, other, rank
