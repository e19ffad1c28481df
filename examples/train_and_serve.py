"""Train a Llama on four ranks, and serve it on five others: pp = 2 x tp = 2 to tp = 1 and tp = 4, without a file.

One learns: an engine on some ranks of a channel, `sw.stream` to receivers with their own names, cuts and dtypes, and
how little travels when little has changed. The receivers are `examples/inference_receiver.py`.

    python -m examples.train_and_serve
"""

from dataclasses import asdict

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from examples.inference_receiver import Sizes, serve
from shardwise.rewrite import shipped

NUM_UPDATES = 3
TRAINERS = range(4)
SERVERS = {1: range(4, 5), 4: range(5, 9)}  # by their number of ranks along tp


def engine_of(channel: sw.Channel) -> sw.Engine:
    """The trainer, on a channel of the trainers alone."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**asdict(Sizes()), use_cache=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" not in name)  # frozen: it travels once
    return sw.parallelize(
        model,
        sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=sw.Tensor(rules="auto"), precision=sw.Precision(compute="bfloat16")),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        channel=channel,
    )


def train(channel: sw.Channel, num_updates: int = NUM_UPDATES) -> dict[str, torch.Tensor]:
    """Train, and send the weights after each update; returns them whole, as the servers call them."""
    # The ranks of the engine are those of this channel, in this order; receivers are not among them.
    engine = engine_of(channel.over(TRAINERS))
    names = shipped("llama-vllm")
    report = None
    for step in range(num_updates):
        words = torch.randint(500, (4, 16), generator=torch.Generator().manual_seed(step))
        engine.step({"input_ids": words, "labels": words})
        report = sw.stream(engine, None, channel=channel, rewrite=names, delta=True, last=report)
    return dict(sw.full(engine, names))


def take_part(channel: sw.Channel) -> dict[str, torch.Tensor]:
    """What each rank of the world does."""
    if channel.rank in TRAINERS:
        return train(channel)
    tp, ranks = next(each for each in SERVERS.items() if channel.rank in each[1])
    return serve(channel, Sizes(), channel.rank - ranks[0], tp, NUM_UPDATES)


def main() -> None:
    """Run all nine ranks in this process, and compare what the servers have with what was trained."""
    tensors = sw.simulate(9, take_part)
    whole, alone, cut = tensors[0], tensors[4], [tensors[rank] for rank in SERVERS[4]]
    for name, tensor in whole.items():
        assert torch.equal(alone[name][: len(tensor)], tensor), name
    down = "model.layers.3.mlp.down_proj.weight"
    assert torch.equal(torch.cat([each[down] for each in cut], dim=1), whole[down])
    print("the servers hold the weights of the trainer to the bit")


if __name__ == "__main__":
    main()
