"""Training goes on from what other programs saved, under any layout, with the losses that these programs had."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.checkpoint.deepspeed import model as words
from tests.checkpoint.foreign_files import small_program as small
from tests.checkpoint.formats.known_formats import DEEPSPEED, FILES, MEGATRON, deepspeed_reference, megatron_reference
from tests.checkpoint.megatron import cases as megatron
from tests.checkpoint.megatron.hub import rewrite_of, untrained

PLANS = {
    "one rank": sw.Plan(),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"layers.*.up": "column", "layers.*.down": "row"})),
    "auto": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
}
Parameters = Iterable[torch.nn.Parameter]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A program that saved, and went on. Rates and decays are of the save; the engine begins with others."""

    path: Path
    losses: list[float]
    layout: str
    model: Callable[[], Any]
    groups: Callable[[Any, Parameters], Any]
    batch: Callable[[int], dict[str, torch.Tensor]]
    loss: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]
    compute: str | None = None
    rewrite: sw.Rewrite | None = None
    rounds: float = 1e-6
    """How far losses differ: in float32 by the order of sums, in 16 bits by what the program rounds otherwise."""


def of_small(name: str, layout: str) -> Recorded:
    net = sw.Rewrite("net.$PART.weight -> $PART.weight\nnet.$PART.bias -> $PART.bias")
    return Recorded(
        path=FILES / name,
        losses=json.loads((FILES / "losses.json").read_text())[name],
        layout=layout,
        model=small.make_model,
        groups=lambda model, parameters: parameters,
        batch=lambda step: dict(zip(("input", "y"), small.batch(step), strict=True)),
        loss=lambda output, rows: small.loss_of(output, rows["y"]),
        rewrite=net if "lightning" in name else None,
    )


def of_deepspeed(name: str, layout: str, has: str) -> Recorded:
    dtype = next(each for each in name.split("-") if each in ("fp32", "bf16", "fp16"))
    return Recorded(
        path=DEEPSPEED / name,
        losses=deepspeed_reference(name)[1],
        layout=layout,
        model=lambda: words.words_model(tied="tied" in has, frozen="frozen" in has, seed=5),
        groups=lambda model, parameters: words.groups_of(model) if "groups" in has else trained(parameters),
        batch=words.batch_of,
        loss=words.loss_of,
        compute={"fp32": None, "bf16": "bfloat16", "fp16": "float16"}[dtype],
        rounds=1e-6 if dtype == "fp32" else 1e-3,
    )


def of_megatron(name: str, layout: str) -> Recorded:
    case = megatron.CASES[name]

    def batch(step: int) -> dict[str, torch.Tensor]:
        rows = megatron.batch_of(step)
        return {"input_ids": rows["input"], "target": rows["target"]}

    return Recorded(
        path=MEGATRON / name,
        losses=megatron_reference(name)["losses"].tolist(),
        layout=layout,
        model=lambda: untrained(case.model),
        groups=lambda model, parameters: by_dims(parameters),
        batch=batch,
        loss=lambda output, rows: torch.nn.functional.cross_entropy(
            output.logits.float().flatten(0, 1), rows["target"].flatten()
        ),
        compute="bfloat16" if case.bf16 else None,
        rewrite=rewrite_of(case.model),
        rounds=3e-4 if case.bf16 else 1e-6,
    )


def trained(parameters: Parameters) -> list[torch.nn.Parameter]:
    return [each for each in parameters if each.requires_grad]


def by_dims(parameters: Parameters) -> list[dict[str, Any]]:
    """Groups as Megatron has them."""
    held = list(parameters)
    matrices = {"params": [each for each in held if each.ndim > 1], "weight_decay": 0.7}
    return [matrices, {"params": [each for each in held if each.ndim == 1], "weight_decay": 0.6}]


RECORDED = [
    of_small("single/plain.pt", "stage 3"),
    of_small("single/legacy.pth", "pp"),
    of_small("full_state.pt", "stage 3"),
    of_small("accelerate_bin", "pp"),
    of_small("lightning.ckpt", "stage 3"),
    of_small("fsdp1_dcp", "pp"),
    of_small("fsdp2_dcp", "stage 3"),
    of_deepspeed("z0-fp32-1", "stage 3", ""),
    of_deepspeed("z1-fp32-1", "pp", "tied groups"),
    of_deepspeed("z2-fp32-2", "one rank", ""),
    of_deepspeed("z3-fp32-4", "tp", "tied frozen groups"),
    of_deepspeed("z0-bf16-2", "one rank", "frozen"),
    of_deepspeed("z1-fp16-3", "stage 3", "tied frozen"),
    of_deepspeed("z2-bf16-4", "pp", "tied frozen groups"),
    of_deepspeed("universal-z3-bf16-3", "one rank", "frozen groups"),
    of_megatron("llama-1", "auto"),
    of_megatron("llama-4-tp-model-space", "stage 3"),
    of_megatron("gpt-1", "one rank"),
    of_megatron("qwen2-2-pp", "pp"),
    of_megatron("qwen3-4-tp-pp", "one rank"),
    of_megatron("llama-bf16-2-tp", "stage 3"),
]


@pytest.mark.filterwarnings("ignore::shardwise.errors.UnderflowWarning")
@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case.path.name}-{case.layout}")
def test_training_goes_on_with_the_losses_of_the_program_that_saved(case: Recorded) -> None:
    plan = replace(PLANS[case.layout], precision=sw.Precision(compute=case.compute))

    def go_on(channel: sw.Channel) -> list[float]:
        model = case.model()
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(case.groups(model, parameters), lr=0.5, weight_decay=0.7),
            loss=case.loss,
            channel=channel,
        )
        # What is frozen was saved in 16 bits, and is kept in 32 here.
        loaded = sw.load(case.path, engine, rewrite=case.rewrite, cast=case.compute is not None, channel=channel)
        assert all("frozen" in each for each in loaded.report.casts)
        ranks = plan.mesh.dp_shard
        return [
            engine.step({key: each.chunk(ranks)[channel.rank % ranks] for key, each in case.batch(step).items()}).loss
            for step in range(3, 6)
        ]

    for losses in sw.simulate(plan.mesh.size, go_on):
        assert losses == pytest.approx(case.losses, rel=case.rounds)
        if (case.path.name, case.layout) == ("z2-fp32-2", "one rank"):
            assert losses == case.losses
