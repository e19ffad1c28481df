"""Models with adapters of peft train under every layout as in one process, with plans written for the base model."""

from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.engine.adapters.peft_models import (
    LAYOUTS,
    TURNS,
    adapted,
    batch,
    engine_of,
    plain_step,
    program,
    step,
    two_adapters,
)
from tests.oracle.comparison import assert_close, in_one_process
from tests.oracle.places import data_share, train
from tests.oracle.program import adamw

NEAR = 1e-5
"""Losses of transformers are computed in float32."""


def check(model: str, kind: str, plan: sw.Plan) -> None:
    case = program(model, kind)
    assert_close(train(case, plan), in_one_process(case, plan), relative=NEAR)


BASE_RULES = {
    **{"model.layers.*.self_attn": "heads", "model.layers.*.self_attn.[qkv]_proj": "column"},
    **{"model.layers.*.self_attn.o_proj": "row", "model.layers.*.mlp.gate_proj": "column"},
    **{"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"},
    **{"model.embed_tokens": "vocab", "lm_head": "vocab"},
}
BASE_STAGES = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}


@pytest.mark.parametrize("kind", ["everywhere", "whole", "tokens", "prompt"])
def test_a_plan_written_for_the_base_model_reaches_it(kind: str) -> None:
    """Rules, stages, units, precision and groups by the names that the model has without adapters."""
    plan = sw.Plan(
        mesh=sw.Mesh(pp=2, tp=2),
        merge=sw.Merge(microbatches=2),
        pipeline=sw.Pipeline(stages=BASE_STAGES | ({"prompt_encoder": 0} if kind == "prompt" else {})),
        tensor=sw.Tensor(rules=BASE_RULES),
        precision=sw.Precision(keep=("model.layers.0.mlp.up_proj.weight",)),
        activations=sw.Activations(checkpoint=("model.layers.1",)),
    )
    check("llama", kind, plan)

    def decided(channel: sw.Channel) -> tuple[set[str], list[str]]:
        groups = {"queries": "model.layers.*.self_attn.q_proj"} if kind != "prompt" else None
        decision = engine_of(channel, adapted("llama", kind), plan, groups=groups).tensor_decision
        return set(decision.plan.cuts), list(decision.left)

    cuts, left = sw.simulate(4, decided)[0]
    around = "base_model.model.layers.0" if kind == "prompt" else "base_model.model.model.layers.0"
    assert f"{around}.self_attn.q_proj{'.base_layer' if kind != 'prompt' else ''}.weight" in cuts
    if kind == "everywhere":
        assert {f"{around}.mlp.up_proj.lora_B.default.weight", f"{around}.mlp.down_proj.lora_A.default.weight"} <= cuts
    if kind == "whole":  # the copy that is trained, and the original that takes its place without adapters
        head = "base_model.model.lm_head"
        assert {f"{head}.modules_to_save.default.weight", f"{head}.original_module.weight"} <= cuts
    assert left == (["base_model.model.model.embed_tokens"] if kind == "tokens" else [])


@pytest.mark.parametrize(("first", "second"), [("stage 3", "tp"), ("tp", "pp"), ("pp", "stage 3")])
def test_adapters_take_turns_around_a_save_and_are_left_out(first: str, second: str, tmp_path: Path) -> None:
    """`set_adapter` between steps, and `disable_adapter` around an evaluation. Each has the state of its own steps."""
    given, names = batch("llama"), [*TURNS, "two", "one"]
    model = two_adapters()
    optimizer, expected = adamw(list(model.parameters())), []
    for name in names:
        model.set_adapter(name)
        expected.append(plain_step(model, optimizer, given))
        with torch.no_grad(), model.disable_adapter():
            expected.append(model.eval()(**given).loss.item())

    def turns(channel: sw.Channel, plan: sw.Plan, names: list[str], loads: bool) -> list[float]:
        model, found = two_adapters(), []
        model.base_model.set_adapter(["one", "two"])  # both have a place for their state
        engine = engine_of(channel, model, plan)
        if loads:
            sw.load(tmp_path / "run", engine)
        for name in names:
            model.set_adapter(name)
            found.append(step(engine, given, plan, channel))
            with model.disable_adapter():
                found.append(engine.evaluate(data_share(given, plan.mesh, channel.rank)).loss)
        if not loads:
            sw.save(tmp_path / "run", engine)
        return found

    before = sw.simulate(2, partial(turns, plan=LAYOUTS[first], names=names[:4], loads=False))
    after = sw.simulate(2, partial(turns, plan=LAYOUTS[second], names=names[4:], loads=True))
    for one, other in zip(before, after, strict=True):
        assert one + other == pytest.approx(expected, rel=1e-6)
