"""Every program trains under every layout, wherever its ranks are, as one process does; or it is refused in words.

Of the layouts that fit a program one is tried by `make test`, another by `make test-all`, all by `make stress`; each
layout meets programs of each kind.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.oracle.batches import rows_of, word_batch
from tests.oracle.comparison import (
    assert_close,
    assert_same,
    assert_trains_like_one_process,
    in_one_process,
)
from tests.oracle.fits import NOT, chosen, fitting
from tests.oracle.layouts import LAYOUTS
from tests.oracle.of_transformers import TRANSFORMERS
from tests.oracle.places import data_share, put_together, train, train_on, whole_state
from tests.oracle.program import plan_of, sgd
from tests.oracle.programs import PROGRAMS, masked_batch
from tests.oracle.rank_order import in_rank_order
from tests.properties import tried

pytestmark = [
    # torch's compiler looks at the gradient of values that are no leaves, and is warned by torch about it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # of a checkpoint in an evaluation
    pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
]


def plan_for(program: str, layout: str) -> sw.Plan:
    return plan_of(PROGRAMS[program], **LAYOUTS[layout])


@pytest.mark.parametrize(("program", "layout"), chosen(range(1)))
def test_a_program_trains_like_one_process(program: str, layout: str) -> None:
    assert_trains_like_one_process(PROGRAMS[program], plan_for(program, layout))


@pytest.mark.slow
@pytest.mark.parametrize(("program", "layout"), chosen(range(1, 2)))
def test_a_program_trains_like_one_process_under_other_layouts(program: str, layout: str) -> None:
    assert_trains_like_one_process(PROGRAMS[program], plan_for(program, layout))


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_trains_like_one_process_under_all_layouts_that_fit_it(program: str) -> None:
    for layout in fitting(program):
        assert_trains_like_one_process(PROGRAMS[program], plan_for(program, layout))


@pytest.mark.parametrize(
    ("program", "layout"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] in TRANSFORMERS else []) for each in NOT],
)
def test_what_cannot_be_trained_so_is_refused_in_words(program: str, layout: str) -> None:
    with pytest.raises((ShardwiseError, AttributeError, RuntimeError), match=NOT[program, layout]):
        train(PROGRAMS[program], plan_for(program, layout))


@pytest.mark.parametrize(
    ("program", "layout"),
    [
        ("words", "two ranks, k=3, tiny buckets"),
        ("curve", "bfloat16, narrow sums"),
        ("words, by targets", "stage 3, whole, k=2"),
        ("sharing", "replicas, k=2"),
        ("decoder", "all"),
        ("u-net", "stages x data"),
        ("tied head", "two stages, k=5"),
        ("chain", "stages x replicas, whole"),
        ("batch norm", "stage 3, run again"),
    ],
)
@pytest.mark.usefixtures("on_fake")
def test_a_program_trains_on_devices_like_in_one_process(program: str, layout: str) -> None:
    """Bits are equal there, because the fake device has the kernels of the CPU."""
    assert_trains_like_one_process(PROGRAMS[program], plan_for(program, layout))


@tried(12)
@given(data=st.data())
def test_any_plan_of_data_ranks_has_the_bits_of_one_process(data: st.DataObject) -> None:
    replicate, shard = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 5), (3, 2), (2, 4)]))
    k = data.draw(st.integers(1, 4))
    program = PROGRAMS[data.draw(st.sampled_from(["words", "words, by targets"]))]
    rows = data.draw(st.integers(replicate * shard * k, 40))
    seed = data.draw(st.integers(0, 10**6))
    batch = word_batch(seed, rows) if program.loss_weight is None else rows_of(masked_batch(seed, 40), range(rows))
    plan = plan_of(
        program,
        sw.Mesh(dp_replicate=replicate, dp_shard=shard),
        stage=data.draw(st.integers(0, 3)),
        partition=data.draw(st.sampled_from(["slice", "whole"])),
        owners=data.draw(st.sampled_from(["all", "dp_shard"])),
        bucket_bytes=data.draw(st.sampled_from([1, 64, 600, 1500, 1 << 20])),
        clip=data.draw(st.sampled_from([None, 0.3, 100.0])),
        k=k,
    )
    assert_trains_like_one_process(
        replace(program, batches=[batch, batch], optimizer=data.draw(st.sampled_from([sgd, program.optimizer]))), plan
    )


@pytest.mark.parametrize("layout", ["two ranks, k=3, tiny buckets", "replicas, k=2", "stage 2, k=3", "stages x data"])
@pytest.mark.parametrize("program", ["words", "words, by targets", "decoder"])
def test_the_order_of_ranks_is_a_rounding_away_from_what_anybody_would_write(program: str, layout: str) -> None:
    wide, plan = PROGRAMS[program].in_float64(), plan_for(program, layout)
    assert_close(in_rank_order(wide, plan), in_one_process(wide, plan), noise=wide.noise)


def test_a_mean_of_other_weights_or_after_the_clip_would_be_seen() -> None:
    """What the bounds of closeness are for: wrong programs differ by far more."""
    program = PROGRAMS["words, by targets"].in_float64()
    plan = plan_for(program.name.removesuffix(" in float64"), "stages x data")
    by_rows = in_rank_order(replace(program, loss_weight=None), plan)
    with pytest.raises(AssertionError):
        assert_close(by_rows, in_one_process(program, plan), relative=1e-3)


BETWEEN = [
    ("units tied", "stage 2, k=3"),
    ("units checkpointed", "stage 3, kept gathered"),
    ("batch norm", "replicas, k=2"),
    ("decoder, float32", "stages x stage 3"),
    ("decoder", "tp x stages"),
]


@pytest.mark.parametrize(("program", "layout"), BETWEEN)
def test_evaluations_and_predictions_between_updates_change_no_bit(program: str, layout: str) -> None:
    plan = plan_for(program, layout)

    def trained(*, between: bool) -> list[object]:
        return sw.simulate(plan.mesh.size, lambda channel: train_on(channel, PROGRAMS[program], plan, between=between))

    assert_same(put_together(trained(between=True)), put_together(trained(between=False)))


@pytest.mark.parametrize("layout", ["three ranks, whole", "stage 3, replicas", "two stages", "tp x stage 3", "all"])
def test_evaluation_and_prediction_are_those_of_one_process_whatever_rank_has_the_rows(layout: str) -> None:
    """The first data rank has seven rows, the others none."""
    program, plan = PROGRAMS["decoder"], plan_for("decoder", layout)
    batch = word_batch(5, 7)
    model = program.make().eval()
    with torch.no_grad():
        logits, wanted = model(batch["words"]), program.loss_of(model, batch).item()

    def run(channel: sw.Channel) -> tuple[float, torch.Tensor]:
        engine = program.engine(plan, channel)
        mine = rows_of(batch, range(0 if plan.mesh.data_rank(channel.rank) else 7))
        return engine.evaluate(mine).loss, engine.predict({"words": batch["words"]})

    results = sw.simulate(plan.mesh.size, run)
    for loss, told in results:
        assert loss == results[0][0] == pytest.approx(wanted, rel=1e-12)
        assert torch.equal(told, results[0][1])
        torch.testing.assert_close(told, logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "bad"),
    [
        ("one rank, k=3", math.inf),
        ("three ranks, whole", math.nan),
        ("replicas, k=2", math.inf),
        ("stage 2, k=3", math.nan),
        ("stage 3, kept gathered", math.inf),
        ("bfloat16, stage 3", math.nan),
        ("four stages", math.inf),
        ("stages x data", math.nan),
        ("stages x stage 3", math.inf),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(layout: str, bad: float) -> None:
    program, plan = PROGRAMS["chain"], plan_for("chain", layout)
    poisoned = {name: value.clone() for name, value in program.batches[0].items()}
    poisoned["y"][5] = bad

    def run(channel: sw.Channel) -> list[dict[sw.Piece, torch.Tensor]]:
        engine = program.engine(plan, channel)
        states = []
        for at, batch in enumerate([program.batches[0], poisoned, poisoned, *program.batches[1:]]):
            report = engine.step(data_share(batch, plan.mesh, channel.rank))
            states.append({piece: tensor.clone() for piece, tensor in engine.state().items()})
            assert report.skipped is (at in (1, 2))
            assert math.isfinite(report.loss) is math.isfinite(report.grad_norm) is not report.skipped
        assert (engine.counters.updates, engine.counters.skipped) == (len(program.batches), 2)
        return states

    ranks = sw.simulate(plan.mesh.size, run)
    states = [whole_state([rank[at] for rank in ranks]) for at in range(len(ranks[0]))]
    wanted = train(program, plan).states
    for state, other in zip(states, [wanted[0], wanted[0], *wanted], strict=True):
        assert state.keys() == other.keys()
        assert [name for name in state if not torch.equal(state[name], other[name])] == []
