"""Plans that models carry, beside adapters too, against the whole model; and rules that are wrong."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.formed import formed, linear
from tests.engine.refusals import raise_of_all
from tests.engine.tensor.cut_models import AnyRules, Rules, assert_cut_is_right, compute
from tests.oracle.program import adamw, seeded
from tests.refusals import Refusals

# The models compute in float32 here and there (norms, softmax, the loss), whatever they are given.
FLOAT32_INSIDE = 2e-6
SMALL: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_layers": 2, "max_position_embeddings": 64},
    **{"intermediate_size": 48, "ffn_hidden_size": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 12},
    **{"expert_ffn_hidden_size": 12, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "moe_topk": 2, "moe_num_experts": 4, "n_group": 1, "topk_group": 1},
    **{"n_shared_experts": 1, "moe_num_shared_experts": 1, "zero_expert_num": 2, "first_k_dense_replace": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "sliding_window": 8},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 8, "n_groups": 1, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Small values of what configurations have; each takes those that it knows."""


def tiny_model(model_type: str) -> nn.Module:
    """A model of this type with two layers, or one of each kind of layer."""
    import transformers as tf  # seconds, which to collect tests does not take

    kind = tf.CONFIG_MAPPING[model_type]
    standard: Any = kind()
    settings = {key: value for key, value in SMALL.items() if hasattr(standard, key)}
    if hasattr(standard, "kv_lora_rank"):
        settings["num_key_value_heads"] = 4  # what is compressed is expanded to as many heads as queries have
    for key in ("layer_types", "mlp_layer_types"):
        if listed := getattr(standard, key, None):
            kinds = list(dict.fromkeys(listed))
            settings["num_hidden_layers"] = max(2, len(kinds))
            settings[key] = (kinds * 2)[: settings["num_hidden_layers"]]
    config = kind(**settings)
    config._attn_implementation = config._experts_implementation = "eager"
    auto: Any = tf.AutoModelForCausalLM
    made: nn.Module = auto.from_config(config).eval()
    return made


def loss_of(model: nn.Module) -> torch.Tensor:
    """The model's own loss on a few tokens."""
    words = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    loss: torch.Tensor = model(input_ids=words, labels=words, use_cache=False).loss
    return loss.reshape(1)


AUTO = {"*": "auto"}
CARRIED: dict[str, AnyRules] = {
    "gemma2": "auto",  # an embedding that scales, a tie
    "phi3": "auto",  # everything gathered
    "gpt_neox": "auto",  # query, key and value of a head side by side
    "mixtral": "auto",
    "flex_olmo": "auto",
    "aria_text": "auto",  # experts whose weights are (inputs, outputs)
    "llama4_text": "auto",
    "granite_swa": "auto",  # a sink per head
    "nemotron_h": "auto",
    "deepseek_v3": "auto",
    "hy_v4": "auto",  # compressed keys, of which every head reads a part
    "longcat_flash": "auto",  # experts that do nothing
    "apertus": AUTO,  # activations with parameters between columns and rows: the plan says nothing of them
    "inkling_text": {**AUTO, "*.mlp.experts.gate_up_proj": "packed_colwise"},  # it cuts gates from what they gate
    # No plan: projections side by side in one transposed weight, heads counted by attributes, biases of heads.
    "gpt2": {
        **{"*.c_attn": "column(parts=3)", "*.attn": "heads(attributes=num_heads+split_size)"},
        **{"*.attn.c_proj": "row", "*.c_fc": "column", "*.mlp.c_proj": "row", "transformer.wte": "vocab"},
        "lm_head": "vocab",
    },
    "llama, other ends": {**AUTO, "lm_head": "replicate", "model.embed_tokens": "embedding_colwise"},
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_carried_plan_gives_what_the_whole_model_gives(name: str) -> None:
    """What it lacks is found out or added."""

    def make() -> nn.Module:
        return tiny_model(name.split(",")[0])

    assert_cut_is_right(make, CARRIED[name], loss_of, relative=FLOAT32_INSIDE, floor=1e-3)


def train(model_type: str, rules: Rules, num_ranks: int) -> list[float]:
    torch.manual_seed(0)
    built = tiny_model(model_type).train()
    tensor = sw.Tensor(rules=rules if num_ranks > 1 else None)
    words = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(1))

    def on_rank(channel: sw.Channel) -> list[float]:
        plan = sw.Plan(mesh=sw.Mesh(tp=num_ranks), tensor=tensor)
        engine = sw.parallelize(deepcopy(built), plan, optimizer=adamw, channel=channel)
        return [engine.step({"input_ids": words, "labels": words}).loss for _ in range(2)]

    return sw.simulate(num_ranks, on_rank)[0]


UNFIT: dict[str, tuple[str, Rules]] = {
    # It is for gates and values that alternate, as in its checkpoints.
    "inkling_text": (
        "'model.layers.0.mlp.experts' (InklingExperts) gives other numbers",
        {"*.gate_up_proj": "packed_colwise"},
    ),
    # Its plan cuts a map from whole values into heads by rows.
    "doge": ("'model.layers.0.self_attn' (DogeAttention) fails when it is cut", {"*.self_attn": "replicate"}),
}


@pytest.mark.parametrize("name", [*UNFIT, "lfm2", "lfm3"])
def test_a_carried_plan_that_does_not_fit_is_refused_and_can_be_put_right(name: str) -> None:
    """A tie of which a plan cuts one side (lfm2, lfm3) is cut on both."""
    said, cure = UNFIT.get(name, ("", {}))
    if said:
        with pytest.raises(ModelError) as caught:
            train(name, AUTO, 2)
        assert said in str(caught.value)
    assert train(name, {**AUTO, **cure}, 2) == pytest.approx(train(name, {}, 1), rel=FLOAT32_INSIDE)


