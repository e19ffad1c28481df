"""One rank's part of a training run, from the configuration to the last line.

    Replicas     copies in memory of the hosts, if asked for
    find_start   which save to go on from            all ranks agree; nothing is loaded yet
    _built       data, model                         `agreed`: one rank's error is raised on all
    parallelize  the engine under the plan
    take_up      load, if there is a save            position, settings, random numbers
    fit          the loop, with its callbacks: observers (rank 0), those of [[train.callbacks]], the keeper
    the end      trace, picture, a sample of text    all ranks compute, rank 0 prints

Every rank makes every call that exchanges something. Only printing and writing files is left to rank 0.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from torch import nn

from shardwise.checkpoint import Replicas
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.comm.timed import Timed
from shardwise.data import DataPlace
from shardwise.engine import parallelize
from shardwise.engine.forward.batches import Batch
from shardwise.runs.callbacks import BEGINNING, Callback, TrainingLoop
from shardwise.runs.quantities import count, size
from shardwise.runs.run_folder import begun
from shardwise.runs.run_trace import Tracer
from shardwise.runs.stop_signals import Stopped, StopSignals
from shardwise.train.announcement import announcement, changed_schedule, sizes_of
from shardwise.train.callback_tables import build_callbacks
from shardwise.train.checkpointing import RunKeeper, find_start, settings_of, take_up
from shardwise.train.config import RunConfig
from shardwise.train.continuations import Continuations
from shardwise.train.corpus import frequency_loss
from shardwise.train.learning_rates import scheduler_maker
from shardwise.train.loop import fit
from shardwise.train.observers import LossCurve, observers_of, picture_words, rows_of
from shardwise.train.plateau_rates import plateau_of
from shardwise.train.run_build import build_loss_weight, build_metrics, build_model, optimizer_factory
from shardwise.train.run_data import RunData, batches_of, build_data, sample_batch
from shardwise.train.run_rows import RunRows, read_rows
from shardwise.train.turns import build_loss, build_turns


def run(
    config: RunConfig,
    channel: Channel,
    console: Console,
    *,
    resume: str | None = None,
    signals: StopSignals | None = None,
) -> None:
    """Train as `config` asks; rank 0 alone leaves metrics and pictures in `config.output` and talks to `console`.

    resume: where to go on from: "auto" (the newest save of this run, if there is one), a path or an address of saves.
    signals: of this process; when one has come to any rank, all save after the same update and raise Stopped.
    Every rank of `channel` makes this call. What is wrong before the first update is raised alike on all ranks.
    """
    signals = signals if signals is not None else StopSignals()
    channel = Timed(channel) if config.train.trace else channel
    if config.checkpoint.replicas is None:
        _train(config, channel, console, resume, signals, None)
        return
    with Replicas(
        config.saves,
        every=1,
        channel=channel,
        timeout_seconds=config.train.timeout_seconds,
        interface=config.train.interface,
        ports=config.train.ports,
    ) as replicas:
        _train(config, channel, console, resume, signals, replicas)


class _PreparedRun:
    """A run before its first update, on one rank."""

    def __init__(
        self, config: RunConfig, channel: Channel, console: Console, resume: str | None, replicas: Replicas | None
    ) -> None:
        self.config = config
        self.channel = channel
        start = find_start(config, resume, channel, replicas=replicas)
        # A factory may fail on one rank only (a missing file, no memory): all ranks then raise its error.
        rows = None
        if config.data.has_rows or not config.data.is_text:
            with agreed(channel, purpose="reading the rows") as agreement:
                rows = read_rows(config, (channel.rank, channel.size))
                agreement.value = rows.told()
            rows.take(agreement.values, config.data)
        with agreed(channel, purpose="building the run"):
            self.data, model, sample, self.held_out = _built(config, rows, channel.rank)
            optimizer, self.scheduler = optimizer_factory(config, model), scheduler_maker(config)
            # What evaluations compute besides losses, and the callback that decides rates instead of the step.
            self.metrics, plateau = build_metrics(config), plateau_of(config)
            loss, self.turns = build_loss(config, model), build_turns(config, model)
            self.callbacks = [*([] if plateau is None else [plateau]), *build_callbacks(config)]
            goes_on = self.data.corpus is not None or config.generate.prompts
            self.continuations = Continuations(config, self.data, model, console) if goes_on else None
            """None where the data are no text."""
        self.by_step = plateau is None
        """Whether schedules are functions of the step; else callbacks decide."""
        sizes = sizes_of(model)
        self.engine = parallelize(
            model,
            config.plan,
            optimizer=optimizer,
            loss=loss,
            loss_weight=build_loss_weight(config),
            channel=channel,
            seed=config.train.seed,
            sample=sample,
            rows=config.data.row_dims,
            groups=config.model.groups,
        )
        # Before `take_up`: loading puts the settings of the save in the place of those that the configuration made.
        settings = settings_of(self.engine)
        self.begin, words = BEGINNING, [start.words] if start.words else []
        self.states: Mapping[str, Any] = {}
        """Of callbacks, in the save from which the run resumes."""
        if not start.is_fresh:
            self.begin, self.states, words = take_up(
                start, config, self.engine, channel, data=self.data, fresh=settings
            )
        if replicas is not None:
            words.append(replicas.words)
        placement = None if self.engine.pipeline is None else self.engine.pipeline.placement
        self.lines = [
            *announcement(config, model, sizes, self.data, placement=placement),
            *self.engine.activations.lines(),
            *words,
        ]
        """To print before the first update."""
        num_ranks = f"{channel.size} rank{'s' if channel.size > 1 else ''}"
        self.title = f"{config.name}: {count(sum(sizes.values()))} parameters, {num_ranks}"
        self.keeper = RunKeeper(config, self.engine, channel, data=self.data, settings=settings, replicas=replicas)
        self.tracer = Tracer(self.engine) if isinstance(channel, Timed) else None

    @property
    def is_over(self) -> bool:
        """A save of the last update was resumed: nothing is written any more."""
        return self.begin.step >= self.config.train.steps


def _train(
    config: RunConfig,
    channel: Channel,
    console: Console,
    resume: str | None,
    signals: StopSignals,
    replicas: Replicas | None,
) -> None:
    run = _PreparedRun(config, channel, console, resume, replicas)
    unit = config.data.unit
    curve = LossCurve(config.output / "loss.png", title=run.title, baseline=_baseline(run.data), unit=unit)
    # The order of these contexts is that of their ends: signals end the process at once again, then the mark says how
    # the run has ended.
    with contextlib.ExitStack() as mark, signals.noted(channel) as stop:
        # A signal during the long set-up: nothing has been trained, so nothing is saved. All ranks take part in the
        # exchange, because a signal may reach some of them only.
        if number := signals.of_all(channel):
            raise Stopped(number, "before the first update")
        run.engine.ask_in_steps(stop)
        observers: list[Callback] = []
        generation = [] if run.continuations is None else [run.continuations]
        if channel.rank == 0:
            _say(console, *run.lines)
            if not run.is_over:
                steps, rows = config.train.steps, rows_of(config)
                mark.enter_context(
                    begun(config.output, steps=steps, num_ranks=channel.size, rows=rows, setting="train.output")
                )
                observers = observers_of(config, console, run.begin, curve)
        loop = TrainingLoop(
            run.engine,
            [] if run.is_over else [*observers, *generation, *run.callbacks, run.keeper],
            steps=config.train.steps,
            begin=run.begin,
            is_fresh=resume is None,
            folder=config.output,
            saves=config.saves,
            save_with=lambda path, **given: run.keeper.save_to(path, loop, **given),
            say_with=lambda line: _say(console, line),
            settings=config.settings,
            rows=rows_of(config),
        )
        if run.begin.step and not run.is_over:
            loop.say(*loop.load_state_dict(run.states))
        if not run.is_over:
            run.keeper.open()
        with loop:
            fit(
                run.engine,
                config.train,
                batches_of(run.data.data, run.engine),
                run.held_out,
                loop,
                tokens_per_row=run.data.tokens_per_row,
                scheduler=run.scheduler,
                by_step=run.by_step,
                turns=run.turns,
                metrics=run.metrics,
                around=contextlib.nullcontext if run.tracer is None else run.tracer.update,
            )
        # After the keeper's end, which waits for the save under way: its message may then say that the run is saved.
        if number := signals.of_all(channel):
            if replicas is not None and config.checkpoint.every is not None:
                replicas.close()  # all is saved in files, and the memory of the hosts is given back
            raise Stopped(number, run.keeper.words(loop.step))
    _end(run, console, loop, curve)


def _end(run: _PreparedRun, console: Console, loop: TrainingLoop, curve: LossCurve) -> None:
    """Say what was trained, where everything is, and how the model goes on with a text."""
    if run.tracer is not None:
        loop.say(*run.tracer.leave(run.config.output, title=run.title, width=console.width))
    chosen = run.engine.activations
    loop.say(*changed_schedule(run.engine.pipeline), *([] if chosen.budget is None else chosen.lines()))
    if loop.stopped_by:
        loop.say(f"ended after step {loop.step}: {loop.stopped_by}")
    if curve.has_updates:
        loop.say(curve.words())
    if (saved := run.keeper.report) is not None:
        loop.say(f"saved step {saved.step} to {run.config.saves} ({size(saved.num_bytes)})")
    if curve.has_updates:
        loop.say(picture_words(curve))
    if run.continuations is not None:
        run.continuations.show(loop)  # on all ranks: the stages of the model are on several
    if (loss := loop.position.held_out_loss) is not None:
        unit, known = run.config.data.unit, curve.baseline
        words = "" if known is None else f"; of a model that knows only {unit} frequencies: {known:.4f}"
        loop.say(f"held-out loss {loss:.4f}{words}")


def _built(config: RunConfig, rows: RunRows | None, rank: int) -> tuple[RunData, nn.Module, Batch, list[Batch]]:
    """The data and the model; of this rank, the rows of the first update and those of every evaluation."""
    data = build_data(config, rows)
    mesh = config.plan.mesh
    place = DataPlace(data_rank=mesh.data_rank(rank), num_data_ranks=mesh.num_data_ranks)
    # Rows of update 0, also in a run that goes on: a placement does not depend on where the run was stopped.
    sample, train = sample_batch(data.data, place), config.train
    # With metrics one call evaluates all rows; each batch is a microbatch of it.
    num_rows = train.microbatch * mesh.num_data_ranks if train.metrics else train.global_batch
    return data, build_model(config), sample, data.evaluation(place, num_rows)


def _baseline(data: RunData) -> float | None:
    """The held-out loss of a model that knows only how frequent each token of the text is."""
    if data.corpus is None:
        return None
    return frequency_loss(data.corpus.training, np.asarray(data.held_out), data.corpus.vocabulary_size)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        # A terminal breaks lines between words; a file keeps them whole.
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
