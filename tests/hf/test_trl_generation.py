"""Trainers of TRL that generate what they train on, on several ranks, against plain TRL in one process.

The plain one has the rows of all data ranks in each microbatch, as TRL gathers them. What is fixed in both: the draws,
which follow from the place of a row among the rows of all ranks, and the order of answers after a generation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import shardwise as sw
from shardwise.errors import ConfigError, MismatchError, PeerError
from shardwise.hf import trainer_class
from shardwise.hf.rank_batches import shared_rows
from tests.hf.example_tasks import causal_language_model, tokenizer
from tests.hf.test_trl_trainers import LAYERS, rows

pytestmark = [
    # TRL calls transformers by names that end with its version 6.
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_[a-z]*. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning"),
]

ALL_OF_A_LENGTH = {"generation_kwargs": {"do_sample": False, "suppress_tokens": [2]}}
"""Where a loss divides by the tokens of a rank, as TRL has it: no answer ends before its last token."""

PLANS = {
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_replicate=2), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    "stage 2 on 3 ranks": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "pp x stage 1": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2)),
    "pp x stage 3": sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp x tp": sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=sw.Tensor(rules=LAYERS)),
    # Its head reads the weight of lm_head itself, which stays whole.
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=LAYERS)),
    "stage 3 x tp": sw.Plan(
        mesh=sw.Mesh(dp_shard=2, tp=2), sharding=sw.Sharding(stage=3), tensor=sw.Tensor(rules=LAYERS)
    ),
}


class PlacedDraws(transformers.LogitsProcessor):
    """Gumbel noise by the place of a row and of a token: the largest logit is a draw, equal in every layout."""

    def __init__(self, first_row: int, prompt_length: int) -> None:
        self._first_row = first_row
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self._prompt_length
        seeds = [100 * (self._first_row + row) + place for row in range(len(input_ids))]
        draws = [torch.rand(scores.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return scores - (-torch.stack(draws).to(scores.device).log()).log()


def plain_model() -> Any:
    return causal_language_model().build()


def with_adapter() -> Any:
    torch.manual_seed(1)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(plain_model(), adapter)


def referring_to(folder: Path) -> Callable[[], Any]:
    """A model that was read from a folder, which has other weights by now: the reference."""
    reference = plain_model()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    reference.save_pretrained(folder)

    def build() -> Any:
        model = plain_model()
        model.config._name_or_path = str(folder)
        return model

    return build


def reward(completions: list[str], prompts: list[str], **_: Any) -> list[float | None]:
    values = [sum(map(ord, prompt + text)) % 7 for prompt, text in zip(prompts, completions, strict=True)]
    # 6: an answer that cannot be scored.
    return [None if value == 6 else float(value) for value in values]


def made(
    folder: Path,
    plan: sw.Plan | None = None,
    channel: sw.Channel | None = None,
    *,
    rows_per_rank: int = 4,
    data_ranks: int = 2,
    num_generations: int = 4,
    build: Callable[[], Any] = plain_model,
    of: Any = (trl.GRPOTrainer, trl.GRPOConfig),
    rewarding: Callable[..., Any] = reward,
    eval_dataset: Dataset | None = None,
    **changed: Any,
) -> Any:
    """A trainer with fixed draws; without a plan, one process with the rows of all data ranks."""
    kind, config = of
    model = build()
    generate = model.generate
    size = rows_per_rank * (data_ranks if plan is None else 1)

    def drawing(**given: Any) -> Any:
        first = trainer.accelerator.process_index * len(given["input_ids"])
        draws = PlacedDraws(first, given["input_ids"].shape[1])
        return generate(**given, logits_processor=transformers.LogitsProcessorList([draws]))

    model.generate = drawing
    settings = {
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "per_device_train_batch_size": size,
        "per_device_eval_batch_size": size,
        "num_generations": 2,
        "max_completion_length": 4,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "generation_kwargs": {"do_sample": False},
        **changed,
    }
    args = config(output_dir=str(folder), **settings)
    # Now, for the arguments of simulated ranks know of one process.
    args.num_generations = num_generations
    trainer = (kind if plan is None else trainer_class(kind))(
        model=model,
        args=args,
        train_dataset=rows(["prompt"]),
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        reward_funcs=rewarding,
        **({} if plan is None else {"plan": plan, "channel": channel}),
    )
    return trainer


def outcome(folder: Path, *given: Any, resume: str | None = None, **changed: Any) -> tuple[Any, Any, Any]:
    """What a training logs, its last prompts, answers, rewards and advantages, and its weights."""
    trainer = made(folder, *given, **changed)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    logs = [
        {name: value for name, value in each.items() if "time" not in name and "second" not in name}
        for each in trainer.state.log_history
    ]
    seen = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
    seen |= {name: list(each) for name, each in trainer._logs["rewards"].items()}
    if not given or given[0] is None:
        return logs, seen, {name: each.clone() for name, each in trainer.model.state_dict().items()}
    with trainer.engine.whole(optimizer=False):
        return logs, seen, {name: each.clone() for name, each in trainer.model.state_dict().items()}


def drawn(folder: Path, plan: str, channel: sw.Channel | None = None) -> tuple[list[str], list[list[int]], list[float]]:
    """All answers that the model drew, those of this rank as it trained on them, and the norms of gradients."""
    trainer = made(folder, PLANS[plan], channel, num_generations=4, generation_kwargs={"do_sample": True})
    # No draws of ours.
    del trainer.model.generate
    trainer.train()
    norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
    return list(trainer._logs["completion"]), trainer._buffered_inputs[0]["completion_ids"].tolist(), norms


def assert_alike(found: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        is_text = isinstance(values[0], str)
        assert found[1][name] == (values if is_text else pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True)), name
    for name, weight in expected[2].items():
        torch.testing.assert_close(found[2][name], weight, rtol=1e-4, atol=5e-6)


@pytest.fixture(autouse=True)
def _answers_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL shuffles them on each process apart."""
    for module in (trl.trainer.grpo_trainer, trl.trainer.rloo_trainer):
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda rows: rows)


