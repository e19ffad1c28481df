"""One rank's part of a training run, from the configuration to the last line."""

import importlib.util
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
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.build import build_loss, build_model, optimizer_factory
from shardwise.train.config import RunConfig
from shardwise.train.continuation import continued
from shardwise.train.corpus import Corpus, evaluation_rows, frequency_loss, read_corpus
from shardwise.train.figure import LossCurve
from shardwise.train.loop import Place, fit
from shardwise.train.metrics import MetricsFile, Observer, TensorBoard, tensorboard_installed
from shardwise.train.progress import count, progress
from shardwise.train.tables import BYTES

Built = TypeVar("Built")
_PROMPT_TOKENS, _SAMPLE_TOKENS = 64, 160


def run(config: RunConfig, channel: Channel, console: Console) -> None:
    """Train as `config` asks; rank 0 alone leaves metrics and pictures in `config.output` and talks to `console`.

    Every rank of `channel` makes this call. What is wrong before the first update is raised alike on all ranks.
    """
    train = config.train
    model, corpus, held_out = _on_all(channel, "building the run", lambda: _built(config))
    engine = parallelize(
        model, config.plan, optimizer=optimizer_factory(config), loss=build_loss(config), channel=channel
    )
    place = _place(config, channel.rank)
    # From here on ranks draw apart: other rows want other dropout.
    torch.manual_seed(train.seed + 1 + place.data_rank)
    baseline = frequency_loss(corpus.training, held_out, corpus.vocabulary_size)
    unit = "byte" if config.data.tokenizer == BYTES else "token"
    curve = LossCurve(
        config.output / "loss.png",
        title=f"{config.name}: {count(_num_parameters(model))} parameters, {channel.size} ranks",
        baseline=baseline,
        unit=unit,
    )
    observers: list[Observer] = []
    try:
        if channel.rank == 0:
            _announce(console, config, model, corpus, held_out)
            observers += [*_files(config), curve, progress(console, train.steps, every=train.log_every)]
        loss = fit(engine, train, corpus, held_out, place=place, observers=observers)
    finally:
        for observer in reversed(observers):
            observer.close()
    prompt = held_out[0, : min(_PROMPT_TOKENS, corpus.sequence_length // 2)].tolist()
    sample = continued(
        model,
        prompt,
        num_tokens=_SAMPLE_TOKENS,
        context=corpus.sequence_length,
        device=channel.device,
        seed=train.seed,
    )
    if channel.rank == 0:
        _draw(console, curve)
        _show_sample(console, corpus, prompt, sample)
        console.print(
            f"held-out loss {loss:.4f}, {unit}-frequency loss {baseline:.4f}", highlight=False, soft_wrap=True
        )


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
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _files(config: RunConfig) -> list[Observer]:
    try:
        config.output.mkdir(parents=True, exist_ok=True)
        files: list[Observer] = [MetricsFile(config.output / "metrics.jsonl")]
    except OSError as error:
        raise ConfigError(
            f"train.output: the folder {config.output} cannot be written to ({error.strerror}); name another one"
        ) from error
    if tensorboard_installed():
        files.append(TensorBoard(config.output / "tensorboard"))
    return files


def _draw(console: Console, curve: LossCurve) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        words = "no picture of the loss: matplotlib is not installed"
    else:
        curve.draw()
        words = f"loss curve: {curve.path}"
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def _show_sample(console: Console, corpus: Corpus, prompt: Sequence[int], sample: Sequence[int] | None) -> None:
    if sample is None:
        console.print("no sample: the model called on tokens gives no finite logits [rows, tokens, vocabulary]")
        return
    for title, tokens, style in (("held-out text:", prompt, "dim"), ("the model goes on:", sample, "bold")):
        console.print(title)
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in corpus.text(list(tokens)))
        console.print(Text(textwrap.indent(shown, "    "), style=style), soft_wrap=True)
