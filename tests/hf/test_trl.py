"""The trainers of TRL under a plan, against plain TRL in one process."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

import shardwise as sw
from shardwise.errors import MismatchError, PeerError
from tests.contracts.adapter_cases import refused_on_all
from tests.hf.trl_runs import (
    PLANS,
    assert_alike,
    drawn,
    made,
    of_answers,
    outcome,
    referring_to,
    rows,
    trained,
    with_adapter,
)
from tests.refusals import Refusals

pytestmark = [
    # TRL calls transformers by names that end with its version 6.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing[_a-z]*. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning"),
]
PP = PLANS["pp"]
IN_TURNS = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved", chunks=2))
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.fixture(autouse=True)
def _answers_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL shuffles them on each process apart."""
    for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda rows: rows)


def first(num: int, names: Iterable[str]) -> list[Any]:
    """All cases; CI runs the first ones."""
    return [pytest.param(name, marks=() if at < num else pytest.mark.stress) for at, name in enumerate(names)]


# Of given answers ---------------------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[str, sw.Plan, dict[str, Any]]] = {
    "packed": ("sft", PP, {"packing": True}),
    # All of its weights follow on every rank, also those of other stages.
    "a reference that follows": ("dpo", PP, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "sft, tp": ("sft", PLANS["tp"], {}),
    "dpo, stage 3": ("dpo", PLANS["stage 3"], {}),
    "answers alone": ("sft", PP, {"assistant_only_loss": True}),
    "dft": ("sft", PP, {"loss_type": "dft"}),
    "several losses": ("dpo", PP, {"loss_type": ["sigmoid", "sft", "ipo", "bco_pair"], "ld_alpha": 0.5}),
    "weighted": ("dpo", PP, {"use_weighting": True}),
    "adapter and its base as the reference": ("dpo", PP, {"lora": LORA}),
    "in turns": ("dpo", IN_TURNS, {"k": 3}),
    "sft, pp x tp": ("sft", PLANS["pp x tp"], {}),
    "dpo, pp x stage 3": ("dpo", PLANS["pp x stage 3"], {"k": 4}),
}


@pytest.mark.parametrize("name", first(4, GIVEN))
def test_losses_figures_and_weights_are_those_of_plain_trl(name: str, tmp_path: Path) -> None:
    kind, plan, settings = GIVEN[name]
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, **settings}
    history, weights = trained(kind, tmp_path / "plain", **evaluated)
    assert len([each for each in history if "loss" in each]) == 3
    # With several data ranks, TRL takes means of ranks for most figures.
    names = None if plan.mesh.num_data_ranks == 1 and plan.mesh.pp > 1 else ("loss", "eval_loss", "num_tokens")
    for found, whole in sw.simulate(
        plan.mesh.size, lambda channel: trained(kind, tmp_path / "plan", plan, channel, **evaluated)
    ):
        kept = [
            [{name: value for name, value in each.items() if names is None or name in names} for each in side]
            for side in (found, history)
        ]
        assert_alike((kept[0], {}, whole), (kept[1], {}, weights))


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(sw.Mesh(dp_shard=2), marks=pytest.mark.quick),
        pytest.param(sw.Mesh(pp=2, dp_shard=2), marks=pytest.mark.stress),
    ],
)
def test_ranks_choose_one_best_model_though_each_counts_its_last_batch_alone(mesh: sw.Mesh, tmp_path: Path) -> None:
    steps: dict[str, Any] = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_mean_token_accuracy",
        "learning_rate": 3e-2,
    }
    sizes: dict[str, Any] = {"k": mesh.num_data_ranks, "per_device_eval_batch_size": 1, "num_held_out": 3}

    def chosen(channel: sw.Channel) -> Any:
        trainer = of_answers("sft", tmp_path, sw.Plan(mesh=mesh), channel, **steps, **best, **sizes)
        trainer.train()
        seen = [each["eval_mean_token_accuracy"] for each in trainer.state.log_history if "eval_loss" in each]
        return trainer.state.best_global_step, trainer.state.best_metric, seen

    both = sw.simulate(mesh.size, chosen)
    assert both[0][2].index(max(both[0][2])) != both[1][2].index(max(both[1][2]))
    for step, metric, _ in both:
        assert metric == max(both[0][2])
        assert step == 1 + both[0][2].index(metric)