RLOO = (trl.RLOOTrainer, trl.RLOOConfig)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # A group of answers is cut by the ranks, and the reference follows the weights.
    "a group over ranks": (
        "stage 3",
        {"num_generations": 8, "num_iterations": 2, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
    "three ranks share two groups": ("stage 2 on 3 ranks", {"num_generations": 6, "build": with_adapter, "beta": 0.1}),
    "leave one out": ("tp", {"of": RLOO, "num_iterations": 2}),
    "microbatches": ("stage 1", {"rows_per_rank": 2, "gradient_accumulation_steps": 2, "num_generations": 2}),
    "microbatches of stages": (
        "pp",
        {"gradient_accumulation_steps": 2, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        loss: (plan, {"loss_type": loss, "num_iterations": 2, **(ALL_OF_A_LENGTH if loss == "bnpo" else {})})
        for loss, plan in {
            "grpo": "stage 0",
            "bnpo": "stage 3",
            "dr_grpo": "tp",
            "cispo": "stage 1",
            "sapo": "stage 3 x tp",
            "vespo": "stage 3",
            "luspo": "stage 2 on 3 ranks",
        }.items()
    },
    "scaled by the batch": ("stage 3", {"scale_rewards": "batch"}),
    "not scaled": ("stage 3 x tp", {"scale_rewards": "none", "mask_truncated_completions": True}),
    "entropy": ("stage 3", {"top_entropy_quantile": 0.5}),
    "a bonus for entropy": ("stage 3", {"entropy_coef": 0.1, **ALL_OF_A_LENGTH}),
    "adapters cut by tp": ("stage 3 x tp", {"build": with_adapter, "beta": 0.1}),
    "checkpointed": ("stage 3 x tp", {"activation_checkpointing": True, "beta": 0.1}),
    "a reference under tp": ("tp", {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "gathered for each call": ("stage 3", {"ds3_gather_for_generation": False}),
    "one microbatch of stages": (
        "pp",
        {"beta": 0.1, "num_iterations": 2, "eval_dataset": rows(["prompt"]).select(range(4))},
    ),
    "leave one out of stages": ("pp", {"of": RLOO, "num_iterations": 2, "beta": 0.1, "gradient_accumulation_steps": 2}),
    "stages of two data ranks": ("pp x stage 1", {"gradient_accumulation_steps": 2, "beta": 0.1}),
    "stages, cut and gathered": ("pp x stage 3", {"beta": 0.1, "num_iterations": 2, "num_generations": 8}),
    "stages whose matrices are cut": (
        "pp x tp",
        {"gradient_accumulation_steps": 2, "build": with_adapter, "beta": 0.1},
    ),
    "adapters of stages": ("pp x stage 3", {"build": with_adapter, "beta": 0.1}),
    "checkpointed stages": (
        "pp",
        {"activation_checkpointing": True, "top_entropy_quantile": 0.5, "loss_type": "cispo"},
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(each, marks=pytest.mark.stress) for each in MORE)])
def test_answers_advantages_metrics_and_weights_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    plan, settings = (CASES | MORE)[name]
    ranks = PLANS[plan].mesh.num_data_ranks
    settings = {"data_ranks": ranks, "build": referring_to(tmp_path / "reference"), **settings}
    expected = outcome(tmp_path / "plain", **settings)
    assert any(each.get("grad_norm", 0) > 0.01 for each in expected[0])
    for found in sw.simulate(
        PLANS[plan].mesh.size, lambda channel: outcome(tmp_path / "plan", PLANS[plan], channel, **settings)
    ):
        assert_alike(found, expected)


@pytest.mark.parametrize("num_prompts", [4, 5])
def test_evaluations_have_whole_groups_in_every_round(num_prompts: int, tmp_path: Path) -> None:
    # Rounds of 8 answers; the last one of 20 has 4, and each rank 2 of them.
    settings: dict[str, Any] = {"eval_dataset": rows(["prompt"]).select(range(num_prompts)), "max_steps": 1}
    expected = outcome(tmp_path / "plain", **settings)
    for found in sw.simulate(2, lambda channel: outcome(tmp_path / "plan", PLANS["stage 3"], channel, **settings)):
        if num_prompts == 5:  # the plain one weighs the small round like the others
            found[0][-1]["eval_loss"] = expected[0][-1]["eval_loss"]
        assert_alike(found, expected)


@pytest.mark.parametrize("name", ["tp", pytest.param("pp", marks=pytest.mark.stress)])
def test_ranks_of_one_data_rank_take_the_rewards_of_the_first(name: str, tmp_path: Path) -> None:
    def trained(plan: sw.Plan | None, channel: sw.Channel | None = None) -> Any:
        def drawn(completions: list[str], **_: Any) -> list[float]:
            own = 0 if channel is None else channel.rank
            return [float((at + own) % 3) for at in range(len(completions))]

        return outcome(tmp_path, plan, channel, data_ranks=1, rewarding=drawn)

    expected = trained(None)
    for found in sw.simulate(2, lambda channel: trained(PLANS[name], channel)):
        assert_alike(found, expected)


def test_a_reward_that_fails_on_one_rank_stops_all(tmp_path: Path) -> None:
    stopped = []

    def trained(channel: sw.Channel) -> None:
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
        sw.simulate(2, trained)
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


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    def trained(name: str, plan: sw.Plan | None, channel: sw.Channel | None = None, **changed: Any) -> Any:
        return outcome(tmp_path / name, plan, channel, save_strategy="steps", save_steps=2, max_steps=3, **changed)

    expected = trained("plain", None)
    sw.simulate(2, lambda channel: trained("first", PLANS["stage 3"], channel))
    checkpoint = str(tmp_path / "first" / "checkpoint-2")
    for found in sw.simulate(2, lambda channel: trained("second", PLANS["stage 1"], channel, resume=checkpoint)):
        assert_alike((found[0][2:3], found[1], found[2]), (expected[0][2:3], expected[1], expected[2]))


def test_what_cannot_be_is_refused_before_anything_trains(tmp_path: Path) -> None:
    def refused(plan: sw.Plan, **changed: Any) -> Any:
        return sw.simulate(plan.mesh.size, lambda channel: made(tmp_path, plan, channel, **changed))

    with pytest.raises(ConfigError, match=r"are 8 answers, and num_generations = 3 does not divide them"):
        refused(PLANS["stage 1"], num_generations=3)
    with pytest.raises(ConfigError, match=r"use_transformers_continuous_batching on 2 ranks"):
        refused(PLANS["stage 1"], use_transformers_continuous_batching=True)


def test_a_head_that_is_cut_is_found_though_the_first_losses_are_alike(tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto"))
    with pytest.raises(MismatchError, match=r"Leave lm_head whole, by tensor.rules for the layers alone"):
        sw.simulate(2, lambda channel: outcome(tmp_path, plan, channel))


def test_tools_are_refused_where_ranks_would_take_unlike_numbers_of_turns(tmp_path: Path) -> None:
    class WithTools(trl.GRPOTrainer):  # as TRL sets them before the trainer is made
        def create_accelerator_and_postprocess(self) -> None:
            self.tools = [print]
            super().create_accelerator_and_postprocess()

    of = (WithTools, trl.GRPOConfig)
    with pytest.raises(ConfigError, match=r"under mesh.pp = 1, mesh.tp = 1 and sharding.stage = 3"):
        sw.simulate(2, lambda channel: made(tmp_path, PLANS["stage 3"], channel, of=of))


def test_ranks_share_the_rows_of_a_last_round_evenly() -> None:
    first = list(range(4))
    assert [shared_rows([8, 9, 10, 11], first, 2, own) for own in range(2)] == [[8, 9], [10, 11]]
    # Not evenly: the first ones come again, until the round is full.
    shares = [shared_rows([8, 9, 10, 11], first, 3, own) for own in range(3)]
    assert shares == [[8, 9, 10, 11], [0, 1, 2, 3], [0, 1, 2, 3]]
