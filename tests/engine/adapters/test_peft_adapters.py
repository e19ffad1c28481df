"""Adapters of peft under plans for the base model, saved alone and loaded under another layout or by peft; merged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import Recorded
from tests.engine.adapters.peft_models import LAYOUTS, adapted, base, batch, engine_of, logits, program, step
from tests.engine.refusals import same_error_everywhere
from tests.oracle.comparison import assert_close, in_one_process
from tests.oracle.places import train
from tests.refusals import Refusals

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied"),
]

OTHER = {"stage 3": "tp", "tp": "pp", "pp": "stage 1", "all": "stage 3"}


def trained(channel: sw.Channel, plan: sw.Plan, kind: str, name: str = "llama", *, steps: int = 2) -> sw.Engine:
    engine = engine_of(channel, adapted(name, kind), plan)
    for _ in range(steps):
        step(engine, batch(name), plan, channel)
    return engine


def with_values(model: Any, values: dict[str, torch.Tensor]) -> Any:
    known = model.state_dict()
    # Without strict: what modules share has one name here.
    model.load_state_dict({name: each for name, each in values.items() if name in known}, strict=False)
    return model


@pytest.mark.parametrize(
    ("model", "kind", "layout"),
    [
        *[("llama", "everywhere", "all"), ("llama", "prompt", "stage 3"), ("gpt2", "whole", "tp")],
        *[("llama", "rotation", "stage 3"), ("llama", "shared", "tp")],
        *[("t5", "ia3", "pp"), ("llama", "tokens", "stage 3"), ("bert", "dora", "tp"), ("gpt2", "embedding", "pp")],
    ],
)
def test_adapters_are_peft_s_own_files_and_merge_as_peft_merges(
    model: str, kind: str, layout: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    plan = LAYOUTS[layout]
    alone, merged = tmp_path / "adapters", tmp_path / "merged"

    def write(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = trained(channel, plan, kind, model)
        sw.save_adapters(engine, alone)
        if kind != "prompt":
            sw.save_merged(engine, merged, max_shard_bytes=2000)
        return dict(sw.full(engine))

    values, *_ = sw.simulate(plan.mesh.size, write)
    expected = with_values(adapted(model, kind), values)
    expected.save_pretrained(tmp_path / "by peft")
    names = sorted(path.name for path in (tmp_path / "by peft").iterdir())
    assert sorted(path.name for path in alone.iterdir()) == names
    file = "adapter_model.safetensors"
    assert (alone / file).read_bytes() == (tmp_path / "by peft" / file).read_bytes()
    read = PeftModel.from_pretrained(base(model), alone).double()
    if kind == "prompt":  # peft makes its embedding in float32
        torch.testing.assert_close(logits(read, model), logits(expected, model), rtol=0, atol=1e-6)
    else:
        assert torch.equal(logits(read, model), logits(expected, model))

    def go_on(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = engine_of(channel, adapted(model, kind), LAYOUTS[OTHER[layout]])
        sw.load_adapters(engine, alone)
        return dict(sw.full(engine))

    for got in sw.simulate(LAYOUTS[OTHER[layout]].mesh.size, go_on):
        assert all(torch.equal(each, values[name]) for name, each in got.items())
    if kind == "prompt":
        return
    whole = expected.merge_and_unload()
    made = type(whole).from_pretrained(merged, dtype=torch.float64)
    assert len(list(merged.glob("model-*.safetensors"))) > 1
    assert made.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(each, made.state_dict()[name]) for name, each in whole.state_dict().items())


def test_only_adapters_travel(tmp_path: Path) -> None:
    """Counted: a save sends fewer bytes than the base model has, though stage 3 has cut it over the ranks."""
    plan = LAYOUTS["stage 3"]
    num_bytes = sum(each.numel() * 8 for each in base("llama").parameters())
    num_adapter_bytes = sum(each.numel() * 8 for each in adapted("llama", "lora").parameters() if each.requires_grad)

    def sent(channel: sw.Channel) -> int:
        recorded = Recorded(channel)
        engine = trained(recorded, plan, "lora", steps=1)
        before = len(recorded.calls)
        sw.save_adapters(engine, tmp_path / "adapters")
        moves = [call for call in recorded.calls[before:] if call.operation != "exchange"]
        return sum(call.bytes_received for call in moves)

    assert max(sw.simulate(2, sent)) <= num_adapter_bytes < num_bytes / 3


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
    case = program("llama", kind)
    # Losses of transformers are computed in float32.
    assert_close(train(case, plan), in_one_process(case, plan), relative=1e-5)

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


def of(kind: str, call: Callable[[sw.Engine, Path], object]) -> Callable[[Path], None]:
    """A call on two ranks, beside a file and the adapters of another model."""

    def refused(folder: Path) -> None:
        def on(kind: str, call: Callable[[sw.Engine, Path], object]) -> Callable[[sw.Channel], None]:
            def run(channel: sw.Channel) -> None:
                call(engine_of(channel, adapted("llama", kind) if kind else base("llama"), LAYOUTS["stage 1"]), folder)

            return run

        sw.simulate(2, on("lora", lambda engine, folder: sw.save_adapters(engine, folder / "lora")))
        (folder / "file").write_text("")
        raise same_error_everywhere(2, on(kind, call))

    return refused


def new_parameters() -> None:
    """An attention of torch, into which peft merges an adapter in each forward."""
    from peft import LoraConfig, get_peft_model

    model: Any = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["self_attn"]))
    sw.simulate(1, lambda channel: engine_of(channel, made, sw.Plan()))


REFUSED = Refusals(
    "engine.adapters",
    {
        "no adapters": of("", lambda engine, folder: sw.save_adapters(engine, folder / "x")),
        "an adapter of no name": of(
            "lora", lambda engine, folder: sw.save_adapters(engine, folder / "x", adapters=["b"])
        ),
        "a file in the way": of("lora", lambda engine, folder: sw.save_adapters(engine, folder / "file")),
        "nothing there": of("lora", lambda engine, folder: sw.load_adapters(engine, folder / "none")),
        "another kind": of("ia3", lambda engine, folder: sw.load_adapters(engine, folder / "lora")),
        "other shapes": of("everywhere", lambda engine, folder: sw.load_adapters(engine, folder / "lora")),
        "a prompt": of("prompt", lambda engine, folder: sw.save_merged(engine, folder / "x")),
        "a bias": of("bias", lambda engine, folder: sw.save_merged(engine, folder / "x")),
        "something there": of("lora", lambda engine, folder: sw.save_merged(engine, folder / "lora")),
        "parameters that are new whenever they are listed": new_parameters,
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_all_ranks(case: str) -> None:
    REFUSED.check(case)
