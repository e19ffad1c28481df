"""Callbacks of a Trainer that look at gradients, in `on_pre_optimizer_step`, see those of one process or are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.errors import OptimizerError
from shardwise.hf import Trainer, TrainingArguments

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(16 * 8).remainder(40).view(16, 8)]
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "report_to": "none",
}
DATA = sw.Mesh(dp_shard=2)
PLANS = {
    "one": sw.Plan(),
    **{f"stage {stage}": sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=stage)) for stage in (0, 1, 2, 3)},
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
}


def dropped(model: nn.Module) -> None:
    for name, each in model.named_parameters():
        if "lm_head" in name:
            each.grad = None


def replaced(model: nn.Module) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad = each.grad * 0.5


def masked(model: nn.Module) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad[:1] = 0


LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "masks": masked,
    "clips": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "replaces": replaced,
    "drops": dropped,
    "counts": lambda model: None,
    "zeroes": lambda model: [each.grad.zero_() for each in model.parameters()],  # type: ignore[union-attr]
}


def trained(kind: Any, arguments: Any, look: str, **given: Any) -> list[torch.Tensor]:
    class Looks(transformers.TrainerCallback):
        count = 0

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            Looks.count += 1
            LOOKS[look](objects["model"])

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, use_cache=False, **sizes))
    trainer = kind(model, arguments, train_dataset=ROWS, callbacks=[Looks()], **given)
    trainer.train()
    assert Looks.count == 3
    if kind is transformers.Trainer:
        return [each.detach() for each in model.parameters()]
    return list(sw.full_state_dict(trainer.engine).values())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("look", LOOKS)
def test_a_callback_sees_and_changes_the_gradients_of_one_process(look: str, plan: str, tmp_path: Path) -> None:
    mesh = PLANS[plan].mesh
    rows: Any = {"per_device_train_batch_size": 4 // mesh.num_data_ranks}
    optimizer: Any = {"optim": "sgd", "learning_rate": 1.0}
    alone = transformers.TrainingArguments(
        str(tmp_path), **SETTINGS, **optimizer, per_device_train_batch_size=4 // mesh.num_data_ranks,
        gradient_accumulation_steps=mesh.num_data_ranks,
    )  # fmt: skip
    expected = trained(transformers.Trainer, alone, look)

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        arguments = TrainingArguments(str(tmp_path), **SETTINGS, **optimizer, **rows)
        return trained(Trainer, arguments, look, plan=PLANS[plan], channel=channel)

    if plan in ("tp", "pp") and look not in ("counts", "drops"):
        with pytest.raises(OptimizerError, match=r"p\.grad of the model's parameters is whole on no rank"):
            sw.simulate(mesh.size, run)
        return
    values, *_ = sw.simulate(mesh.size, run)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(values, expected, strict=True))
