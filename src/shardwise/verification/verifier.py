"""Verification of a program under a plan: run it, repeat every update in one process, compare.

    ranks          state 0 -> update 0 -> state 1 -> update 1 -> state 2        states are saved, gradients too
                      |                      |
    one process    load 0, update 0       load 1, update 1                      compare with what the ranks left

One process starts each update from the layout's state, not from its own. Then the rounding of one update does not grow
over the next ones, and a wrong update is found at its place.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint import open as open_checkpoint
from shardwise.comm import Channel, simulate
from shardwise.comm.agreement import understood
from shardwise.engine.forward.batches import Batch, LossFunction, LossWeight
from shardwise.engine.optimizers.known import OptimizerFunction
from shardwise.errors import ConfigError, OptimizerError, in_words
from shardwise.plan import Plan
from shardwise.verification.error_model import ErrorModel
from shardwise.verification.layout_run import (
    LayoutNotes,
    RankNotes,
    notes_file,
    run_layout,
    state_before,
    updated_folder,
)
from shardwise.verification.one_process import OneProcess, OwnStep
from shardwise.verification.program import PlainProgram, Program, Scheduler, Subject
from shardwise.verification.report import Divergence, StepComparison, Verdict, VerificationReport
from shardwise.verification.run_comparison import StepComparer, initial_divergence, other_number

_PROGRESS = "progress of a verification"


def verify_program(
    program: Program,
    plan: Plan,
    *,
    steps: int = 3,
    channel: Channel | None = None,
    folder: Path | str | None = None,
    timeout_seconds: float = 600.0,
) -> VerificationReport:
    """Run a program of yours under `plan`, and compare each of its first updates with one process.

    program: f(parallelize) -> anything. It makes its model, gives it to `parallelize`, and calls `engine.step` for each
        update, with the rows of its data rank. `parallelize` is `shardwise.parallelize` with the plan and the ranks
        filled in. It is called on every rank and in the one process, where `engine.plan` has one data rank and all
        microbatches; it has to make the same initial values each time.
    steps: updates to compare at most. The program is left after them, by an exception that is no Exception.
    channel, folder, timeout_seconds: as for `verify`.

    Raises what the program raises, ConfigError for no steps, BatchError for rows that make no equal microbatches, and
    ModelError for a program that makes no update or a second engine.
    """
    if steps < 1:
        raise ConfigError(f"steps = {steps}: no update would be compared; give 1 or more")
    return _verify_on(channel, Subject(program=program, plan=plan, num_updates=steps), folder, timeout_seconds)


def verify(
    make_model: Callable[[], nn.Module],
    plan: Plan,
    batches: Sequence[Batch],
    *,
    optimizer: OptimizerFunction,
    loss: LossFunction | None = None,
    loss_weight: LossWeight | None = None,
    scheduler: Scheduler | None = None,
    seed: int = 0,
    channel: Channel | None = None,
    folder: Path | str | None = None,
    timeout_seconds: float = 600.0,
) -> VerificationReport:
    """Train under `plan`, one update per batch, and compare every update with one process.

    make_model: gives the same model each time; called on every rank and for the one process, after
        `torch.manual_seed(seed)`.
    batches: the rows of all data ranks together; each is cut into `plan.merge.microbatches` per data rank.
    optimizer: a function of the list of the model's parameters; also `loss`, `loss_weight`: as for `parallelize`.
    scheduler: a function from an optimizer to its learning-rate scheduler.
    channel: the ranks that train; all of them make this call and get the report; None: simulated ranks. Rank 0
        compares, while others wait for it as long as the channel lets them for each update.
    folder: where ranks leave what they compute until it is compared, in a new folder inside, which is removed. All of
        them see it. None: among temporary files, for ranks of one host.
    timeout_seconds: how long a simulated rank may compute while others wait.

    Raises what parallelize and step raise, and BatchError for rows that make no equal microbatches.
    """
    program = PlainProgram(
        make_model=make_model,
        batches=batches,
        optimizer_of=lambda model: optimizer,
        loss_of=lambda model: loss,
        scheduler=scheduler,
        seed=seed,
        settings={"loss_weight": loss_weight},
    )
    subject = Subject(program=program, plan=plan, num_updates=len(batches))
    program.check(subject.plan)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise OptimizerError(
            f"optimizer is a {type(optimizer).__name__}; give a function from parameters to an optimizer"
        )
    return _verify_on(channel, subject, folder, timeout_seconds)


def verify_simulated(subject: Subject, *, title: str = "", timeout_seconds: float = 600.0) -> VerificationReport:
    """See `verify`."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)

        def run(channel: Channel) -> int:
            return run_layout(subject, channel, folder)

        # The ranks finish before the comparison begins: both would use the random generators and threads of this
        # process.
        num_updates, *_ = simulate(subject.plan.mesh.size, run, timeout_seconds=timeout_seconds)
        return compare_with_one_process(subject, folder, torch.device("cpu"), num_updates, title=title)


