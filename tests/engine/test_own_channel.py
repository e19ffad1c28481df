"""Saves, loads and full tensors of an engine go over the engine's own channel where they are given none."""

from pathlib import Path

import torch

import shardwise as sw
from shardwise.checkpoint import AsyncSaver


def test_an_engine_of_simulated_ranks_needs_no_channel_named(tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        engine = sw.parallelize(
            torch.nn.Linear(3, 5),
            sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(stage=3)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        assert engine.channel is channel
        seen = [dict(sw.full(engine))]
        sw.save(tmp_path / "now", engine)
        with AsyncSaver(tmp_path / "behind") as saver:
            saver.save(engine)
        engine.step({"input": torch.ones(2, 3)})
        seen.append(dict(sw.full(engine)))
        for folder in ("now", "behind"):
            sw.load(tmp_path / folder, engine)
            seen.append(dict(sw.full(engine)))
            engine.step({"input": torch.ones(2, 3)})
        return seen

    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 5).state_dict()
    for first, trained, *loaded in sw.simulate(2, run):
        assert not torch.equal(trained["weight"], expected["weight"])
        for each in (first, *loaded):
            assert each.keys() == expected.keys()
            assert all(torch.equal(each[name], expected[name]) for name in expected)
