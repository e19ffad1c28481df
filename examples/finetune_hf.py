"""Fine-tune a causal LM of Hugging Face on two data ranks, and load the result with `from_pretrained`.

One learns: labels of -100 and `loss_weight`, bfloat16 compute with float32 masters, a save, and its export.

    python examples/finetune_hf.py                  # two simulated ranks, a tiny Llama with random weights
    python examples/finetune_hf.py FOLDER           # start from the files in FOLDER
    torchrun --nproc-per-node 2 examples/finetune_hf.py
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import shardwise as sw

IGNORED = -100  # the loss of transformers leaves out labels of this value
NUM_STEPS = 30


def write_a_small_model(folder: Path) -> None:
    """Write what one would download: a Llama, here with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """16 rows: a prompt of 4 tokens, then 1 to 6 times its last token. Only answers have labels."""
    random = torch.Generator().manual_seed(step)
    prompts = torch.randint(1, 64, (16, 4), generator=random)
    lengths = torch.randint(1, 7, (16, 1), generator=random)
    is_answer = torch.arange(6) < lengths
    answers = torch.where(is_answer, prompts[:, -1:], 0)
    labels = torch.where(is_answer, answers, IGNORED)
    return {
        "input_ids": torch.cat([prompts, answers], dim=1),
        "attention_mask": torch.cat([torch.ones_like(prompts), is_answer.long()], dim=1),
        "labels": torch.cat([torch.full_like(prompts, IGNORED), labels], dim=1),
    }


def answer_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """How many tokens of a microbatch have a loss; without this, microbatches count by their rows."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def folder_for_all(channel: sw.Channel) -> Path:
    """A new folder, which rank 0 makes, with a model to start from."""
    folder = Path(tempfile.mkdtemp(prefix="finetune_hf-")) if channel.rank == 0 else Path()
    if channel.rank == 0:
        write_a_small_model(folder / "pretrained")
    return Path(channel.exchange(str(folder).encode(), purpose="the folder of the example")[0].decode())


def finetune(channel: sw.Channel) -> list[str]:
    """Train on all ranks, save, and export from rank 0."""
    folder = folder_for_all(channel)
    pretrained = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "pretrained"
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=channel.size),
        sharding=sw.Sharding(stage=3),
        precision=sw.Precision(compute="bfloat16"),
        merge=sw.Merge(microbatches=2),
        clip_grad_norm=1.0,
    )
    # No `loss`: the model gets the whole microbatch, labels too, and gives its own.
    engine = sw.parallelize(model, plan, optimizer=optimizer, loss_weight=answer_tokens, channel=channel)
    losses = []
    for step in range(NUM_STEPS):
        batch = batch_of(step)
        report = engine.step({name: rows.chunk(channel.size)[channel.rank] for name, rows in batch.items()})
        assert report.weight == answer_tokens(batch)  # counted over all ranks
        losses.append(report.loss)

    sw.save(folder / "saves", engine, step=NUM_STEPS)
    question = {"input_ids": batch_of(NUM_STEPS)["input_ids"]}
    logits = engine.predict(question, lambda inputs: model(**inputs).logits)
    assert losses[-1] < losses[0] / 2
    if channel.rank > 0:
        return []
    sw.checkpoint.export_hf(folder / "saves", folder / "files", dtype="float32")  # the masters
    again = AutoModelForCausalLM.from_pretrained(folder / "files", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(again(**question).logits, logits)  # every bit
    return [
        f"loss on the tokens of answers: {losses[0]:.3f} at step 0, {losses[-1]:.3f} at step {NUM_STEPS - 1}",
        f"{folder / 'files'} has {', '.join(sorted(path.name for path in (folder / 'files').iterdir()))}",
        "from_pretrained loads it, and its logits are those of the engine to the bit",
    ]


if __name__ == "__main__":
    disable_progress_bar()
    channel = sw.default_channel()
    told, *_ = sw.simulate(2, finetune) if channel.size == 1 else [finetune(channel)]
    print(*told, sep="\n", end="\n" if told else "")
