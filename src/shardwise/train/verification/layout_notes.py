"""What all ranks of a layout noted of one update, put together in the order of one process."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.engine.channels import data_rank_of
from shardwise.engine.reports import StepReport
from shardwise.train.verification.layout_run import RankNotes, notes_file
from shardwise.train.verification.program import Program
from shardwise.train.verification.run_recording import GradientKey, Noted, OutputKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchGradient:
    """The gradient of one microbatch, as several ranks have it together."""

    noted: Noted
    """Their sum."""
    sizes: torch.Tensor
    """The sum of the sizes of what each has, for the elements that are kept."""
    parts: tuple[tuple[int, torch.Tensor], ...]
    """What each has: (its place along pp, the elements that are kept)."""

    @classmethod
    def on_one_rank(cls, noted: Noted, stage: int) -> "MicrobatchGradient":
        """What one rank has."""
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
    """What ranks have of each output: (rank, what)."""
    gradients: Mapping[GradientKey, MicrobatchGradient]
    """Of parameters that are whole on the ranks that compute with them: what these have together, summed."""
    counted: Sequence[int]
    """The microbatches that were computed, in order."""
    unequal_pieces: Sequence[tuple[str, int, int]]
    """Pieces that two ranks have with other values: (piece, the one rank, the other)."""
    num_threads: int
    num_tensor_ranks: int

    def has_gradient(self, parameter: str, microbatch: int, *, cut: bool) -> bool:
        """Whether ranks have parts of the gradient of a microbatch, or else the whole one."""
        whole = GradientKey(microbatch, parameter)
        parts = (whole._replace(part=rank) for rank in range(self.num_tensor_ranks))
        return any(key in self.gradients for key in (parts if cut else (whole,)))

    @classmethod
    def read(cls, program: Program, folder: Path, step: int, shapes: Mapping[str, tuple[int, ...]]) -> "LayoutNotes":
        """From what the ranks left. shapes: of the whole parameters."""
        ranks = [RankNotes.read(notes_file(folder, step, rank)) for rank in range(program.plan.mesh.size)]
        per_rank = program.plan.merge.microbatches
        outputs: dict[OutputKey, list[tuple[int, Noted]]] = {}
        parts: dict[GradientKey, dict[int, list[MicrobatchGradient]]] = {}
        counted: set[int] = set()
        for rank, told in enumerate(ranks):
            numbers = [data_rank_of(program.plan, rank) * per_rank + at for at in told.counted]
            counted |= set(numbers)
            for key, noted in told.notes.outputs.items():
                outputs.setdefault(key._replace(microbatch=numbers[key.microbatch]), []).append((rank, noted))
            at = program.plan.mesh.coordinates(rank)
            for gradient, noted in told.notes.gradients.items():
                holder = told.chained.get(gradient.parameter, at["pp"])
                if holder == at["pp"]:  # else this part is in what another rank has
                    renamed = gradient._replace(microbatch=numbers[gradient.microbatch])
                    parts.setdefault(renamed, {}).setdefault(at["tp"], []).append(
                        MicrobatchGradient.on_one_rank(noted, at["pp"])
                    )
        return cls(
            report=ranks[0].report,
            outputs=outputs,
            gradients=dict(_together(parts, shapes)),
            counted=sorted(counted),
            unequal_pieces=list(_unequal(ranks)),
            num_threads=ranks[0].num_threads,
            num_tensor_ranks=program.plan.mesh.tp,
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
        alike = all(torch.equal(each.noted.sample, wholes[0].noted.sample) for each in wholes)
        yield key, wholes[0] if alike else MicrobatchGradient.of(wholes)


def _unequal(ranks: Sequence[RankNotes]) -> Iterator[tuple[str, int, int]]:
    first: dict[str, tuple[int, str]] = {}
    for rank, told in enumerate(ranks):
        for piece, digest in told.digests.items():
            other, known = first.setdefault(piece, (rank, digest))
            if known != digest:
                yield piece, other, rank
