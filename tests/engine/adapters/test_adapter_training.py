"""Models with adapters of peft train under every layout as in one process, with plans written for the base model."""

from typing import Any

import pytest
import torch

import shardwise as sw
from tests.covering import pairwise
from tests.engine.adapters.peft_models import BUILDERS, ROWS, Found, adamw, adapted, base, batch, plain

LAYOUTS = {
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=2)),
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2, partition="whole")),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
    "all": sw.Plan(
        mesh=sw.Mesh(pp=2, dp_shard=2, tp=2), merge=sw.Merge(microbatches=2), tensor=sw.Tensor(rules="auto")
    ),
}
KINDS = ["lora", "everywhere", "dora", "whole", "tokens", "embedding", "ia3", "prompt"]


def share(given: dict[str, torch.Tensor], plan: sw.Plan, rank: int) -> dict[str, torch.Tensor]:
    rows = ROWS // plan.mesh.dp_shard
    at = plan.mesh.data_rank(rank) * rows
    return {name: each[at : at + rows] for name, each in given.items()}


def ours(channel: sw.Channel, plan: sw.Plan, model: Any, given: dict[str, torch.Tensor]) -> Found:
    model.train()
    engine = sw.parallelize(model, plan, optimizer=adamw, channel=channel)
    losses = [engine.step(share(given, plan, channel.rank)).loss for _ in range(3)]
    return losses, dict(sw.full(engine))


def assert_same(got: Found, expected: Found) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-6)  # transformers computes losses in float32
    for name, each in expected[1].items():
        torch.testing.assert_close(got[1][name], each, rtol=1e-5, atol=1e-6, msg=name)


def check(model: str, kind: str, layout: str) -> None:
    plan, given = LAYOUTS[layout], batch(model)
    parts = plan.mesh.dp_shard * plan.merge.microbatches
    expected = plain(adapted(model, kind), given, parts=parts)
    for got in sw.simulate(plan.mesh.size, lambda channel: ours(channel, plan, adapted(model, kind), given)):
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("model", "kind", "layout"),
    [
        *[("llama", "dora", "all"), ("gpt2", "everywhere", "tp"), ("bert", "whole", "pp"), ("t5", "ia3", "tp")],
        *[("vit", "lora", "stage 3"), ("llama", "tokens", "tp"), ("gpt2", "embedding", "stage 2")],
        *[("llama", "prompt", "pp"), ("bert", "everywhere", "stage 0"), ("gpt2", "dora", "tp")],
    ],
)
def test_a_model_with_adapters_trains_as_in_one_process(model: str, kind: str, layout: str) -> None:
    check(model, kind, layout)


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning")
@pytest.mark.parametrize(("model", "kind", "layout"), pairwise(list(BUILDERS), KINDS, list(LAYOUTS)))
def test_every_kind_of_adapter_in_every_model(model: str, kind: str, layout: str) -> None:
    if model == "vit" and kind in ("tokens", "embedding", "prompt"):
        kind = "lora"  # it has no tokens
    check(model, kind, layout)


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
    stages = BASE_STAGES | ({"prompt_encoder": 0} if kind == "prompt" else {})
    plan = sw.Plan(
        mesh=sw.Mesh(pp=2, tp=2),
        merge=sw.Merge(microbatches=2),
        pipeline=sw.Pipeline(stages=stages),
        tensor=sw.Tensor(rules=BASE_RULES),
        precision=sw.Precision(keep=("model.layers.0.mlp.up_proj.weight",)),
        activations=sw.Activations(checkpoint=("model.layers.1",)),
    )
    given = batch("llama")

    def both(channel: sw.Channel) -> tuple[Found, set[str], dict[str, str]]:
        model = adapted("llama", kind).train()
        groups = {"queries": "model.layers.*.self_attn.q_proj"} if kind != "prompt" else None
        engine = sw.parallelize(model, plan, optimizer=adamw, channel=channel, groups=groups)
        found = [engine.step(given).loss for _ in range(3)], dict(sw.full(engine))
        return found, set(engine.tensor_decision.plan.cuts), dict(engine.tensor_decision.left)

    expected = plain(adapted("llama", kind), given, parts=2)
    (got, cuts, left), *_ = sw.simulate(4, both)
    assert_same(got, expected)
    around = "base_model.model.layers.0" if kind == "prompt" else "base_model.model.model.layers.0"
    inside = ".base_layer" if kind != "prompt" else ""
    assert f"{around}.self_attn.q_proj{inside}.weight" in cuts
    if kind == "everywhere":
        assert {f"{around}.mlp.up_proj.lora_B.default.weight", f"{around}.mlp.down_proj.lora_A.default.weight"} <= cuts
    if kind == "whole":  # the copy that is trained, and the original that takes its place without adapters
        head = "base_model.model.lm_head"
        assert {f"{head}.modules_to_save.default.weight", f"{head}.original_module.weight"} <= cuts
    assert list(left) == (["base_model.model.model.embed_tokens"] if kind == "tokens" else [])


