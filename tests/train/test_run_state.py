"""Random numbers outside of forwards go on, or begin anew, the same on every try."""

import base64
import json

import pytest
import torch

from shardwise.comm import alone, simulate
from shardwise.train.run_state import RandomStates


@pytest.mark.parametrize("change", [{"mesh": "dp_shard=2"}, {"device": "cuda"}, {"ranks": [{}, {}]}])
def test_under_another_layout_numbers_are_seeded_by_seed_and_step(change: dict[str, object]) -> None:
    states = RandomStates.gathered(alone(), "single").model_copy(update=change)
    drawn = []
    for seed, step in ((1, 2), (1, 2), (2, 2), (1, 3)):
        torch.rand(())
        words = states.restore(alone(), "single", seed=seed, step=step)
        assert words is not None
        assert "seeded anew" in words
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_under_another_mesh_numbers_of_which_none_was_drawn_stay() -> None:
    torch.manual_seed(1)
    states, *others = simulate(3, lambda channel: RandomStates.gathered(channel, "dp_shard=3"))
    assert others == [states] * 2
    assert [set(rank) for rank in states.ranks] == [{"cpu"}] * 3
    assert states.restore(alone(), "single", seed=5, step=2) is None
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), expected)


def test_numbers_of_a_device_go_on_under_the_name_of_its_kind(fake: str) -> None:
    channel = alone(torch.device(fake, 1))
    torch.rand(3, device=channel.device)
    states = RandomStates.gathered(channel, "single")
    assert states.device == fake
    assert set(states.ranks[0]) == {"cpu", fake}
    expected = torch.rand(100, device=channel.device).cpu(), torch.rand(100)
    stored = RandomStates.model_validate_json(states.model_dump_json())
    assert stored.restore(channel, "single", seed=1, step=2) is None
    assert torch.equal(torch.rand(100, device=channel.device).cpu(), expected[0])
    assert torch.equal(torch.rand(100), expected[1])


def test_states_of_a_save_on_cuda_are_read_by_the_names_that_they_have_always_had() -> None:
    state = base64.b64encode(bytes(16)).decode()
    text = json.dumps({"mesh": "single", "device": "cuda", "ranks": [{"cpu": state, "cuda": state}]})
    words = RandomStates.model_validate_json(text).restore(alone(), "single", seed=1, step=2)
    assert words is not None
    assert "was saved under mesh single on cuda, and goes on under mesh single on cpu" in words