def _verify_on(
    channel: Channel | None, subject: Subject, folder: Path | str | None, timeout_seconds: float
) -> VerificationReport:
    if channel is None:
        return verify_simulated(subject, timeout_seconds=timeout_seconds)
    with notes_of_layout(channel, subject, folder) as (place, num_updates):
        if channel.rank > 0:
            # Ranks take part in an exchange per update: a wait for the whole comparison would exceed the channel's
            # time limit.
            while not (packed := channel.exchange(b"", purpose=_PROGRESS)[0]):
                pass  # rank 0 has compared one more update
            return understood([packed], VerificationReport.unpacked, purpose=_PROGRESS)[0]
        try:
            report = compare_with_one_process(
                subject, place, channel.device, num_updates, after_step=lambda: channel.exchange(b"", purpose=_PROGRESS)
            )
        except BaseException as error:
            # The others wait in an exchange: without this they would learn of the error at their time limit only.
            channel.abort(f"{type(error).__name__} in a comparison with one process: {error}")
            raise
        channel.exchange(report.packed(), purpose=_PROGRESS)
        return report


@contextmanager
def notes_of_layout(channel: Channel, subject: Subject, inside: Path | str | None) -> Iterator[tuple[Path, int]]:
    """Run the program on this rank: a folder with what the ranks left, and the number of updates.

    The folder is a new one, so that notes of an earlier verification are never read, and is removed at the end.
    """
    with ExitStack() as stack:
        try:
            # Rank 0 makes the folder and removes it. All ranks then open it by the same path, so they have to see one
            # storage.
            name = stack.enter_context(_fresh_folder(inside)) if channel.rank == 0 else ""
            purpose = "the folder of a verification"
            (told,) = understood(channel.exchange(name.encode(), purpose=purpose)[:1], bytes.decode, purpose=purpose)
            place = Path(told)
            place.mkdir(parents=True, exist_ok=True)
            num_updates = run_layout(subject, channel, place)
        except BaseException as error:
            channel.abort(in_words(error))
            raise
        yield place, num_updates


def _fresh_folder(inside: Path | str | None) -> "tempfile.TemporaryDirectory[str]":
    if inside is not None:
        Path(inside).mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(
        prefix="verification-",
        # Absolute, because ranks may run in other working folders.
        dir=None if inside is None else Path(inside).absolute(),
        ignore_cleanup_errors=True,  # after an error, other ranks may still write
    )


def compare_with_one_process(
    subject: Subject,
    folder: Path,
    device: torch.device,
    num_updates: int,
    *,
    title: str = "",
    after_step: Callable[[], object] = lambda: None,
) -> VerificationReport:
    """Repeat in one process the updates that ranks left in `folder`, up to the first that diverges.

    num_updates: of the ranks. title: the layout in words; "": its mesh.
    """
    comparison = _Comparison(subject, folder, device, num_updates, after_step)
    with _threads(RankNotes.read(notes_file(folder, 0, 0)).num_threads):
        comparison.run()
    return comparison.report(title)