def test_losses_of_a_packed_evaluation_count_the_rows_of_the_dataset(tmp_path: Path) -> None:
    packed: dict[str, Any] = {"packing": True, "eval_packing": True, "max_length": 8, "num_held_out": 11}

    def evaluated(plan: sw.Plan | None, channel: sw.Channel | None = None) -> float:
        trainer = of_answers("sft", tmp_path, plan, channel, **packed)
        assert len(trainer.eval_dataset) % 2 == 1
        return float(trainer.evaluate()["eval_loss"])

    expected = evaluated(None)
    assert evaluated(sw.Plan()) == expected
    assert sw.simulate(2, partial(evaluated, PLANS["stage 3"])) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize("name", ["stage 3", pytest.param("pp", marks=pytest.mark.stress)])
def test_reference_values_computed_before_are_those_of_plain_trl(name: str, tmp_path: Path) -> None:
    def run(plan: sw.Plan | None, channel: sw.Channel | None = None) -> Any:
        # All ranks have one data set, whose folder has what the first one computes.
        folder = tmp_path / ("plain" if plan is None else "plan")
        if not folder.exists():
            rows("prompt", "chosen", "rejected").select(range(13)).save_to_disk(str(folder))
        if channel is not None:
            channel.exchange(b"", purpose="the data set is there")
        settings = {"precompute_ref_log_probs": True, "dataset": Dataset.load_from_disk(str(folder))}
        history, weights = trained("dpo", tmp_path / "of", plan, channel, **settings)
        return [{"loss": each["loss"]} for each in history if "loss" in each], {}, weights

    expected = run(None)
    for found in sw.simulate(2, partial(run, PLANS[name])):
        assert_alike(found, expected)


# Of answers that they generate --------------------------------------------------------------------------------------

