"""One rank's part of a training run, from the configuration to the last line.

    Replicas     copies in memory of the hosts, if asked for
    find_start   which save to go on from            all ranks agree; nothing is loaded yet
    _built       data, model                         `agreed`: one rank's error is raised on all
    parallelize  the engine under the plan
    take_up      load, if there is a save            position, settings, random numbers
    fit          the loop, with observers and keeper
    the end      trace, picture, a sample of text    all ranks compute, rank 0 prints

Every rank makes every call that exchanges something. Only printing and writing files is left to rank 0.
"""

import textwrap
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text
from torch import nn

from shardwise.checkpoint import Replicas
from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.comm.timed import Timed
from shardwise.data import DataPlace
from shardwise.engine import parallelize
from shardwise.engine.batches import Batch
from shardwise.train.announcement import announcement, changed_schedule, continued, sizes_of
from shardwise.train.checkpointing import RunKeeper, find_start, settings_of, take_up
from shardwise.train.config import RunConfig
from shardwise.train.corpus import Corpus, frequency_loss
from shardwise.train.learning_rates import scheduler_maker
from shardwise.train.loop import BEGINNING, fit
from shardwise.train.observers import Audience
from shardwise.train.quantities import count
from shardwise.train.run_build import build_loss, build_loss_weight, build_model, optimizer_factory
from shardwise.train.run_data import RunData, batches_of, build_data, sample_batch
from shardwise.train.run_trace import Tracer, leave
from shardwise.train.stop_signals import Stopped, StopSignals

_SHOWN_TOKENS, _SAMPLE_TOKENS = 64, 160


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


def _train(
    config: RunConfig,
    channel: Channel,
    console: Console,
    resume: str | None,
    signals: StopSignals,
    replicas: Replicas | None,
) -> None:
    start = find_start(config, resume, channel, replicas=replicas)
    # A factory may fail on one rank only (a missing file, no memory): all ranks then raise its error.
    with agreed(channel, purpose="building the run"):
        data, model, sample, held_out = _built(config, channel.rank)
        optimizer, scheduler = optimizer_factory(config, model), scheduler_maker(config)
    sizes = sizes_of(model)
    engine = parallelize(
        model,
        config.plan,
        optimizer=optimizer,
        loss=build_loss(config),
        loss_weight=build_loss_weight(config),
        channel=channel,
        seed=config.train.seed,
        sample=sample,
    )
    # Before `take_up`: loading puts the settings of the save in the place of those that the configuration made.
    settings = settings_of(engine)
    begin, words = BEGINNING, [start.words] if start.words else []
    if not start.is_fresh:
        begin, words = take_up(start, config, engine, channel, data=data, fresh=settings)
    baseline = _baseline(data)
    if replicas is not None:
        words.append(replicas.words)
    num_ranks = f"{channel.size} rank{'s' if channel.size > 1 else ''}"
    title = f"{config.name}: {count(sum(sizes.values()))} parameters, {num_ranks}"
    tracer = Tracer(engine, channel) if isinstance(channel, Timed) else None
    # The order of these contexts is that of their ends: the keeper waits for its save first, then signals end the
    # process at once again, then files are closed.
    with Audience() as audience, signals.noted(channel) as stop:
        with RunKeeper(
            config,
            engine,
            channel,
            data=data,
            settings=settings,
            on_commit=audience.on_commit,
            replicas=replicas,
        ) as keeper:
            # A signal during the long set-up: nothing has been trained, so nothing is saved. All ranks take part in
            # the exchange, because a signal may reach some of them only.
            if number := signals.of_all(channel):
                raise Stopped(number, "before the first update")
            if channel.rank == 0:
                placement = None if engine.pipeline is None else engine.pipeline.placement
                _say(console, *announcement(config, model, sizes, data, placement=placement), *words)
                audience.open(config, console, begin, title=title, baseline=baseline)
            loss = fit(
                tracer or engine,
                config.train,
                batches_of(data.data, engine),
                held_out,
                tokens_per_row=data.tokens_per_row,
                observers=audience.observers,
                begin=begin,
                keeper=keeper,
                stop=lambda: stop() or keeper.has_failed(),
                scheduler=scheduler,
            )
        # After the keeper's end, which waits for the save under way: its message may then say that the run is saved.
        if number := signals.of_all(channel):
            if replicas is not None and config.checkpoint.every is not None:
                replicas.close()  # all is saved in files, and the memory of the hosts is given back
            raise Stopped(number, keeper.words())
    assert loss is not None, "only a signal ends the loop before the last update"
    trace = None if tracer is None else tracer.gathered()
    row = [] if data.corpus is None else data.held_out[0].tolist()
    # On all ranks, although rank 0 alone prints it: the stages of the model are on several.
    goes_on = continued(engine, model, row, num_tokens=_SAMPLE_TOKENS, seed=config.train.seed) if row else None
    if channel.rank == 0:
        if trace is not None:
            _say(console, *leave(trace, config.output, title=title, width=console.width))
        _say(console, *changed_schedule(engine.pipeline), *audience.last_words(config))
        known = (
            "" if baseline is None else f"; of a model that knows only {config.data.unit} frequencies: {baseline:.4f}"
        )
        if data.corpus is not None:
            _show_sample(console, data.corpus, row, goes_on)
        _say(console, f"held-out loss {loss:.4f}{known}")


def _built(config: RunConfig, rank: int) -> tuple[RunData, nn.Module, Batch, list[Batch]]:
    """The data and the model; of this rank, the rows of the first update and those of every evaluation."""
    data = build_data(config)
    mesh = config.plan.mesh
    place = DataPlace(data_rank=mesh.data_rank(rank), num_data_ranks=mesh.num_data_ranks)
    # Rows of update 0, also in a run that goes on: a placement does not depend on where the run was stopped.
    sample, held_out = sample_batch(data.data, place), data.evaluation(place, config.train.global_batch)
    return data, build_model(config), sample, held_out


def _baseline(data: RunData) -> float | None:
    """The held-out loss of a model that knows only how frequent each token of the text is."""
    if data.corpus is None:
        return None
    return frequency_loss(data.corpus.training, np.asarray(data.held_out), data.corpus.vocabulary_size)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        # A terminal breaks lines between words; a file keeps them whole.
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _show_sample(console: Console, corpus: Corpus, row: Sequence[int], sample: Sequence[int] | None) -> None:
    """The end of a held-out row, and how the model goes on."""
    if sample is None:
        console.print("no sample: the model called on tokens gives no finite logits [rows, tokens, vocabulary]")
        return
    end = row[-_SHOWN_TOKENS:]
    for title, tokens, style in (("held-out text:", end, "dim"), ("the model goes on:", sample, "bold")):
        console.print(title)
        # A model may give any byte: control characters would change the terminal of the user.
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in corpus.text(list(tokens)))
        console.print(Text(textwrap.indent(shown, "    "), style=style), soft_wrap=True)
