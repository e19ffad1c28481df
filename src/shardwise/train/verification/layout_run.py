"""The run under the layout: every rank leaves what it computed in a folder.

    state-0/  gradients-0/  rank-000000-0.pt ..  state-1/  gradients-1/  rank-000000-1.pt ..  state-2/

`state-N` is the engine before update N, `gradients-N` what the optimizer was given in it, both as checkpoints;
`rank-R-N.pt` has the notes of rank R.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import save
from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.engine import Engine
from shardwise.engine.batches import count_rows, split_batch
from shardwise.engine.parallelize import parallelize
from shardwise.engine.reports import StepReport
from shardwise.engine.step_exchange import weigh
from shardwise.train.verification.program import Program
from shardwise.train.verification.run_recording import NotedLoss, Notes, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """What one rank tells of one update."""

    notes: Notes
    report: StepReport
    counted: tuple[int, ...]
    """Numbers of the microbatches that the rank computed: those with a weight of 0 are left out."""
    chained: dict[str, int]
    """Parameters of several stages whose gradients went down from stage to stage within the backward -> who has all."""
    digests: dict[str, str]
    """Of every piece that the rank owns after the update, and of its gradient."""
    num_threads: int

    def write(self, path: Path) -> None:
        """Leave it in a file."""
        torch.save(
            {
                "notes": self.notes.packed(),
                "report": asdict(self.report),
                "counted": list(self.counted),
                "chained": self.chained,
                "digests": self.digests,
                "num_threads": self.num_threads,
            },
            path,
        )

    @classmethod
    def read(cls, path: Path) -> "RankNotes":
        """What `write` left."""
        held: dict[str, Any] = torch.load(path, weights_only=True)
        return cls(
            notes=Notes.unpacked(held["notes"]),
            report=StepReport(**held["report"]),
            counted=tuple(held["counted"]),
            chained=held["chained"],
            digests=held["digests"],
            num_threads=held["num_threads"],
        )


def state_folder(folder: Path, step: int) -> Path:
    """The state before update `step`, counted from 0."""
    return folder / f"state-{step}"


def gradients_folder(folder: Path, step: int) -> Path:
    """The gradients of update `step`."""
    return folder / f"gradients-{step}"


def notes_file(folder: Path, step: int, rank: int) -> Path:
    """The notes of a rank in update `step`."""
    return folder / f"rank-{rank:06}-{step}.pt"


def run_layout(program: Program, channel: Channel, folder: Path) -> None:
    """Train under the plan, on this rank. All ranks of `channel` call it, with a folder that all see."""
    model = program.build()
    shares = [program.share(batch, channel.rank) for batch in program.batches]
    loss = None if program.loss is None else NotedLoss(program.loss)
    # What the proof of tensor.rules would refuse is what is to be found and named here, and its calls are no step's.
    plan = replace(program.plan, tensor=replace(program.plan.tensor, prove=False))
    engine = parallelize(
        model,
        plan,
        optimizer=program.optimizer,
        loss=loss,
        loss_weight=program.loss_weight,
        channel=channel,
        seed=program.seed,
        sample=shares[0],
    )
    recorder = Recorder(model, engine.pipeline)
    if loss is not None:
        loss.recorder = recorder
    schedulers = [program.scheduler(each) for each in engine.optimizers] if program.scheduler else []
    save(state_folder(folder, 0), engine, channel=channel)
    try:
        for step, share in enumerate(shares):
            counted = _counted(program, share)
            recorder.begin()
            report = engine.step(share)
            notes = recorder.take()
            gradients = engine.gradients()
            if not report.skipped:
                for scheduler in schedulers:
                    scheduler.step()
            save(gradients_folder(folder, step), gradients, channel=channel)
            save(state_folder(folder, step + 1), engine, channel=channel)
            RankNotes(
                notes=notes,
                report=report,
                counted=counted,
                chained=_chained(engine, len(counted)),
                digests=_digests(engine),
                num_threads=torch.get_num_threads(),
            ).write(notes_file(folder, step, channel.rank))
        channel.exchange(b"", purpose="the end of the run under the layout")
    finally:
        recorder.remove()


def _counted(program: Program, share: dict[str, Any]) -> tuple[int, ...]:
    parts = split_batch(share, min(program.plan.merge.microbatches, count_rows(share)), torch.device("cpu"))
    return tuple(at for at, weight in enumerate(weigh(parts, program.loss_weight)) if weight)


def _chained(engine: Engine, num_microbatches: int) -> dict[str, int]:
    runner = engine.pipeline
    if runner is None or runner.stages.num_chunks > 1 or num_microbatches != 1:
        return {}
    return {chain.name: chain.stages[-1] % runner.stages.num_ranks for chain in runner.chains}


def _digests(engine: Engine) -> dict[str, str]:
    """Pieces that several ranks hold are equal on all of them."""
    gradients = {f"the gradient of {piece}": tensor for piece, tensor in engine.gradients().items()}
    state = {str(piece): tensor for piece, tensor in engine.state().items()}
    return {text: digest_of_values(tensor) for text, tensor in (gradients | state).items()}
