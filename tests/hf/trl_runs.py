"""Trainers of TRL, plain in one process and under plans: of given answers, and of answers that they generate.

Where a trainer generates, the plain one has the rows of all data ranks in each microbatch, as TRL gathers them. What is
fixed in both: the draws, which follow from the place of a row among the rows of all ranks.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset

import shardwise as sw
from shardwise.hf import trainer_class
from tests.hf.example_tasks import llama, tokenizer
from tests.hf.tiny_trainers import logged

LAYERS = {
    f"model.layers.*.{name}": "row" if name in ("self_attn.o_proj", "mlp.down_proj") else "column"
    for name in (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
    )
}
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
SETTINGS: dict[str, Any] = {
    **{"use_cpu": True, "bf16": False, "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1},
    **{"disable_tqdm": True, "report_to": "none", "learning_rate": 1e-2},
}
"""Of all trainers here."""


def words(numbers: np.random.Generator, most: int) -> str:
    return " ".join(f"w{each}" for each in numbers.integers(0, 29, numbers.integers(2, most)))


def rows(*names: str) -> Dataset:
    numbers = np.random.default_rng(0)
    return Dataset.from_list([{name: words(numbers, 6) + " " for name in names} for _ in range(16)])


def talks() -> Dataset:
    """Prompts and answers, by turns."""
    numbers = np.random.default_rng(0)
    turns = ("user", "assistant", "user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": words(numbers, 4)} for role in turns]} for _ in range(16)]
    )


def talking_tokenizer() -> Any:
    made = copy.deepcopy(tokenizer())
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} [EOS] {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    return made


def build() -> Any:
    torch.manual_seed(0)
    return llama()


def as_of(kind: Any, plan: sw.Plan | None, channel: sw.Channel | None) -> Callable[..., Any]:
    """The class of a trainer, plain or under a plan."""
    if plan is None:
        return kind  # type: ignore[no-any-return]
    return lambda **given: trainer_class(kind)(**given, plan=plan, channel=channel)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole weights, on each rank."""
    engine = getattr(trainer, "engine", None)
    with nullcontext() if engine is None else engine.whole(optimizer=False):
        return {name: each.clone() for name, each in trainer.model.state_dict().items()}


# Of given answers ---------------------------------------------------------------------------------------------------


def of_answers(
    kind: str,
    folder: Path,
    plan: sw.Plan | None = None,
    channel: sw.Channel | None = None,
    *,
    k: int = 2,
    lora: dict[str, Any] | None = None,
    dataset: Dataset | None = None,
    num_held_out: int = 5,
    **settings: Any,
) -> Any:
    """A trainer of given answers. k: microbatches of one process."""
    base, config, names = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, ["prompt", "completion"]),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, ["prompt", "chosen", "rejected"]),
    }[kind]
    is_talk = settings.get("assistant_only_loss")
    if dataset is None:
        dataset = talks() if is_talk else rows(*(["text"] if settings.get("packing") else names))
    more: dict[str, Any] = {}
    if lora is not None:
        torch.manual_seed(0)
        more["peft_config"] = peft.LoraConfig(**lora)
    elif kind == "dpo" and not settings.get("precompute_ref_log_probs"):
        more["ref_model"] = reference()
    given = {
        **{"max_steps": 3, "adam_epsilon": 1e-4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
        **{"gradient_accumulation_steps": k // (1 if plan is None else plan.mesh.num_data_ranks), "max_length": 16},
    }
    return as_of(base, plan, channel)(
        model=build(),
        args=config(output_dir=str(folder), **{**SETTINGS, **given, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(num_held_out)),
        processing_class=talking_tokenizer() if is_talk else tokenizer(),
        **more,
    )


def trained(*given: Any, **settings: Any) -> Any:
    """What a trainer of given answers logs, and its weights."""
    trainer = of_answers(*given, **settings)
    trainer.train()
    return logged(trainer), weights_of(trainer)


def reference() -> Any:
    """A model with other weights."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


# Of answers that they generate --------------------------------------------------------------------------------------


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


def with_adapter() -> Any:
    torch.manual_seed(1)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(build(), adapter)


def referring_to(folder: Path) -> Callable[[], Any]:
    """A model that was read from a folder, which has other weights by now: the reference."""
    reference().save_pretrained(folder)

    def read() -> Any:
        model = build()
        model.config._name_or_path = str(folder)  # where TRL looks for the reference
        return model

    return read


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
    build: Callable[[], Any] = build,
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
        **{"max_steps": 2, "adam_epsilon": 1e-3, "per_device_train_batch_size": size},
        **{"per_device_eval_batch_size": size, "num_generations": 2, "max_completion_length": 4},
        **{"generation_kwargs": {"do_sample": False}},
    }
    args = config(output_dir=str(folder), **{**SETTINGS, **settings, **changed})
    # Now, for the arguments of simulated ranks know of one process.
    args.num_generations = num_generations
    trainer = as_of(kind, plan, channel)(
        model=model,
        args=args,
        train_dataset=rows("prompt"),
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        reward_funcs=rewarding,
    )
    return trainer


def outcome(folder: Path, *given: Any, **changed: Any) -> tuple[Any, Any, Any]:
    """What a training logs, its last prompts, answers, rewards and advantages, and its weights."""
    trainer = made(folder, *given, **changed)
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    logs = [
        {name: value for name, value in each.items() if "time" not in name and "second" not in name}
        for each in trainer.state.log_history
    ]
    seen = {name: list(trainer._logs[name]) for name in ("prompt", "completion", "advantages")}
    seen |= {name: list(each) for name, each in trainer._logs["rewards"].items()}
    return logs, seen, weights_of(trainer)


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
