"""`rules="auto"` for models that carry no plan: what is inferred is right, and what is left whole has a reason."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.engine.samples import sample_for
from shardwise.engine.tensor.auto.rehearsal import RehearsalError, rehearse
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.formed import formed, linear, one_after_another
from tests.engine.tensor.cut_models import AnyRules, Run, assert_cut_is_right
from tests.refusals import Refusals

WIDTH, INNER, HEADS = 16, 24, 4
WORDS = (torch.arange(24).view(4, 6) * 5 + torch.arange(4)[:, None]) % 11
Block = Callable[[], nn.Module]
sgd = partial(torch.optim.SGD, lr=0.1)


def feed(between: Callable[[Any, torch.Tensor], torch.Tensor], *prepare: Any, up: int = INNER, **parts: Any) -> Block:
    """Two linear maps with something between."""

    def feed_forward(net: Any, hidden: torch.Tensor) -> Any:
        return net.down(between(net, net.up(hidden)))

    return formed(feed_forward, *prepare, up=linear(WIDTH, up), down=linear(INNER, WIDTH), **parts)


def read_by(way: Callable[[Any, torch.Tensor, torch.Tensor], Any], inner: int = INNER, **parts: Any) -> Block:
    """`way` is given the input, and what `up` makes of it."""

    def reading(net: Any, hidden: torch.Tensor) -> Any:
        return way(net, hidden, torch.relu(net.up(hidden)))

    return formed(reading, up=linear(WIDTH, inner), down=linear(inner, WIDTH), **parts)


def centred(hidden: torch.Tensor) -> torch.Tensor:
    return hidden - hidden.mean(-1, keepdim=True)


def centred_in_training(net: Any, hidden: torch.Tensor) -> torch.Tensor:
    hidden = F.dropout(torch.relu(hidden), 0.1, net.training)
    return centred(hidden) if net.training else hidden


def gated(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(gate) * value


def fused(order: str, *, is_counted: bool = False) -> Block:
    """Attention of one map, whose outputs lie by query, key and value (p), head (h) and dim of a head (d)."""

    def attention(net: Any, hidden: torch.Tensor) -> Any:
        batch, length, _ = hidden.shape
        sizes = {"p": 3, "h": net.num_heads if is_counted else -1, "d": WIDTH // HEADS}
        split = net.qkv(hidden).view(batch, length, *(sizes[each] for each in order))
        query, key, value = split.permute(2 + order.index("p"), 0, 2 + order.index("h"), 1, 2 + order.index("d"))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return net.out(mixed.transpose(1, 2).reshape(batch, length, -1))

    return formed(attention, num_heads=lambda: HEADS, qkv=linear(WIDTH, 3 * WIDTH), out=linear(WIDTH, WIDTH))


def heads(num_groups: int = HEADS, *, is_sloped: bool = False) -> Block:
    """Attention whose view lets the positions take what heads lack, without an error.

    is_sloped: with a slope for each head, computed from how many there are: other slopes on each rank.
    """

    def attention(net: Any, hidden: torch.Tensor) -> Any:
        batch, length, _ = hidden.shape
        taken = length if is_sloped else -1
        query, key, value = (
            each(hidden).view(batch, taken, count, WIDTH // HEADS).transpose(1, 2)
            for each, count in ((net.q, net.num_heads), (net.k, net.num_kv_heads), (net.v, net.num_kv_heads))
        )
        repeats = net.num_heads // net.num_kv_heads
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        weights = query @ key.transpose(-1, -2) / 2
        if is_sloped:
            slopes = 2.0 ** -torch.arange(1, net.num_heads + 1, dtype=hidden.dtype)
            weights = weights + slopes[:, None, None] * torch.arange(length, dtype=hidden.dtype)
        return net.out((weights.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1))

    counts = {"num_heads": lambda: HEADS, "num_kv_heads": lambda: num_groups}
    narrow = linear(WIDTH, num_groups * WIDTH // HEADS)
    return formed(attention, **counts, q=linear(WIDTH, WIDTH), k=narrow, v=narrow, out=linear(WIDTH, WIDTH))


def around(block: Block, *, reads_by_hand: bool = False, **head: Any) -> Block:
    """The block with a residual and a norm, between an embedding and a head."""

    def model(net: Any, words: torch.Tensor) -> Any:
        hidden = net.embed(words)
        hidden = hidden + net.block(net.norm(hidden))
        return F.linear(hidden, net.embed.weight) if reads_by_hand else net.head(hidden)

    def tie(net: Any) -> None:
        if not head.get("bias", True):
            net.head.weight = net.embed.weight

    embed, norm = partial(nn.Embedding, 11, WIDTH), partial(nn.LayerNorm, WIDTH)
    return formed(model, tie, embed=embed, norm=norm, block=block, head=linear(WIDTH, 11, **head))


def shown(net: Any, words: torch.Tensor) -> Sequence[torch.Tensor]:
    """What would be cut is given with the result."""
    inner = torch.relu(net.up(net.norm(net.embed(words))))
    return net.down(inner), inner


PLAIN = feed(lambda net, hidden: torch.relu(hidden))
SHOWN = formed(
    shown,
    embed=partial(nn.Embedding, 11, WIDTH),
    norm=partial(nn.LayerNorm, WIDTH),
    up=linear(WIDTH, INNER),
    down=linear(INNER, 11),
)


def loss_of(output: Any) -> torch.Tensor:
    """Depends on all elements of what the model gives first."""
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    weights = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype).view(first.shape)
    return (first * weights).square().mean()


def on_words(model: nn.Module) -> torch.Tensor:
    return loss_of(model(WORDS))


SAMPLE = {"row": torch.ones(1)}


def rules_of(
    make: Block,
    num_ranks: int = 2,
    *,
    rules: AnyRules = "auto",
    run: Run = on_words,
    near: float = 1e-9,
    sample: Any = SAMPLE,
) -> tuple[dict[str, str], dict[str, str]]:
    """The rules, and what is left whole, of a model that has the loss and the gradients of the uncut one."""

    def moved() -> nn.Module:
        """No value is a zero that hides something."""
        model = make().double()
        with torch.no_grad():
            for each in model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        return model

    decision = assert_cut_is_right(moved, rules, run, num_ranks, relative=near, sample=sample).decision
    return dict(decision.inferred), dict(decision.left)


CUT: dict[str, tuple[Block, dict[str, str]]] = {
    "a scale and a shift of features": (
        feed(
            lambda net, hidden: torch.tanh(hidden * net.scale + net.shift),
            scale=lambda: nn.Parameter(torch.linspace(0.5, 2.0, INNER)),
            shift=lambda: nn.Parameter(torch.linspace(-1.0, 1.0, INNER)),
        ),
        {"block.scale": "column(dim=0, groups=24)", "block.shift": "column(dim=0, groups=24)"},
    ),
    "gates beside values": (
        feed(lambda net, hidden: gated(*hidden.chunk(2, dim=-1)), up=2 * INNER),
        {"block.up": "column(parts=24+24, groups=24+24)"},
    ),
    "gates up to a number": (
        feed(
            lambda net, hidden: gated(hidden[..., : net.inner // 2], hidden[..., net.inner // 2 :]),
            up=2 * INNER,
            inner=lambda: 2 * INNER,
        ),
        {"block": "heads(attributes=inner, groups=24)", "block.up": "column(parts=24+24, groups=24+24)"},
    ),
    "fused by kind": (fused("phd"), {"block.qkv": "column(parts=16+16+16, groups=4+4+4)"}),
    "fused by dim": (fused("hdp"), {"block.qkv": "column(groups=4)"}),
    "heads that are counted": (fused("phd", is_counted=True), {"block": "heads(attributes=num_heads, groups=4)"}),
    "heads in a view": (
        heads(),
        {"block": "heads(attributes=num_heads+num_kv_heads, groups=4)", "block.out": "row(groups=4)"},
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_what_can_be_cut_is_cut_and_right(name: str) -> None:
    block, expected = CUT[name]
    rules, _ = rules_of(around(block))
    assert expected.items() <= rules.items()
    assert {"embed": "vocab", "head": "vocab"}.items() <= rules.items()


WHOLE: dict[str, tuple[Block, str]] = {
    "centred in training": (feed(centred_in_training), "is not its part of the whole"),
    "a buffer of features": (
        feed(
            lambda net, hidden: hidden * net.weights,
            lambda net: net.register_buffer("weights", torch.linspace(0.5, 2.0, INNER)),
        ),
        "'mul' with a whole value",
    ),
    "convolved": (
        feed(
            lambda net, hidden: net.mix(hidden.transpose(1, 2)).transpose(1, 2),
            mix=partial(nn.Conv1d, INNER, INNER, 3, padding=1),
        ),
        "'convolution', which is not followed",
    ),
    "a norm that reads it too": (
        read_by(
            lambda net, hidden, inner: net.down(inner) + net.back(net.side(inner)),
            side=partial(nn.LayerNorm, INNER),
            back=linear(INNER, WIDTH),
        ),
        "'native_layer_norm' over dim 2",
    ),
    "a whole gate": (
        formed(
            lambda net, x: net.down(net.up(x) * torch.sigmoid(x.mean(-1, keepdim=True))),
            up=linear(WIDTH, INNER),
            down=linear(INNER, WIDTH),
            gate=linear(WIDTH, 1),
        ),
        "1 group of features",
    ),
    "one group of heads": (heads(1), "for 2 ranks"),
    "slopes of heads": (heads(is_sloped=True), "with a whole value"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_cut_is_whole_for_a_reason(name: str) -> None:
    block, why = WHOLE[name]
    rules, left = rules_of(around(block))
    assert not any(name.startswith("block") for name in rules)
    assert any(why in reason for name, reason in left.items() if name.startswith("block")), left


MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "double": lambda h: h * 2,
    "centred": centred,
    "softmax": lambda h: h.softmax(-1),
    "summed": lambda h: h.cumsum(-1),
    "turned": lambda h: h.flip(-1),
    "shifted": lambda h: h.roll(1, -1),
    "along positions": lambda h: h - h.mean(1, keepdim=True),
    "positions in turn": lambda h: h.cumsum(1),
    "in fours": lambda h: h.unflatten(-1, (6, 4)).softmax(-1).flatten(-2),
    "by sixes": lambda h: h.unflatten(-1, (4, 6)).cumsum(-2).flatten(-2),
    "weighed": lambda h: h * torch.linspace(0.5, 2.0, INNER, dtype=h.dtype),
    "its own gate": lambda h: h * torch.sigmoid(h),
    "the largest": lambda h: h / (1 + h.abs().amax(-1, keepdim=True)),
}


def mixed(names: Sequence[str]) -> Block:
    return feed(lambda net, hidden: one_after_another([MIXED[name] for name in names], hidden))


@pytest.mark.parametrize("num_examples", [6, pytest.param(200, marks=pytest.mark.stress)])
def test_whatever_is_between_two_maps_trains_like_one_process(num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None)
    @given(st.lists(st.sampled_from(sorted(MIXED)), max_size=3), st.sampled_from([2, 3]))
    def any_mix_is_right(names: list[str], num_ranks: int) -> None:
        rules, left = rules_of(around(mixed(names)), num_ranks)
        assert ("block.up" in rules) == ("block.down" in rules)
        assert "block.up" in rules or left

    any_mix_is_right()


def test_heads_that_do_not_divide_among_the_ranks_are_cut_unevenly() -> None:
    rules, _ = rules_of(around(heads()), 3)
    assert rules["block.q"] == "column(groups=4)"


def test_ties_are_cut_alike_and_what_is_read_by_hand_or_given_stays_whole() -> None:
    rules, _ = rules_of(around(PLAIN, bias=False))
    assert (rules["embed"], rules["head"]) == ("vocab", "vocab")
    rules, _ = rules_of(around(PLAIN, reads_by_hand=True, bias=False))
    assert "embed" not in rules
    assert "block.up" in rules
    rules, left = rules_of(SHOWN)
    assert "up" not in rules
    assert left["up"] == "the model gives it"


def test_rules_of_ones_own_beat_what_is_inferred() -> None:
    rules_of(around(PLAIN), rules={"*": "auto", "head": "replicate", "embed": "replicate"})


def test_a_verification_compares_what_is_inferred_with_one_process() -> None:
    report = sw.verify(
        around(heads()),
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
        [{"words": WORDS}],
        optimizer=sgd,
        loss=lambda output, _: loss_of(output),
    )
    assert report.verdict in ("equal", "rounding")
    assert report.steps[0].tallies


def hooked(module: str, hook: Callable[..., Any], *, before: bool = False) -> Block:
    """A model in which the program has put a hook on a module."""

    def make() -> nn.Module:
        model = around(PLAIN)()
        inner = model.get_submodule(module)
        if before:
            inner.register_forward_pre_hook(hook)
        else:
            inner.register_forward_hook(hook)
        return model

    return make


def doubled(_module: nn.Module, args: Any, output: Any = None) -> Any:
    return (args[0] * 2,) if output is None else output * 2


def scaled(module: nn.Module, args: Any, output: Any = None) -> Any:
    """By the norm of a weight, which is another one for each part of it."""
    weight = module.get_parameter("block.down.weight" if "block" in module._modules else "weight")
    return (args[0] * weight.norm(),) if output is None else output * weight.norm()


MAPS = {"embed": "vocab", "block.up": "column", "block.down": "row", "head": "vocab"}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("module", MAPS)
def test_hooks_are_heard_by_what_is_inferred(module: str, before: bool) -> None:
    """One that computes with a parameter leaves it whole; others leave what they stand on cut."""
    if before and module == "embed":
        return  # it reads words
    rules, _ = rules_of(hooked(module, doubled, before=before))
    assert rules.keys() == MAPS.keys()
    rules, _ = rules_of(hooked(module, scaled, before=before))
    assert module not in rules
    assert rules
    rules_of(hooked(module, doubled, before=before), rules={"*": "auto", module: MAPS[module]})


def test_the_loss_of_a_head_that_a_rule_cuts_is_rehearsed_beside_what_is_inferred() -> None:
    def run(model: Any) -> torch.Tensor:
        return sw.VocabularyCrossEntropy(model.head)(model(WORDS), WORDS.roll(1))

    rules, _ = rules_of(around(PLAIN), rules={"*": "auto", "head": "column"}, run=run, near=1e-6)
    assert {"embed": "vocab", "block.up": "column(groups=24)", "block.down": "row(groups=24)"}.items() <= rules.items()


REFUSED = Refusals(
    "engine.inferred_rules",
    {
        "a hook that reads the weight of a row": lambda: rules_of(
            hooked("block.down", scaled), rules={"*": "auto", "block.up": "column", "block.down": "row"}
        ),
        "a hook that reads the weight of a column": lambda: rules_of(
            hooked("block.up", scaled), rules={"*": "auto", "block.up": "column", "block.down": "row"}
        ),
        "a hook of the head": lambda: rules_of(hooked("head", scaled), rules={"*": "auto", "head": "vocab"}),
        "a hook of the model": lambda: rules_of(
            hooked("", scaled), rules={"*": "auto", "block.up": "column", "block.down": "row"}
        ),
        "a rule that asks all ranks": lambda: rules_of(around(PLAIN), rules={"*": "auto", "norm": "sequence"}),
        "own rules that break them": lambda: rules_of(around(PLAIN), rules={"*": "auto", "block.up": "replicate"}),
        "no sample": lambda: rules_of(around(PLAIN), sample=None),
        "nothing to cut": lambda: rules_of(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), run=lambda model: model(torch.ones(2, 4).double())
        ),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_inferred_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_weights_of_zeros_do_not_hide_what_is_wrong() -> None:
    torch.manual_seed(0)
    model: Any = around(heads())().double()
    for each in (model.block.v, model.block.k, model.block.out):
        nn.init.zeros_(each.weight)
    outline = tensor_outline(model)
    rules = {f"block.{name}": "column" for name in "qkv"} | {"block.out": "row"}
    with pytest.raises(RehearsalError, match="is not its part"):
        rehearse(model, outline, plan_tensor(outline, rules, num_ranks=2), lambda: model(WORDS))
    assert not model.block.v.weight.any()


# -- models of transformers that carry no plan

MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, str]]] = {
    "falcon": (
        "ForCausalLM",
        {
            **{"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"new_decoder_architecture": True, "num_kv_heads": 2},
        },
        ("transformer.h.1.self_attention.query_key_value", "column(groups=2)"),
    ),
    "t5": (
        "ForSeq2SeqLM",
        {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "column(groups=4)"),
    ),
}


def tiny(kind: str) -> nn.Module:
    """A model without dropout."""
    import transformers as tf  # seconds, which to collect tests does not take

    auto, sizes, _ = MODELS[kind]
    config = tf.CONFIG_MAPPING[kind](**sizes)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model: nn.Module = getattr(tf, f"AutoModel{auto}").from_config(config)
    # Newer versions of transformers carry plans for more models. These tests infer them.
    for each in model.modules():
        vars(each).update(_tp_plan={})
        if (inner := getattr(each, "config", None)) is not None:
            inner.base_model_tp_plan = None
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_an_inferred_plan_of_a_model_of_transformers_gives_what_one_process_gives(kind: str) -> None:
    *_, (module, rule) = MODELS[kind]
    # The models compute in float32 here and there (norms, softmax, rotations), whatever they are given.
    rules, _ = rules_of(
        partial(tiny, kind),
        run=lambda model: next(iter(model(**cast("Any", sample_for(model))).values())).double().square().mean(),
        near=2e-6,
        sample=None,
    )
    assert rules[module] == rule
