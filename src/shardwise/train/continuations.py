"""Texts that the model goes on with, as it trains: printed, and recorded in `samples.jsonl`."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from shardwise.engine import Engine
from shardwise.errors import ConfigError
from shardwise.runs.callbacks import Callback, StepMetrics, TrainingLoop
from shardwise.runs.json_lines import JsonLines, lines_up_to
from shardwise.train.config import RunConfig
from shardwise.train.run_data import RunData
from shardwise.train.run_tokenizer import tokenizer_of

SAMPLES = "samples.jsonl"
_DEFAULT_TOKENS, _DEFAULT_PROMPT = 160, 64
_TEMPERATURE = 0.7


class Continuations(Callback):
    """What [generate] asks for. Without it, the end of a run goes on with a held-out text.

    Every rank calls `show`, because the model may be on several; rank 0 prints. All draw the same tokens.
    """

    def __init__(self, config: RunConfig, data: RunData, model: nn.Module, console: Console) -> None:
        """Raises ConfigError for a prompt without tokens, and for options that the model does not take."""
        table = config.generate
        if table.options and not _generates(model):
            raise ConfigError(
                f"generate.options: a {type(model).__name__} has no generate method that takes them, as models of "
                "transformers have; leave them out"
            )
        self._tokenizer = tokenizer_of(config.data, config.folder) if data.corpus is None else data.corpus.tokenizer
        self._console = console
        self._every = table.every
        self._seed = config.train.seed if table.seed is None else table.seed
        self._options = table.options
        self._num_tokens = table.max_new_tokens or _DEFAULT_TOKENS
        if table.max_new_tokens is None and (most := _positions(model)) is not None:
            longest = max((len(self._tokenizer.encode(text)) for text in table.prompts), default=0)
            self._num_tokens = max(1, min(self._num_tokens, most - longest))
        self._prompts = [("prompt:", self._tokenizer.encode(text).tolist()) for text in table.prompts]
        """Each with its title."""
        for number, (_, tokens) in enumerate(self._prompts):
            if not tokens:
                raise ConfigError(f"generate.prompts: the text of number {number} has no tokens")
        if not self._prompts:
            row = data.held_out[0].tolist()
            prompt = row[: min(_DEFAULT_PROMPT, len(row) // 2)]
            self._prompts = [("held-out text:", prompt)]
            # Models with a table of positions have none behind the length that they train on.
            if table.max_new_tokens is None:
                self._num_tokens = min(_DEFAULT_TOKENS, len(row) - len(prompt))
        self._path: Path | None = None

    def on_begin(self, loop: TrainingLoop) -> None:
        """Begin the file, or continue it."""
        if loop.is_first and loop.folder is not None:
            self._path = loop.folder / SAMPLES
            JsonLines(self._path, kept=(line for line, _ in lines_up_to(self._path, loop.step))).close()

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Go on with the prompts, when it is time; the end of the run does so in any case."""
        if self._every is not None and metrics.step % self._every == 0 and not loop.is_last:
            self.show(loop)

    def show(self, loop: TrainingLoop) -> None:
        """Go on with each prompt; print and record it."""
        for title, prompt in self._prompts:
            tokens = self._continued(loop.engine, prompt)
            if not loop.is_first:
                continue
            if tokens is None:
                loop.say("no sample: the model called on tokens gives no finite logits [rows, tokens, vocabulary]")
                continue
            said, text = self._tokenizer.decode(prompt), self._tokenizer.decode(tokens)
            self._print(title, said, "dim")
            self._print("the model goes on:", text, "bold")
            if self._path is not None:
                # Opened anew: the last sample comes when all callbacks have ended.
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": loop.step, "prompt": said, "text": text}) + "\n")

    def _print(self, title: str, text: str, style: str) -> None:
        self._console.print(title)
        # A model may give any byte: control characters would change the terminal of the user.
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
        self._console.print(Text(textwrap.indent(shown, "    "), style=style), soft_wrap=True)

    def _continued(self, engine: Engine[nn.Module], prompt: list[int]) -> list[int] | None:
        model = engine.model
        if not _generates(model):
            return continued(engine.predict, model, prompt, num_tokens=self._num_tokens, seed=self._seed)
        options: Mapping[str, Any] = self._options
        if not options and hasattr(model, "generation_config"):
            options = {"do_sample": True, "temperature": _TEMPERATURE}
        row = torch.tensor([prompt])
        found: list[int] = engine.generate(row, seed=self._seed, max_new_tokens=self._num_tokens, **options)[0].tolist()
        # Decoders repeat the prompt; an encoder with a decoder does not.
        return found[len(prompt) :] if found[: len(prompt)] == prompt else found


def _positions(model: nn.Module) -> int | None:
    """The most tokens of a text, where the configuration of the model says so: behind them a table may end."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _generates(model: nn.Module) -> bool:
    return callable(getattr(model, "generate", None))


def continued(
    predict: Callable[..., torch.Tensor], model: nn.Module, row: Sequence[int], *, num_tokens: int, seed: int
) -> list[int] | None:
    """`num_tokens` tokens drawn after `row`; None when the model gives no finite logits [1, tokens, vocabulary].

    predict: of an engine.

    The model sees as many tokens as `row` has, each time: for each other length, ranks with stages would have to find
    the shapes of their values anew. All ranks call this; they draw equal tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(row)
    for _ in range(num_tokens):
        seen = torch.tensor([tokens[-len(row) :]])
        last = predict({"input_ids": seen}, lambda inputs: _next_logits(model, inputs)).float().cpu()
        if not len(last) or not bool(last.isfinite().all()):
            return None
        chances = torch.softmax(last / _TEMPERATURE, dim=-1)
        # On every rank for itself: `predict` gave all of them the same logits, and the generators have one seed.
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens[len(row) :]


def _next_logits(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The logits of the token after the last one; without elements where the model's output has none."""
    seen = inputs["input_ids"]
    output = model(seen)
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    # Decided by shapes alone, which all ranks with stages know; an exception would end the run for the sake of a
    # sample.
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != seen.shape:
        return torch.empty(0)
    return logits[0, -1]
