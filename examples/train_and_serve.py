"""Train a Llama on four ranks, and serve it on five others: pp = 2 x tp = 2 to tp = 1 and tp = 4, without a file.

One learns: an engine on some ranks of a channel; `sw.stream` to receivers with their own names, cuts and dtypes; that
nothing travels when nothing has changed. The receivers are `examples/inference_receiver.py`.

    python -m examples.train_and_serve
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from examples.inference_receiver import Sizes, serve
from shardwise.rewrite import shipped

NUM_STEPS = 2
NUM_STREAMS = NUM_STEPS + 1
TRAINERS = range(4)
SERVERS = {1: range(4, 5), 4: range(5, 9)}  # by their number of ranks along tp

Tensors = Mapping[str, torch.Tensor]


def engine_of(channel: sw.Channel) -> sw.Engine:
    """The trainer, which computes in bfloat16; `channel` has its ranks alone."""
    torch.manual_seed(0)
    return sw.parallelize(
        LlamaForCausalLM(LlamaConfig(**asdict(Sizes()), use_cache=False)),
        sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=sw.Tensor(rules="auto"), precision=sw.Precision(compute="bfloat16")),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        channel=channel,
    )


def train(channel: sw.Channel) -> Tensors:
    """Train, and send the weights after each update; returns them whole, under the names of the servers."""
    engine = engine_of(channel.over(TRAINERS))
    names = shipped("llama-vllm")
    report = None
    for step in range(NUM_STREAMS):
        if step < NUM_STEPS:
            words = torch.randint(500, (4, 16), generator=torch.Generator().manual_seed(step))
            engine.step({"input_ids": words, "labels": words})
        # Receivers call it too. The last time nothing has changed, and only digests travel.
        report = sw.stream(engine, None, channel=channel, rewrite=names, delta=True, last=report)
    return dict(sw.full(engine, names))


def take_part(channel: sw.Channel) -> Tensors:
    """What each rank of the world does; returns what it has in the end."""
    if channel.rank in TRAINERS:
        return train(channel)
    tp, ranks = next(each for each in SERVERS.items() if channel.rank in each[1])
    return serve(channel, Sizes(), channel.rank - ranks[0], tp, NUM_STREAMS)


def compare(tensors: Sequence[Tensors]) -> None:
    """What all ranks have: whole tensors of the trainers, those of the server of one rank, parts of the other one."""
    trained, alone, parts = tensors[0], tensors[4], tensors[5:]
    for name, whole in trained.items():
        assert torch.equal(alone[name][: len(whole)], whole), name  # without what fills up the vocabulary
    down = "model.layers.3.mlp.down_proj.weight"
    assert torch.equal(torch.cat([each[down] for each in parts], dim=1), trained[down])
    queries, keys, values = trained["model.layers.3.self_attn.qkv_proj.weight"].split([64, 32, 32])
    for rank, each in enumerate(parts):  # 4 query heads of 16 rows, and 2 key and value heads, which two ranks share
        head = slice(rank // 2 * 16, rank // 2 * 16 + 16)
        fused = torch.cat([queries[rank * 16 : rank * 16 + 16], keys[head], values[head]])
        assert torch.equal(each["model.layers.3.self_attn.qkv_proj.weight"], fused)


if __name__ == "__main__":
    compare(sw.simulate(9, take_part))
    print("both servers hold the weights of the trainer to the bit")
