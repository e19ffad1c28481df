"""Sparse and nested tensors in batches that are cut, listed or shared by ranks; `tests/oracle` trains with them."""

from functools import partial

import pytest

import shardwise as sw
from shardwise.errors import BatchError, MismatchError
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS
from tests.oracle.shapes import ODD_BATCHES

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]


@pytest.mark.parametrize("layout", ODD_BATCHES)
def test_rows_of_sparse_coo_and_nested_tensors_are_cut_and_others_are_given_in_lists(layout: str) -> None:
    program = PROGRAMS[f"{layout} batches"]
    batch = {name: value if name == "odd" else value[:4] for name, value in program.batches[0].items()}

    def run(channel: sw.Channel, k: int) -> list[float]:
        engine = program.engine(plan_of(program, k=k), channel, rows=0)
        return [engine.step(batch).loss, engine.evaluate(batch).loss]

    def listed(channel: sw.Channel) -> float:
        engine = program.engine(plan_of(program, "dp_shard=2"), channel)
        return engine.step([program.batches[0], program.batches[1]]).loss

    first, second = sw.simulate(2, listed)
    assert first == second
    if layout in ("csr", "csc", "bsr"):
        with pytest.raises(BatchError, match=r"entry 'odd' has the layout torch.sparse_.*rows=.*a list.*sparse_coo"):
            sw.simulate(1, lambda channel: run(channel, 2))
    else:
        (whole,), (halves,) = (sw.simulate(1, partial(run, k=k)) for k in (1, 2))
        assert halves == pytest.approx(whole)


@pytest.mark.parametrize("layout", ODD_BATCHES)
def test_ranks_that_share_a_batch_compare_what_it_is_made_of(layout: str) -> None:
    program = PROGRAMS[f"{layout} batches"]

    def run(channel: sw.Channel) -> None:
        batch = program.batches[0]
        program.engine(plan_of(program, "tp=2"), channel).step({**batch, "odd": batch["odd"] * (1 + channel.rank)})

    with pytest.raises(MismatchError, match=r"odd \((nested|torch\.\w+)\) \d"):
        sw.simulate(2, run)