class _Comparison(OneProcess):
    """One process, whose updates are compared as they are made."""

    def __init__(
        self, subject: Subject, folder: Path, device: torch.device, num_updates: int, after_step: Callable[[], object]
    ) -> None:
        super().__init__(subject, folder, device)
        self._num_updates_of_layout, self._after_step = num_updates, after_step
        self._steps: list[StepComparison] = []
        self._remarks = dict.fromkeys(_about_settings(subject))
        self._divergence: Divergence | None = None
        self._num_microbatches = self.plan.merge.microbatches
        self._unknown: list[int] = []
        """Updates that say nothing of the numbers that the layout computes."""

    def is_like_layout(self) -> bool:
        """Compare the initial state, and whether the layout made one more update."""
        step, last = self.num_updates, self._num_updates_of_layout
        if step == last:
            self._divergence = other_number(f"at least {step + 1}", f"{last}", step)
        elif not step:
            # A model that is built differently on the ranks would make every later comparison fail in a less clear
            # place.
            self._divergence = initial_divergence(self.state(), open_checkpoint(str(state_before(self.folder, 0))))
            self._remarks |= dict.fromkeys(_about_dropout(self.subject.plan, self.model))
        return self._divergence is None

    def is_near_layout(self, own: OwnStep) -> bool:
        """Compare an update."""
        step, plan, self._num_microbatches = self.num_updates, self.subject.plan, len(own.inputs)
        comparer = StepComparer(
            step=step,
            plan=plan,
            layout=LayoutNotes.read(plan, self.folder, step, self.shapes),
            own=own,
            gradients=self.given_gradients,
            state=open_checkpoint(str(updated_folder(self.folder, step))),
        )
        self._divergence = comparer.first_divergence()
        self._steps.append(comparer.summary())
        # A dict keeps the order and has each remark once, though each update makes it again.
        self._remarks |= dict.fromkeys(comparer.remarks())
        # Not a number equals everything or nothing: such an update proves nothing about the layout.
        if own.report.skipped or not math.isfinite(own.report.loss):
            self._unknown.append(step)
        self._after_step()
        return self._divergence is None

    def report(self, title: str) -> VerificationReport:
        """What was found."""
        steps, unknown, mesh, last = self._steps, self._unknown, self.subject.plan.mesh, self._num_updates_of_layout
        divergence, remarks = self._divergence, list(self._remarks)
        if divergence is None and len(steps) < last:
            divergence = other_number(f"{len(steps)}", f"{last}", len(steps))
        if unknown:
            remarks.append(
                f"not compared: update{'s' if len(unknown) > 1 else ''} {', '.join(map(str, unknown))}. The loss or "
                "gradient is not finite, in one process too; fix the data, the model or the loss to verify"
            )
        are_equal = all(each.num_compared == each.num_equal for step in steps for each in step.tallies)
        return VerificationReport(
            verdict=_verdict(divergence, are_equal=are_equal, is_known=len(unknown) < len(steps)),
            title=f"{title or f'{mesh} on {mesh.size} ranks'} against one process, {last} updates of "
            f"{self._num_microbatches} microbatches",
            model=ErrorModel.of(self.subject.plan).words,
            steps=tuple(steps),
            divergence=divergence,
            remarks=tuple(remarks),
        )


def _verdict(divergence: Divergence | None, *, are_equal: bool, is_known: bool) -> Verdict:
    if divergence is not None:
        return "diverges"
    if not is_known:
        return "inconclusive"
    return "equal" if are_equal else "rounding"


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with as many threads as the ranks did: kernels round by how they share work."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_SETTINGS = {
    "clip_grad_norm": "clips by norms of parts",
    "clip_grad_value": "the clip by value",
    "average": "averages of the weights",
}


def _about_settings(subject: Subject) -> list[str]:
    if not subject.left_out:
        return []
    names = [f"{_SETTINGS[name]} ({name})" for name in subject.left_out]
    return [f"not compared: {', '.join(names)}. Both sides ran without"]


def _about_dropout(plan: Plan, model: nn.Module) -> list[str]:
    """Between modules that are cut, each rank along tp draws for its own part: other numbers than one process."""
    if plan.mesh.tp == 1:
        return []
    drawing = [name for name, module in model.named_modules() if _drops(module)]
    if not drawing:
        return []
    return [
        f"random numbers inside regions that are cut along tp are not those of one process, and {drawing[0]!r} may "
        "draw them. A difference that begins there is no error; set dropout to 0 to verify"
    ]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    # Attention keeps its rate in an attribute ("dropout", "attn_pdrop") and calls the function.
    return any("drop" in key and isinstance(value, float) and 0 < value < 1 for key, value in vars(module).items())
