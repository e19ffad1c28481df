"""One rank's part of a training run, from the configuration to the last line."""

import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agree
from shardwise.engine import parallelize
from shardwise.errors import ShardwiseError
from shardwise.train.audience import Audience
from shardwise.train.build import build_loss, build_model, optimizer_factory
from shardwise.train.config import RunConfig
from shardwise.train.continuation import continued
from shardwise.train.corpus import Corpus, evaluation_rows, frequency_loss, read_corpus
from shardwise.train.keeping import RunKeeper
from shardwise.train.loop import BEGINNING, Place, fit
from shardwise.train.progress import count
from shardwise.train.resuming import find_start, settings_of, take_up
from shardwise.train.run_state import Samples

Built = TypeVar("Built")
_PROMPT_TOKENS, _SAMPLE_TOKENS = 64, 160


def run(config: RunConfig, channel: Channel, console: Console, *, resume: str | None = None) -> None:
    """Train as `config` asks; rank 0 alone leaves metrics and pictures in `config.output` and talks to `console`.

    resume: where to go on from: "auto" (the newest save of this run, if there is one), a path or an address of saves.
    Every rank of `channel` makes this call. What is wrong before the first update is raised alike on all ranks.
    """
    start = find_start(config, resume, channel)
    model, corpus, held_out = _on_all(channel, "building the run", lambda: _built(config))
    engine = parallelize(
        model, config.plan, optimizer=optimizer_factory(config), loss=build_loss(config), channel=channel
    )
    place = _place(config, channel.rank)
    samples, settings = Samples.of(config, corpus), settings_of(engine)
    begin, words = BEGINNING, [start.words] if start.words else []
    if start.is_fresh:
        # From here on ranks draw apart: other rows want other dropout.
        torch.manual_seed(config.train.seed + 1 + place.data_rank)
    else:
        begin, words = take_up(
            start, config, engine, channel, samples=samples, fresh=settings, data_rank=place.data_rank
        )
    baseline = frequency_loss(corpus.training, held_out, corpus.vocabulary_size)
    with Audience() as audience:
        if channel.rank == 0:
            _announce(console, config, model, corpus, held_out)
            _say(console, *words)
            title = f"{config.name}: {count(_num_parameters(model))} parameters, {channel.size} ranks"
            audience.open(config, console, begin, title=title, baseline=baseline)
        with RunKeeper(
            config, engine, channel, samples=samples, settings=settings, on_commit=audience.on_commit
        ) as keeper:
            loss = fit(
                engine,
                config.train,
                corpus,
                held_out,
                place=place,
                observers=audience.observers,
                begin=begin,
                keeper=keeper,
            )
    sample = _sample(config, model, corpus, held_out, channel.device)
    if channel.rank == 0:
        _say(console, *audience.last_words(config))
        _show_sample(console, corpus, *sample)
        _say(console, f"held-out loss {loss:.4f}, {config.data.unit}-frequency loss {baseline:.4f}")


def _built(config: RunConfig) -> tuple[nn.Module, Corpus, npt.NDArray[np.int64]]:
    corpus = read_corpus(config.data, config.folder)
    held_out = evaluation_rows(corpus, config.train.global_batch * config.train.evaluate_batches)
    return build_model(config), corpus, held_out


def _on_all(channel: Channel, purpose: str, build: Callable[[], Built]) -> Built:
    """What `build` gives; where it refuses on one rank, the same error on every rank."""
    refusal: ShardwiseError | None = None
    built: list[Built] = []
    try:
        built.append(build())
    except ShardwiseError as error:
        refusal = error
    agree(channel, refusal, purpose=purpose)
    return built[0]


def _place(config: RunConfig, rank: int) -> Place:
    mesh = config.plan.mesh
    at = mesh.coordinates(rank)
    return Place(
        data_rank=at["dp_replicate"] * mesh.dp_shard + at["dp_shard"],
        num_data_ranks=mesh.dp_replicate * mesh.dp_shard,
    )


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _announce(
    console: Console, config: RunConfig, model: nn.Module, corpus: Corpus, held_out: npt.NDArray[np.int64]
) -> None:
    plan, train = config.plan, config.train
    num_data_ranks = plan.mesh.dp_replicate * plan.mesh.dp_shard
    lines = [
        f"{config.name}: {type(model).__name__}, {count(_num_parameters(model))} parameters, mesh {plan.mesh}, "
        f"stage {plan.sharding.stage}, compute {plan.precision.compute or 'as the model is'}",
        f"an update: {train.global_batch} rows of {corpus.sequence_length} tokens, as {num_data_ranks} (data ranks) x "
        f"{plan.merge.microbatches} (microbatches) x {train.microbatch} (rows)",
        f"text: {count(len(corpus.training))} tokens to train on, of which {train.steps} updates read "
        f"{count(train.steps * train.global_batch * corpus.sequence_length)}; {count(corpus.held_out.size)} held out, "
        f"of which an evaluation reads {count(held_out.size)}",
    ]
    _say(console, *lines)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _sample(
    config: RunConfig, model: nn.Module, corpus: Corpus, held_out: npt.NDArray[np.int64], device: torch.device
) -> tuple[list[int], list[int] | None]:
    """The beginning of a held-out row, and how the model goes on; the same on all ranks."""
    prompt = held_out[0, : min(_PROMPT_TOKENS, corpus.sequence_length // 2)].tolist()
    length = corpus.sequence_length
    goes_on = continued(model, prompt, num_tokens=_SAMPLE_TOKENS, context=length, device=device, seed=config.train.seed)
    return prompt, goes_on


def _show_sample(console: Console, corpus: Corpus, prompt: Sequence[int], sample: Sequence[int] | None) -> None:
    if sample is None:
        console.print("no sample: the model called on tokens gives no finite logits [rows, tokens, vocabulary]")
        return
    for title, tokens, style in (("held-out text:", prompt, "dim"), ("the model goes on:", sample, "bold")):
        console.print(title)
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in corpus.text(list(tokens)))
        console.print(Text(textwrap.indent(shown, "    "), style=style), soft_wrap=True)
