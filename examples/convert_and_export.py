"""Convert files of Hugging Face to a save under other names, and back, with a certificate that nothing was lost.

One learns: `shardwise ckpt convert`, a rewrite and its inverse, `--certify`, and what `round-trip.json` says.

    python examples/convert_and_export.py           # needs no model in memory; the files here are tiny
"""

import json
import shlex
import tempfile
from contextlib import chdir
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from shardwise.cli import main

REWRITE = """
# Queries, keys and values in one matrix; gate and up in one matrix; another prefix for the layers.
model.layers.$L.self_attn.q_proj.weight, model.layers.$L.self_attn.k_proj.weight,
    model.layers.$L.self_attn.v_proj.weight -> layers.$L.attention.qkv, axis=0
model.layers.$L.mlp.gate_proj.weight, model.layers.$L.mlp.up_proj.weight -> layers.$L.mlp.gate_up, axis=0
model.layers.$L.mlp.down_proj.weight^T -> layers.$L.mlp.down
"""


def write_a_small_model(folder: Path) -> None:
    """Write what one would download: a Llama, here with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def shardwise(command: str) -> None:
    """Run a command, as a shell would."""
    print(f"\n$ shardwise {command}")
    try:
        main(shlex.split(command), prog_name="shardwise")
    except SystemExit as end:  # a command ends with its exit code
        if end.code:
            raise


if __name__ == "__main__":
    disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="convert_and_export-"))
    write_a_small_model(folder / "hub")
    (folder / "fused.rewrite").write_text(REWRITE)

    with chdir(folder):
        shardwise("ckpt convert hub saves --rewrite fused.rewrite --dry-run")  # reads headers only
        shardwise("ckpt convert hub saves --rewrite fused.rewrite --certify")
        shardwise("ckpt ls saves")
        # The save keeps its rewrite, so the way back names none.
        shardwise("ckpt convert saves files --to hf --inverse --certify --like hub")
        shardwise("ckpt diff hub files")

    certificate = json.loads((folder / "files" / "round-trip.json").read_text())
    assert {each["verdict"] for each in certificate["tensors"] + certificate["compared"]} == {"equal"}
    before, after = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("hub", "files"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    print(f"\n{folder / 'files'} has files for from_pretrained, and round-trip.json")
    print(f"{len(before)} tensors were fused, saved, and taken apart again; every bit came back")
