"""A loader of an `sw.Data`: epochs of whole updates, cut into parts, from any position on."""

import pytest
import torch

import shardwise as sw
from shardwise.comm import alone
from shardwise.trainers.data_batches import DataBatches
from tests.engine.loops import begun

ROWS = {"input": torch.arange(14.0).reshape(7, 2)}


def engine() -> sw.Engine:
    return begun(alone(), lambda: torch.nn.Linear(2, 1), sw.Plan())  # type: ignore[no-any-return]


def test_an_epoch_is_the_updates_that_hold_the_samples_and_a_loop_is_the_rest_of_one() -> None:
    trained = engine()
    loader = DataBatches(sw.Data(ROWS, global_batch=4), lambda: trained, parts=lambda: 2)
    assert len(loader) == 4
    for epoch in range(3):
        for number, part in enumerate(loader):
            assert len(part["input"]) == 2
            trained.step(part)
            if epoch == 1 and number == 1:
                state = loader.state_dict()
        assert number == 3
    again = DataBatches(sw.Data(ROWS, global_batch=4), lambda: trained, parts=lambda: 2)
    again.load_state_dict(state)
    assert [[len(part["input"]) for part in again if trained.step(part)] for _ in range(2)] == [[2] * 2, [2] * 4]


def test_data_without_an_end_have_no_length_and_no_last_batch() -> None:
    class Endless:
        def __getitem__(self, at: int) -> dict[str, float]:
            return {"at": float(at)}

    trained = engine()
    loader = DataBatches(sw.Data(Endless(), global_batch=4), lambda: trained)
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    found = [batch["at"].tolist() for _, batch in zip(range(5), loader, strict=False)]
    assert found[-1] == [16, 17, 18, 19]
