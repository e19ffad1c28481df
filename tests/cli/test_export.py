"""From training to files that transformers loads, by commands alone: the lines that the README shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from tests.cli.processes import in_this_process

CONFIG = """
[model]
factory = "transformers:LlamaForCausalLM"

[model.config]
vocab_size = 256
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
use_cache = false

[data]
source = "text.txt"
sequence_length = 16

[precision]
compute = "bfloat16"

[train]
steps = 2
global_batch = 4

[checkpoint]
every = 2
"""


def shardwise(*words: str | Path) -> str:
    result = in_this_process(*map(str, words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the saves of a run, which trained a Llama on words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("run")
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "words.json"))
    (folder / "text.txt").write_text(" ".join(f"w{at * at % 255}" for at in range(3000)))
    (folder / "run.toml").write_text(CONFIG.replace("[precision]", 'tokenizer = "words.json"\n\n[precision]'))
    shardwise("train", folder / "run.toml", "--set", f"train.output={folder}/out")
    return folder


def test_what_was_trained_is_loaded_by_transformers_with_its_tokenizer(run: Path, tmp_path: Path) -> None:
    saves = run / "out/checkpoints"
    catalogue = checkpoint.open(saves)
    masters = {name: catalogue.read(f"optimizer/{name}/master") for name in catalogue.tensors if "/" not in name}
    told = shardwise("ckpt", "convert", saves, tmp_path / "direct", "--to", "hf", "--dtype", "float32", "--certify")
    assert f"{len(masters)} tensors out of masters, in the place of working copies\n" in told
    assert "with tokenizer.json, config.json, generation_config.json\n" in told
    assert "without config.json" not in told
    shardwise("ckpt", "convert", saves, tmp_path / "fused", "--rewrite", "llama-qkv")  # heads from the save
    told = shardwise("ckpt", "convert", tmp_path / "fused", tmp_path / "files", "--inverse", "--to", "hf", "--certify")
    assert "tensors come back to the bit" in told
    for folder, dtype in (("direct", torch.float32), ("files", torch.bfloat16)):
        model = from_pretrained(tmp_path / folder)
        assert model.dtype == dtype
        assert all(torch.equal(tensor, masters[name].to(dtype)) for name, tensor in model.state_dict().items())
        assert (tmp_path / folder / "tokenizer.json").read_bytes() == (run / "words.json").read_bytes()


def test_a_save_without_a_configuration_says_so_and_takes_one(run: Path, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in _tensors(run / "out/checkpoints").items() if "/" not in name}
    checkpoint.save(tmp_path / "plain", state)
    told = shardwise("ckpt", "convert", tmp_path / "plain", tmp_path / "without", "--to", "hf", "--certify")
    assert "without config.json, which SRC does not have and from_pretrained needs: give it with --config" in told
    shardwise("ckpt", "convert", run / "out/checkpoints", tmp_path / "hf", "--to", "hf")
    for config in (tmp_path / "hf", tmp_path / "hf/config.json"):
        out = tmp_path / f"out {config.suffix}"
        told = shardwise("ckpt", "convert", tmp_path / "plain", out, "--to", "hf", "--config", config)
        assert "config.json" in told
        assert "without config.json" not in told
        model = from_pretrained(out)
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    fused = ("--rewrite", "llama-qkv", "--config", tmp_path / "hf")  # also for the numbers of heads
    shardwise("ckpt", "convert", tmp_path / "plain", tmp_path / "fused", *fused)
    kept = checkpoint.open(tmp_path / "fused").extra["huggingface"]
    assert kept["config.json"] == json.loads((tmp_path / "hf/config.json").read_text())


def test_options_that_do_not_go_together_are_wrong_usage(tmp_path: Path) -> None:
    for words in (["--dtype", "float32"], ["--lossy"], ["--to", "hf", "--dtype", "int8"]):
        result = in_this_process("ckpt", "convert", str(tmp_path), str(tmp_path / "out"), *words)
        assert result.exit_code == 2, words
    result = in_this_process("ckpt", "convert", str(tmp_path), str(tmp_path / "out"), "--config", str(tmp_path / "x"))
    assert result.exit_code == 1


def from_pretrained(path: Path) -> Any:
    from transformers import AutoModelForCausalLM  # here: the import takes seconds, also where no test is run

    return AutoModelForCausalLM.from_pretrained(path)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    catalogue = checkpoint.open(path)
    return {name: catalogue.read(name) for name in catalogue.tensors}