# -- adapters beside linear maps (as the library peft makes them)


class Adapted(nn.Module):
    """A frozen map, and a small one of low rank beside it. is_mixed: which reads all inputs, and mixes all outputs."""

    def __init__(self, base: nn.Linear, rank: int = 3, *, is_mixed: bool = False) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.inputs: Any
        self.outputs: Any
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        for name, size in {"inputs": base.in_features, "outputs": base.out_features}.items():
            setattr(self, name, nn.Parameter(torch.randn(size, size)) if is_mixed else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.inputs is None else x @ self.inputs
        beside = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        out: torch.Tensor = self.base_layer(x) + 0.5 * beside
        return out if self.outputs is None else out @ self.outputs


TWO = formed(lambda net, x: net.down(torch.tanh(net.up(x))), up=linear(4, 9), down=linear(9, 4))
BY_HAND = {"up": "column", "down": "row"}


def adapted(*names: str, is_mixed: bool = False) -> nn.Module:
    """Two maps, these of them with adapters."""
    net: Any = TWO()
    for name in names:
        setattr(net, name, Adapted(getattr(net, name), is_mixed=is_mixed))
    return net  # type: ignore[no-any-return]


def run(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return out.square()


@pytest.mark.parametrize(("names", "num_ranks"), [(("up", "down"), 2), (("up",), 3), (("down",), 2)])
def test_the_rule_of_a_map_cuts_its_adapter_too(names: tuple[str, ...], num_ranks: int) -> None:
    cuts = assert_cut_is_right(lambda: adapted(*names), BY_HAND, run, num_ranks).decision.plan.cuts
    assert ("up.lora_B.default.weight" in cuts) == ("up" in names)
    assert ("down.lora_A.default.weight" in cuts) == ("down" in names)
    assert "down.lora_B.default.weight" not in cuts


def test_what_the_rules_of_an_adapter_and_of_its_map_sum_is_summed_once() -> None:
    """As with the carried plan of a model whose embedding has an adapter, and whose head is tied to the map in it."""
    rules = {**BY_HAND, "up.base_layer": "column", "down.base_layer": "row"}
    assert_cut_is_right(lambda: adapted("up", "down"), rules, run)


@pytest.mark.parametrize(("name", "other"), [("up", {"one.down.weight"}), ("down", {"one.up.weight", "one.up.bias"})])
def test_an_adapter_that_cannot_be_cut_is_whole_amid_what_is_cut(name: str, other: set[str]) -> None:
    carried = {f"{layer}.{each}": rule for layer in ("one", "two") for each, rule in BY_HAND.items()}
    make = formed(
        lambda net, x: net.two(net.one(x)),
        lambda net: vars(net).update(_tp_plan=carried),
        one=lambda: adapted(name, is_mixed=True),
        two=TWO,
    )
    plan = assert_cut_is_right(make, "auto", run).decision.plan
    assert f"one.{name}" in plan.left
    assert plan.cuts.keys() == {*other, "two.up.weight", "two.up.bias", "two.down.weight"}


def engine_with(make: Callable[[], nn.Module], rules: Any, *, tp: int = 2, call: str = "") -> Callable[[], object]:
    def on_rank(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(tp=tp), tensor=sw.Tensor(rules=rules))
        loss = lambda output, _: output.square().mean()  # noqa: E731
        engine = sw.parallelize(make(), plan, optimizer=adamw, loss=loss, channel=channel)
        if call:
            getattr(engine, call)({"x": torch.ones(2, 4)})

    return lambda: sw.simulate(tp, on_rank)


def refused_on_all_ranks(channel: sw.Channel) -> None:
    """The model stays as it is."""
    model, plan = seeded(TWO)(), sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"upp": "column", **BY_HAND}))
    try:
        sw.parallelize(model, plan, optimizer=adamw, channel=channel)
    finally:
        assert all(map(torch.equal, model.parameters(), seeded(TWO)().parameters()))


REFUSED = Refusals(
    "engine.tensor_rules",
    {
        "a name of nothing, on all ranks": lambda: raise_of_all(2, refused_on_all_ranks),
        "an adapter and its map in two ways": lambda: compute(
            lambda: adapted("up", "down"), run, 2, {**BY_HAND, "down.base_layer": "row(scatter=1)"}
        ),
        "an adapter of parts of a sequence": engine_with(
            lambda: adapted("down", is_mixed=True), {"up": "column(gather=1)", "down": "row(scatter=1)"}
        ),
        "a dim that is none": engine_with(TWO, {"up": "column", "down": "row(scatter=9)"}, call="step"),
        "a dim that is cut": engine_with(TWO, {"up": "column", "down": "row(scatter=1)"}, call="step"),
        "a name of nothing, on one rank too": engine_with(TWO, {"upp": "column", "down": "row"}, tp=1),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_rules_that_cannot_hold_are_refused(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"up": "column"}, r"in 'down' \(Linear, without a rule .* was given \(2, [45]\) and holds weight \(4, 9\)"),
        (
            {"down": "row"},
            r"in 'down' \(Linear, with the style 'row' .* was given \(2, 9\) and holds weight \(4, [45]\)"
            r"(?s:.*)The rules in it: 'down': row\.",
        ),
    ],
)
def test_an_error_of_a_cut_module_names_it_and_its_rules(rules: Rules, said: str, call: str) -> None:
    with pytest.raises(ModelError, match=f"fails when it is cut, and runs with whole parameters: mat1(?s:.*){said}"):
        engine_with(TWO, rules, call=call)()