ALL_OF_A_LENGTH = {"generation_kwargs": {"do_sample": False, "suppress_tokens": [2]}}
"""Where a loss divides by the tokens of a rank, as TRL has it: no answer ends before its last token."""
FOLLOWS = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
RLOO = (trl.RLOOTrainer, trl.RLOOConfig)
GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    # A group of answers is cut by the ranks, and the reference follows the weights.
    "a group over ranks": ("stage 3", {"num_generations": 8, "num_iterations": 2, **FOLLOWS}),
    "three ranks share two groups": ("stage 2 on 3 ranks", {"num_generations": 6, "build": with_adapter, "beta": 0.1}),
    "leave one out": ("tp", {"of": RLOO, "num_iterations": 2}),
    "microbatches": ("stage 1", {"rows_per_rank": 2, "gradient_accumulation_steps": 2, "num_generations": 2}),
    "microbatches of stages": ("pp", {"gradient_accumulation_steps": 2, **FOLLOWS}),
    # Whole groups in every round: the last one of 20 answers has 4, and each rank 2 of them.
    "an evaluation": ("stage 3", {"eval_dataset": rows("prompt").select(range(4)), "max_steps": 1}),
    **{
        loss: (plan, {"loss_type": loss, "num_iterations": 2, **(ALL_OF_A_LENGTH if loss == "bnpo" else {})})
        for loss, plan in {
            **{"grpo": "stage 0", "bnpo": "stage 3", "dr_grpo": "tp", "sapo": "stage 3 x tp"},
            **{"luspo": "stage 2 on 3 ranks"},
        }.items()
    },
    "scaled by the batch": ("stage 3", {"scale_rewards": "batch"}),
    "not scaled": ("stage 3 x tp", {"scale_rewards": "none", "mask_truncated_completions": True}),
    "a bonus for entropy": ("stage 3", {"entropy_coef": 0.1, **ALL_OF_A_LENGTH}),
    "gathered for each call": ("stage 3", {"ds3_gather_for_generation": False}),
    "an evaluation of stages": (
        "pp",
        {"beta": 0.1, "num_iterations": 2, "eval_dataset": rows("prompt").select(range(4))},
    ),
    "leave one out of stages": ("pp", {"of": RLOO, "num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2}),
    "stages, cut and gathered": ("pp x stage 3", {"beta": 0.1, "num_iterations": 2, "num_generations": 8}),
    "stages cut by tp": ("pp x tp", {"gradient_accumulation_steps": 2, "build": with_adapter, "beta": 0.1}),
    "checkpointed stages": (
        "pp",
        {"activation_checkpointing": True, "top_entropy_quantile": 0.5, "loss_type": "cispo"},
    ),
}


@pytest.mark.parametrize("name", first(6, GENERATED))
def test_answers_advantages_metrics_and_weights_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    plan, settings = GENERATED[name]
    ranks = PLANS[plan].mesh.num_data_ranks
    settings = {"data_ranks": ranks, "build": referring_to(tmp_path / "reference"), **settings}
    expected = outcome(tmp_path / "plain", **settings)
    assert any(each.get("grad_norm", 0) > 0.01 for each in expected[0])
    for found in sw.simulate(
        PLANS[plan].mesh.size, lambda channel: outcome(tmp_path / "plan", PLANS[plan], channel, **settings)
    ):
        assert_alike(found, expected)


def test_one_rank_has_the_bits_of_plain_trl(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_ranks": 1, "num_iterations": 2, "gradient_accumulation_steps": 2}
    found, expected = (outcome(tmp_path, plan, None, **settings) for plan in (sw.Plan(), None))
    assert found[0] == expected[0]
    assert any(each.get("loss") for each in found[0])


@pytest.mark.parametrize("name", ["tp", pytest.param("pp", marks=pytest.mark.stress)])
def test_ranks_of_one_data_rank_take_the_rewards_of_the_first(name: str, tmp_path: Path) -> None:
    def run(plan: sw.Plan | None, channel: sw.Channel | None = None) -> Any:
        def rewarding(completions: list[str], **_: Any) -> list[float]:
            own = 0 if channel is None else channel.rank
            return [float((at + own) % 3) for at in range(len(completions))]

        return outcome(tmp_path, plan, channel, data_ranks=1, rewarding=rewarding)

    expected = run(None)
    for found in sw.simulate(2, partial(run, PLANS[name])):
        assert_alike(found, expected)


def test_a_reward_that_fails_on_one_rank_stops_all(tmp_path: Path) -> None:
    stopped = []

    def run(channel: sw.Channel) -> None:
        def failing(completions: list[str], **_: Any) -> list[float]:
            if channel.rank == 1:
                raise ValueError("no judge answers")
            return [1.0] * len(completions)

        try:
            outcome(tmp_path, PLANS["stage 3"], channel, rewarding=failing)
        except PeerError as error:
            stopped.append(str(error))
            raise

    with pytest.raises(ValueError, match="no judge answers"):
        sw.simulate(2, run)
    assert "ValueError in what a trainer generates: no judge answers" in stopped[0]


@pytest.mark.parametrize(
    ("plan", "first"),
    [("stage 3 x tp", (0, 0, 2, 2)), pytest.param("pp x stage 1", (0, 1, 0, 1), marks=pytest.mark.stress)],
)
def test_answers_drawn_by_the_model_are_alike_but_over_data_ranks(
    plan: str, first: tuple[int, ...], tmp_path: Path
) -> None:
    both = sw.simulate(4, lambda channel: drawn(tmp_path, plan, channel))
    assert all(each[0] == both[0][0] for each in both)
    assert [each[1] for each in both] == [both[at][1] for at in first]
    assert len({str(each[1]) for each in both}) == 2


class WithTools(trl.GRPOTrainer):
    def create_accelerator_and_postprocess(self) -> None:
        self.tools = [print]  # as TRL sets them before the trainer is made
        super().create_accelerator_and_postprocess()


def refused(plan: sw.Plan, folder: Path, **changed: Any) -> None:
    refused_on_all(plan, lambda channel: made(folder, plan, channel, **changed))


REFUSED = Refusals(
    "hf.trl",
    {
        "groups that answers do not fill": lambda folder: refused(PLANS["stage 1"], folder, num_generations=3),
        "continuous batching": lambda folder: refused(
            PLANS["stage 1"], folder, use_transformers_continuous_batching=True
        ),
        "tools": lambda folder: refused(PLANS["stage 3"], folder, of=(WithTools, trl.GRPOConfig)),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_trains(case: str) -> None:
    REFUSED.check(case)


def test_a_head_that_is_cut_is_found_though_the_first_losses_are_alike(tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto"))
    with pytest.raises(MismatchError, match=r"Leave lm_head whole, by tensor.rules for the layers alone"):
        sw.simulate(2, lambda channel: outcome(tmp_path, plan, channel))
