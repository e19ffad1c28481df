"""Verification of a program under a plan: run it, repeat every update in one process, compare."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint import open as open_checkpoint
from shardwise.comm import Channel, simulate
from shardwise.engine.batches import Batch, LossFunction, LossWeight
from shardwise.plan import Plan
from shardwise.train.verification.comparison import StepComparer, initial_divergence
from shardwise.train.verification.error_model import ErrorModel
from shardwise.train.verification.layout_notes import LayoutNotes
from shardwise.train.verification.layout_run import gradients_folder, run_layout, state_folder
from shardwise.train.verification.one_process import OneProcess
from shardwise.train.verification.program import Optimizers, Program, Scheduler
from shardwise.train.verification.report import StepComparison, VerificationReport

_OF_ONE_RANK = torch.device("cpu")


def verify(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    batches: Sequence[Batch],
    *,
    optimizer: Optimizers,
    loss: LossFunction | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: Scheduler | None = None,
    seed: int = 0,
    timeout_seconds: float = 600.0,
) -> VerificationReport:
    """Train under `plan` on simulated ranks, one update per batch, and compare every update with one process.

    make_model: gives the model, alike each time; called on every rank and for the one process, after
        `torch.manual_seed(seed)`.
    batches: the rows of all data ranks together; each is cut into `plan.merge.microbatches` per data rank.
    optimizer: a function of the list of the model's parameters; also `loss`, `loss_weight`: as for `parallelize`.
    scheduler: a function from an optimizer to its learning-rate scheduler.
    timeout_seconds: how long a rank may compute while others wait.

    Raises what parallelize and step raise, and BatchError for rows that cannot be cut alike.
    """
    program = Program(
        make_model=make_model,
        plan=plan,
        batches=batches,
        optimizer=optimizer,
        loss=loss,
        loss_weight=loss_weight,
        scheduler=scheduler,
        seed=seed,
    )
    return verify_simulated(program, timeout_seconds=timeout_seconds)


def verify_simulated(program: Program, *, title: str = "", timeout_seconds: float = 600.0) -> VerificationReport:
    """See `verify`."""
    program.check()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)

        def run(channel: Channel) -> None:
            run_layout(program, channel, folder)

        simulate(program.plan.mesh.size, run, timeout_seconds=timeout_seconds)
        return compare_with_one_process(program, folder, _OF_ONE_RANK, title=title)


def compare_with_one_process(
    program: Program, folder: Path, device: torch.device, *, title: str = ""
) -> VerificationReport:
    """Repeat in one process what the ranks left in `folder`, up to the first update that diverges."""
    own = OneProcess(program, device)
    divergence = initial_divergence(own.state(), open_checkpoint(str(state_folder(folder, 0))))
    steps: list[StepComparison] = []
    remarks: dict[str, None] = {}
    for step, batch in enumerate(program.batches):
        if divergence is not None:
            break
        layout = LayoutNotes.read(program, folder, step, own.shapes)
        gradients = open_checkpoint(str(gradients_folder(folder, step)))
        with _threads(layout.num_threads):
            repeated = own.step(batch, state_folder(folder, step), gradients)
        comparer = StepComparer(
            step=step,
            program=program,
            layout=layout,
            own=repeated,
            gradients=gradients,
            state=open_checkpoint(str(state_folder(folder, step + 1))),
        )
        divergence = comparer.first_divergence()
        steps.append(comparer.summary())
        remarks |= dict.fromkeys(comparer.remarks)
    are_equal = all(each.num_compared == each.num_equal for step in steps for each in step.tallies)
    mesh = program.plan.mesh
    return VerificationReport(
        verdict="diverges" if divergence is not None else "equal" if are_equal else "rounding",
        title=title
        or f"{mesh}, {mesh.size} ranks, against one process: {len(program.batches)} updates of "
        f"{program.num_microbatches} microbatches",
        model=ErrorModel.of(program.plan).words,
        steps=tuple(steps),
        divergence=divergence,
        remarks=tuple(remarks),
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with as many threads as the ranks did: kernels round by how they share work."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
