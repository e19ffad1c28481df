"""Generation in a run: what the model of one process generates, under every plan, when it is time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.comm import alone
from shardwise.train.continuations import continued
from tests.train.runs import finished, laid_out, small_run

LLAMA = (
    "model.factory=transformers:LlamaForCausalLM",
    "model.loss=null",
    "model.config={vocab_size = 256, hidden_size = 16, intermediate_size = 32, num_hidden_layers = 2, "
    "num_attention_heads = 2, max_position_embeddings = 32}",
    "checkpoint.every=2",
    "checkpoint.keep=9",
)
PROMPTS = ('generate.prompts=["12 squared", "7"]', "generate.max_new_tokens=6", "generate.every=2")


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]


def plainly(folder: Path, step: int, prompt: str, *, num_tokens: int = 6, **options: Any) -> str:
    """What a model of one process with the weights of a save generates."""
    sizes: Any = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))
    model.eval()
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    sw.load(folder / "out" / "checkpoints", weights, step=step, strict=False, channel=alone())
    torch.manual_seed(5)  # `train.seed`
    row = torch.tensor([[*prompt.encode()]])
    found = model.generate(row, max_new_tokens=num_tokens, **options)[0, row.shape[1] :]
    return bytes(found.tolist()).decode("utf-8", errors="replace")


def test_samples_are_those_of_one_process_with_the_weights_of_their_step(tmp_path: Path) -> None:
    options = "generate.options={do_sample = true, top_k = 20}"
    done = finished(laid_out(tmp_path, *LLAMA, *PROMPTS, options, "mesh.pp=2", "train.steps=4"))
    found = samples(tmp_path)
    assert [(each["step"], each["prompt"]) for each in found] == [
        (step, prompt) for step in (2, 4) for prompt in ("12 squared", "7")
    ]
    for each in found:
        assert each["text"] == plainly(tmp_path, each["step"], each["prompt"], do_sample=True, top_k=20)
    assert done.printed.count("the model goes on:") == 4


def test_without_a_table_the_end_goes_on_with_a_held_out_text_within_the_length_of_training(tmp_path: Path) -> None:
    finished(small_run(tmp_path, *LLAMA, "train.steps=2"))
    (found,) = samples(tmp_path)
    assert found["step"] == 2
    assert len(found["prompt"]) == 8
    assert found["text"] == plainly(tmp_path, 2, found["prompt"], num_tokens=8, do_sample=True, temperature=0.7)


@pytest.mark.slow
def test_a_model_without_generate_goes_on_by_its_logits_also_in_a_run_that_goes_on(tmp_path: Path) -> None:
    words = [*PROMPTS, "checkpoint.every=2", "checkpoint.keep=9", "mesh.pp=2"]
    done = finished(laid_out(tmp_path, *words))
    whole = samples(tmp_path)
    assert [each["step"] for each in whole] == [2, 2, 4, 4, 6, 6]
    assert done.printed.count("prompt:") == 6
    finished(laid_out(tmp_path, *words), resume=str(tmp_path / "out" / "checkpoints" / "save-00000001"))
    assert samples(tmp_path) == whole


def test_a_larger_vocabulary_and_few_positions_end_no_run(tmp_path: Path) -> None:
    """Tokens behind the bytes have no text; more tokens than positions would be an index error of an embedding."""
    words = [
        "model.factory=transformers:GPT2LMHeadModel",
        "model.config={vocab_size = 1000, n_embd = 8, n_layer = 1, n_head = 1, n_positions = 24, bos_token_id = 0, "
        "eos_token_id = 0}",
        "model.loss=null",
        "train.steps=2",
        'generate.prompts=["12 squared", "7"]',
        "generate.options={do_sample = true, top_k = 1000, temperature = 9.0}",
    ]
    finished(small_run(tmp_path, *words))
    first, second = samples(tmp_path)
    assert len(first["text"]) <= 14
    assert "\ufffd" in first["text"] + second["text"]


class Next(nn.Module):
    """Says that the token after t is t + 1, without a doubt; or, without a doubt of it, nothing."""

    def __init__(self, sure: float = 1e4) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.sure = sure

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return self.sure * nn.functional.one_hot((input_ids + 1) % 10, 10).float()


def test_a_continuation_draws_by_its_seed_from_the_last_tokens_that_the_model_was_trained_on() -> None:
    model = Next()
    assert continued(lambda inputs, output_of: output_of(inputs), model, [2, 3, 4], num_tokens=3, seed=0) == [5, 6, 7]
    assert model.seen == [[[2, 3, 4]], [[3, 4, 5]], [[4, 5, 6]]]
    one, same, other = (
        continued(lambda inputs, output_of: output_of(inputs), Next(0.0), [1], num_tokens=20, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == same != other
