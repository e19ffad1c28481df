"""Verification of a program under a plan: run it, repeat every update in one process, compare.

    ranks          state 0 -> update 0 -> state 1 -> update 1 -> state 2        each state is saved, gradients too
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
from shardwise.errors import OptimizerError
from shardwise.plan import Plan
from shardwise.verification.error_model import ErrorModel
from shardwise.verification.layout_run import LayoutNotes, gradients_folder, run_layout, state_folder
from shardwise.verification.one_process import OneProcess
from shardwise.verification.program import Program, Scheduler
from shardwise.verification.report import Divergence, StepComparison, Verdict, VerificationReport
from shardwise.verification.run_comparison import StepComparer, initial_divergence

_PROGRESS = "progress of a verification"


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
    program = Program(
        make_model=make_model,
        plan=plan,
        batches=batches,
        optimizer_of=lambda model: optimizer,
        loss_of=lambda model: loss,
        loss_weight=loss_weight,
        scheduler=scheduler,
        seed=seed,
    )
    program.check()
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise OptimizerError(
            f"optimizer is a {type(optimizer).__name__}; give a function from parameters to an optimizer"
        )
    if channel is not None:
        return _verify_on(channel, program, folder)
    return verify_simulated(program, timeout_seconds=timeout_seconds)


def verify_simulated(program: Program, *, title: str = "", timeout_seconds: float = 600.0) -> VerificationReport:
    """See `verify`."""
    program.check()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        folder = Path(name)

        def run(channel: Channel) -> None:
            run_layout(program, channel, folder)

        # The ranks finish before the comparison begins: both would use the random generators and threads of this
        # process.
        simulate(program.plan.mesh.size, run, timeout_seconds=timeout_seconds)
        return compare_with_one_process(program, folder, torch.device("cpu"), title=title)


def _verify_on(channel: Channel, program: Program, folder: Path | str | None) -> VerificationReport:
    with ExitStack() as stack:
        # Rank 0 makes the folder and removes it. All ranks then open it by the same path, so they have to see one
        # storage.
        name = ""
        if channel.rank == 0:
            name = stack.enter_context(_fresh_folder(channel, folder))
        purpose = "the folder of a verification"
        (told,) = understood(channel.exchange(name.encode(), purpose=purpose)[:1], bytes.decode, purpose=purpose)
        place = Path(told)
        place.mkdir(parents=True, exist_ok=True)
        run_layout(program, channel, place)
        if channel.rank > 0:
            # Ranks take part in an exchange per update: a wait for the whole comparison would exceed the channel's
            # time limit.
            while not (packed := channel.exchange(b"", purpose=_PROGRESS)[0]):
                pass  # rank 0 has compared one more update
            return understood([packed], VerificationReport.unpacked, purpose=_PROGRESS)[0]
        try:
            report = compare_with_one_process(
                program, place, channel.device, after_step=lambda: channel.exchange(b"", purpose=_PROGRESS)
            )
        except BaseException as error:
            # The others wait in an exchange: without this they would learn of the error at their time limit only.
            channel.abort(f"{type(error).__name__} in a comparison with one process: {error}")
            raise
        channel.exchange(report.packed(), purpose=_PROGRESS)
        return report


@contextmanager
def _fresh_folder(channel: Channel, inside: Path | str | None) -> Iterator[str]:
    """An empty folder, so that notes of an earlier verification are never read; removed at the end."""
    try:
        if inside is not None:
            Path(inside).mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(
            prefix="shardwise-",
            # Absolute, because ranks may run in other working folders.
            dir=None if inside is None else Path(inside).absolute(),
            ignore_cleanup_errors=True,  # after an error, other ranks may still write
        )
    except OSError as error:
        channel.abort(f"no folder for a verification: {error}")
        raise
    with made as name:
        yield name


def compare_with_one_process(
    program: Program,
    folder: Path,
    device: torch.device,
    *,
    title: str = "",
    after_step: Callable[[], object] = lambda: None,
) -> VerificationReport:
    """Repeat in one process the updates that ranks left in `folder`, up to the first that diverges."""
    own = OneProcess(program, device)
    # A model that is built differently on the ranks would make every later comparison fail in a less clear place.
    divergence = initial_divergence(own.state(), open_checkpoint(str(state_folder(folder, 0))))
    steps: list[StepComparison] = []
    remarks = dict.fromkeys([*_about_settings(program), *_about_dropout(program, own.model)])
    unknown: list[int] = []
    """Updates that say nothing of the numbers that the layout computes."""
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
        # A dict keeps the order and has each remark once, though each update makes it again.
        remarks |= dict.fromkeys(comparer.remarks())
        # Not a number equals everything or nothing: such an update proves nothing about the layout.
        if repeated.report.skipped or not math.isfinite(repeated.report.loss):
            unknown.append(step)
        after_step()
    if unknown:
        steps_in_words = f"update{'s' if len(unknown) > 1 else ''} {', '.join(map(str, unknown))}"
        remarks[
            f"not compared: {steps_in_words}. The loss or gradient is not finite, in one process too; fix the data, "
            "the model or the loss to verify"
        ] = None
    are_equal = all(each.num_compared == each.num_equal for step in steps for each in step.tallies)
    mesh = program.plan.mesh
    return VerificationReport(
        verdict=_verdict(divergence, are_equal=are_equal, is_known=len(unknown) < len(steps)),
        title=title
        or f"{mesh}, {mesh.size} ranks, against one process: {len(program.batches)} updates of "
        f"{program.num_microbatches} microbatches",
        model=ErrorModel.of(program.plan).words,
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


def _about_settings(program: Program) -> list[str]:
    if not program.left_out:
        return []
    names = [f"{_SETTINGS[name]} ({name})" for name in program.left_out]
    return [f"not compared: {', '.join(names)}. Both sides ran without"]


def _about_dropout(program: Program, model: nn.Module) -> list[str]:
    """Between modules that are cut, each rank along tp draws for its own part: other numbers than one process."""
    if program.plan.mesh.tp == 1:
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
