"""One rank's part of a training run, from the configuration to the last line.

    find_start   which save to go on from            all ranks agree; nothing is loaded yet
    _built       corpus, model                       `agreed`: one rank's error is raised on all
    parallelize  the engine under the plan
    take_up      load, if there is a save            position, settings, random numbers
    fit          the loop, with observers and keeper
    the end      trace, picture, a sample of text    all ranks compute, rank 0 prints

Every rank makes every call that exchanges something. Only printing and writing files is left to rank 0.
"""

import textwrap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed
from shardwise.engine import Engine, parallelize
from shardwise.train.announcement import announcement, changed_schedule, continued, sizes_of
from shardwise.train.checkpointing import RunKeeper, find_start, settings_of, take_up
from shardwise.train.config import RunConfig
from shardwise.train.corpus import Corpus, evaluation_rows, frequency_loss, rank_samples, read_corpus
from shardwise.train.loop import BEGINNING, DataPlace, as_batch, fit
from shardwise.train.observers import Audience, count
from shardwise.train.run_build import build_loss, build_model, optimizer_factory
from shardwise.train.run_state import Samples
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
    start = find_start(config, resume, channel)
    # A factory may fail on one rank only (a missing file, no memory): all ranks then raise its error.
    with agreed(channel, purpose="building the run"):
        model, corpus, held_out = _built(config)
    sizes = sizes_of(model)
    place = _place(config, channel.rank)
    engine = _parallelized(model, config, corpus, place, channel)
    # Before `take_up`: loading puts the settings of the save in the place of those that the configuration made.
    samples, settings = Samples.of(config, corpus), settings_of(engine)
    begin, words = BEGINNING, [start.words] if start.words else []
    if not start.is_fresh:
        begin, words = take_up(start, config, engine, channel, samples=samples, fresh=settings)
    baseline = frequency_loss(corpus.training, held_out, corpus.vocabulary_size)
    title = f"{config.name}: {count(sum(sizes.values()))} parameters, {channel.size} ranks"
    tracer = Tracer(engine) if config.train.trace else None
    # The order of these contexts is that of their ends: the keeper waits for its save first, then signals end the
    # process at once again, then files are closed.
    with Audience() as audience, signals.noted(channel) as stop:
        with RunKeeper(
            config, engine, channel, samples=samples, settings=settings, on_commit=audience.on_commit
        ) as keeper:
            # A signal during the long set-up: nothing has been trained, so nothing is saved. All ranks take part in
            # the exchange, because a signal may reach some of them only.
            if number := signals.of_all(channel):
                raise Stopped(number, "before the first update")
            if channel.rank == 0:
                placement = None if engine.pipeline is None else engine.pipeline.placement
                _say(console, *announcement(config, model, sizes, corpus, held_out, placement=placement), *words)
                audience.open(config, console, begin, title=title, baseline=baseline)
            loss = fit(
                tracer or engine,
                config.train,
                corpus,
                held_out,
                place=place,
                observers=audience.observers,
                begin=begin,
                keeper=keeper,
                stop=stop,
            )
        # After the keeper's end, which waits for the save under way: its message may then say that the run is saved.
        if number := signals.of_all(channel):
            raise Stopped(number, keeper.words())
    assert loss is not None, "only a signal ends the loop before the last update"
    trace = None if tracer is None else tracer.gathered(channel)
    row = held_out[0].tolist()
    # On all ranks, although rank 0 alone prints it: the stages of the model are on several.
    goes_on = continued(engine, model, row, num_tokens=_SAMPLE_TOKENS, seed=config.train.seed)
    if channel.rank == 0:
        if trace is not None:
            _say(console, *leave(trace, config.output, title=title, width=console.width))
        _say(console, *changed_schedule(engine.pipeline), *audience.last_words(config))
        _show_sample(console, corpus, row, goes_on)
        _say(console, f"held-out loss {loss:.4f}, {config.data.unit}-frequency loss {baseline:.4f}")


def _built(config: RunConfig) -> tuple[nn.Module, Corpus, npt.NDArray[np.int64]]:
    corpus = read_corpus(config.data, config.folder)
    held_out = evaluation_rows(corpus, config.train.global_batch * config.train.evaluate_batches)
    return build_model(config), corpus, held_out


def _place(config: RunConfig, rank: int) -> DataPlace:
    mesh = config.plan.mesh
    at = mesh.coordinates(rank)
    # Ranks along pp and tp compute parts of the same rows: only the two data axes decide which rows these are.
    return DataPlace(
        data_rank=at["dp_replicate"] * mesh.dp_shard + at["dp_shard"],
        num_data_ranks=mesh.num_data_ranks,
    )


def _parallelized(model: nn.Module, config: RunConfig, corpus: Corpus, place: DataPlace, channel: Channel) -> Engine:
    # Rows of update 0, also in a run that goes on: a placement does not depend on where the run was stopped.
    first = rank_samples(
        update=0,
        global_batch=config.train.global_batch,
        data_rank=place.data_rank,
        num_data_ranks=place.num_data_ranks,
    )
    return parallelize(
        model,
        config.plan,
        optimizer=optimizer_factory(config),
        loss=build_loss(config),
        channel=channel,
        seed=config.train.seed,
        sample=as_batch(corpus.rows(first, seed=config.train.seed)),
    )


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


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
