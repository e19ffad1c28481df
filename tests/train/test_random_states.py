"""Random numbers go on, or begin anew, the same on every try."""

import pytest
import torch

from shardwise.comm import alone, simulate
from shardwise.train.random_states import RandomStates, derived_seed


def test_after_a_restore_the_same_numbers_come() -> None:
    torch.manual_seed(1)
    torch.rand(7)
    states = RandomStates.gathered(alone(), "single")
    expected = torch.rand(100)
    torch.manual_seed(2)
    stored = RandomStates.model_validate_json(states.model_dump_json())
    assert stored.restore(alone(), "single", seed=1, step=2, data_rank=0) is None
    assert torch.equal(torch.rand(100), expected)


def test_every_rank_is_recorded_in_its_place() -> None:
    states = simulate(3, lambda channel: RandomStates.gathered(channel, "dp_shard=3"))
    assert states[0] == states[1] == states[2]
    assert len(states[0].ranks) == 3
    assert all(set(rank) == {"cpu"} for rank in states[0].ranks)


@pytest.mark.parametrize("change", [{"mesh": "dp_shard=2"}, {"device": "cuda"}, {"ranks": [{}, {}]}])
def test_under_another_layout_numbers_are_seeded_by_seed_step_and_data_rank(change: dict[str, object]) -> None:
    states = RandomStates.gathered(alone(), "single").model_copy(update=change)
    drawn = []
    for seed, step, data_rank in ((1, 2, 3), (1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)):
        words = states.restore(alone(), "single", seed=seed, step=step, data_rank=data_rank)
        assert words is not None
        assert "seeded anew" in words
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4


def test_derived_seeds_fit_torch_and_differ() -> None:
    seeds = {derived_seed(seed, step, rank) for seed in (0, 1, 2**63 - 1) for step in range(9) for rank in range(9)}
    assert len(seeds) == 3 * 81
    assert all(0 <= seed < 2**63 for seed in seeds)