def test_what_an_adapter_cannot_cut_is_whole_and_listed() -> None:
    def decided(channel: sw.Channel) -> dict[str, str]:
        engine = sw.parallelize(adapted("llama", "dora"), LAYOUTS["tp"], optimizer=adamw, channel=channel)
        return dict(engine.tensor_decision.left)

    left, _ = sw.simulate(2, decided)
    assert {name.rpartition(".")[2] for name in left} == {"o_proj", "down_proj"}
    assert "lora_magnitude_vector" in left["base_model.model.model.layers.0.self_attn.o_proj"]


def two_adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    model = base("llama")
    torch.manual_seed(1)
    first = LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    second = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    made = get_peft_model(model, first, adapter_name="one")
    made.add_adapter("two", second)
    return made.double()


TURNS = ["one", "two", "two", "one"]


@pytest.mark.parametrize("layout", ["stage 3", "pp", "tp"])
def test_adapters_take_turns_and_are_left_out(layout: str) -> None:
    """`set_adapter` between steps, and `disable_adapter` around an evaluation."""
    plan, given = LAYOUTS[layout], batch("llama")

    def in_one_process() -> list[float]:
        model = two_adapters()
        optimizer = adamw(list(model.parameters()))
        found = []
        for name in TURNS:
            model.set_adapter(name)
            optimizer.zero_grad()
            loss = model.train()(**given).loss
            loss.backward()
            optimizer.step()
            with torch.no_grad(), model.disable_adapter():
                found += [loss.item(), model.eval()(**given).loss.item()]
        return found

    def under_a_plan(channel: sw.Channel) -> list[float]:
        model = two_adapters()
        engine = sw.parallelize(model, plan, optimizer=adamw, channel=channel)
        own = share(given, plan, channel.rank)
        found = []
        for name in TURNS:
            model.set_adapter(name)
            found.append(engine.step(own).loss)
            with model.disable_adapter():
                found.append(engine.evaluate(own).loss)
        return found

    for got in sw.simulate(2, under_a_plan):
        assert got == pytest.approx(in_one_process(), rel=1e-6)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_frozen_parameters_have_no_state_and_are_not_reduced(layout: str) -> None:
    plan, given = LAYOUTS[layout], batch("llama")
    trained = {name: each.numel() for name, each in adapted("llama", "lora").named_parameters() if each.requires_grad}
    total = sum(each.numel() for each in adapted("llama", "lora").parameters())
    assert sum(trained.values()) < total / 3

    def counted(channel: sw.Channel) -> tuple[int, int, int, int]:
        engine = sw.parallelize(adapted("llama", "lora"), plan, optimizer=adamw, channel=channel)
        engine.step(share(given, plan, channel.rank))
        states = {piece.name: each for piece, each in engine.state().items() if piece.name.startswith("optimizer/")}
        assert {name.split("/")[1] for name in states} <= trained.keys()
        assert {piece.name for piece in engine.gradients()} <= trained.keys()
        moments = sum(each.numel() for name, each in states.items() if name.endswith("exp_avg"))
        footprint = engine.footprint()
        return moments, footprint.gradient_bytes, footprint.owned_elements, engine.traffic().reduce_bytes

    all_counts = sw.simulate(plan.mesh.size, counted)
    num_trained = sum(trained.values())
    copies = plan.mesh.dp_shard if plan.sharding.stage == 0 else 1
    # What is whole along tp has its state on each of its ranks: `lora_A` beside columns.
    whole = sum(size for name, size in trained.items() if "lora_A" in name) if plan.mesh.tp > 1 else 0
    assert sum(moments for moments, *_ in all_counts) == (num_trained + whole) * copies
    for _, gradient_bytes, owned, sent in all_counts:
        assert owned <= num_trained
        assert gradient_bytes <= num_trained * 8 + 128 * len(trained) < total * 8 / 2  # each begins aligned
        assert sent <= num_trained * 8 * 2 * plan.merge.microbatches
