"""Configurations of the forms in which real models are described in AOA: there, and back with the reversing flag."""

from collections.abc import Mapping
from typing import Any

import pytest

from shardwise.errors import RewriteError
from shardwise.rewrite import Rewrite, TensorMeta
from tests.rewrite.filling import assert_same, pushed, resolved
from tests.rewrite.oracle import Tensor, interpret, metas
from tests.rewrite.strategies import numbered

Shape = tuple[int, ...]
HIDDEN, HEADS, GROUPS, HEAD, FFN = 4, 4, 2, 2, 8
P = "model.layers.$LAYER_ID"


def stored(shapes: Mapping[str, Shape], dtype: str = "bfloat16") -> dict[str, Tensor]:
    return {name: Tensor(numbered(at, shape, dtype), dtype) for at, (name, shape) in enumerate(shapes.items())}


def laid_out(tensors: Mapping[str, Tensor], degrees: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: TensorMeta(t.shape, t.dtype, degrees.get(name, (1,) * len(t.shape))) for name, t in tensors.items()}


def there(statements: list[str], sources: dict[str, Tensor], cut: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The outputs of a configuration, once the oracle agrees. `cut`: degrees of the target's layouts, by endings."""
    outputs = interpret("\n".join(statements), sources)
    degrees = {name: value for name in outputs for end, value in cut.items() if name.endswith(end)}
    expected = interpret("\n".join(statements), sources, {name: degrees.get(name, ()) for name in outputs})
    checked = Rewrite({"aoa_statements": statements}).check(metas(sources), laid_out(outputs, degrees))
    assert_same(resolved(checked, sources, {}), expected)
    assert_same(pushed(checked, sources, {}), expected)
    back = Rewrite({"aoa_statements": statements, "aoa_config_reverse": True})
    restored = back.check(laid_out(expected, degrees), metas(sources))
    assert_same(resolved(restored, expected, {}), sources)
    return expected


def attention(prefix: str, layers: int) -> dict[str, Shape]:
    sizes = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    return {
        f"{prefix}.{at}.self_attn.{x}_proj.{kind}": (size, HIDDEN) if kind == "weight" else (size,)
        for at in range(layers)
        for x, size in sizes.items()
        for kind in ("weight", "bias")
    }


def decoder(layers: int) -> dict[str, Shape]:
    """A dense decoder as Hugging Face stores it: linear weights are [out, in]."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (6, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= attention("model.layers", layers)
    for at in range(layers):
        shapes |= {f"model.layers.{at}.input_layernorm.weight": (HIDDEN,)}
        shapes |= {f"model.layers.{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD)}
        shapes |= {f"model.layers.{at}.mlp.{x}_proj.weight": (FFN, HIDDEN) for x in ("gate", "up")}
        shapes |= {f"model.layers.{at}.mlp.down_proj.weight": (HIDDEN, FFN)}
    return shapes


def fused_qkv(kind: str) -> str:
    mark = "^T" if kind == "weight" else ""
    left = ", ".join(f"{P}.self_attn.{x}_proj.{kind}{mark}" for x in "qkv")
    axis = "" if kind == "weight" else ", axis = 0"
    return f"{left} -> {P}.self_attn.qkv_proj.{kind}, fused_qkv, num_heads={HEADS}, num_key_value_groups={GROUPS}{axis}"


DENSE = [
    f"{P}.input_layernorm.weight -> {P}.input_layernorm.weight",
    f"{P}.self_attn.o_proj.weight^T -> {P}.self_attn.o_proj.weight",
    fused_qkv("weight"),
    fused_qkv("bias"),
    f"{P}.mlp.gate_proj.weight^T, {P}.mlp.up_proj.weight^T -> {P}.mlp.up_gate_proj.weight, fused_ffn",
    f"{P}.mlp.down_proj.weight^T -> {P}.mlp.down_proj.weight \n",
    "model.embed_tokens.weight -> model.embed_tokens.weight",
    "lm_head.weight -> lm_head.weight",
]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_dense_decoder_with_fused_attention_and_gates(degree: int) -> None:
    sources = stored({**decoder(3), "lm_head.weight": (6, HIDDEN)})
    outputs = there(DENSE, sources, {"up_gate_proj.weight": (1, degree), "qkv_proj.weight": (1, degree)})
    assert outputs["model.layers.2.self_attn.qkv_proj.weight"].shape == (HIDDEN, (HEADS + 2 * GROUPS) * HEAD)
    assert not any("gate_proj" in name and "up_" not in name for name in outputs)


def test_a_reversed_configuration_written_by_hand_undoes_what_it_should() -> None:
    """The second statements transpose what the first have just made: names that are in no file."""
    sources = stored(attention("model.layers", 2))
    outputs = interpret("\n".join([fused_qkv("weight"), fused_qkv("bias")]), sources)
    heads = f"fused_qkv, num_heads={HEADS}, num_key_value_groups = {GROUPS}"
    statements = [
        f"{P}.self_attn.qkv_proj.{kind} -> {', '.join(f'{P}.self_attn.{x}_proj.{kind}' for x in 'qkv')} , {heads}{axis}"
        for kind, axis in (("weight", ""), ("bias", ", axis = 0"))
    ]
    statements += [f"{P}.self_attn.{x}_proj.weight^T -> {P}.self_attn.{x}_proj.weight" for x in "qkv"]
    checked = Rewrite({"aoa_statements": statements}).check(metas(outputs), metas(sources))
    assert_same(resolved(checked, outputs, {}), sources)


def test_a_tied_head_is_a_copy_that_a_reversed_configuration_cannot_undo_alone() -> None:
    statements = [*DENSE[:-1], "model.embed_tokens.weight -> lm_head.weight"]
    sources = stored(decoder(2))
    outputs = interpret("\n".join(statements), sources, dict.fromkeys([*interpret("\n".join(statements), sources)], ()))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= outputs.keys()
    checked = Rewrite(statements).check(metas(sources), metas(outputs))
    assert_same(resolved(checked, sources, {}), outputs)
    assert any("model.embed_tokens.weight" in loss for loss in checked.losses)
    with pytest.raises(RewriteError, match=r"model\.embed_tokens\.weight"):
        Rewrite({"aoa_statements": statements, "aoa_config_reverse": True}).check(metas(outputs), metas(sources))
    restored = checked.inverse(lossy="allow").check(metas(outputs), metas(sources))
    assert_same(resolved(restored, outputs, {}), sources)


def experts(first_dense: int, numbers: list[int]) -> dict[str, Shape]:
    """Layers of which the first are dense and the others have so many experts."""
    dense = {name: shape for name, shape in decoder(first_dense).items() if ".mlp." in name}
    shapes = {**dense, **attention("model.layers", first_dense + len(numbers))}
    for at, number in enumerate(numbers, start=first_dense):
        owners = [f"model.layers.{at}.mlp.{x}" for x in ("shared_experts", *(f"experts.{e}" for e in range(number)))]
        for owner in owners:
            shapes |= {f"{owner}.{x}_proj.weight": (FFN, HIDDEN) for x in ("gate", "up")}
            shapes |= {f"{owner}.down_proj.weight": (HIDDEN, FFN)}
        shapes |= {f"model.layers.{at}.mlp.gate.weight": (number, HIDDEN)}
        shapes |= {f"model.layers.{at}.mlp.gate.e_score_correction_bias": (number,)}
    return shapes


EXPERTS = [
    fused_qkv("weight"),
    fused_qkv("bias"),
    f"{P}.mlp.gate.e_score_correction_bias -> {P}.mlp.gate.e_score_correction_bias",
    f"{P}.mlp.gate.weight -> {P}.mlp.gate.weight, dtype='float32'",
    *(f"{P}.mlp.{x}down_proj.weight^T -> {P}.mlp.{x}down_proj.weight" for x in ("", "shared_experts.")),
    f"{P}.mlp.experts.$EXPERT_ID.down_proj.weight^T -> {P}.mlp.experts.$EXPERT_ID.down_proj.weight",
    *(
        f"{P}.mlp.{x}gate_proj.weight^T, {P}.mlp.{x}up_proj.weight^T -> {P}.mlp.{x}up_gate_proj.weight, fused_ffn"
        for x in ("", "shared_experts.", "experts.$EXPERT_ID.")
    ),
]


def test_a_mixture_of_experts_whose_first_layer_is_dense_and_whose_layers_differ() -> None:
    sources = stored(experts(1, [3, 12]))
    outputs = there(EXPERTS, sources, {"up_gate_proj.weight": (1, 2)})
    assert outputs["model.layers.1.mlp.gate.weight"].dtype == "float32"
    assert "model.layers.2.mlp.experts.11.up_gate_proj.weight" in outputs
    assert "model.layers.1.mlp.experts.3.up_gate_proj.weight" not in outputs


def test_experts_are_joined_along_rows_and_parted_again() -> None:
    sources = stored(experts(0, [2, 11]))
    grouped = [f"{P}.mlp.experts.*.down_proj.weight -> {P}.mlp.experts.down_proj, axis=0"]
    grouped += [f"{P}.mlp.experts.*.{x}_proj.weight -> {P}.mlp.experts.{x}_proj, stack=0" for x in ("gate", "up")]
    outputs = there(grouped, sources, {})
    assert outputs["model.layers.1.mlp.experts.down_proj"].shape == (11 * HIDDEN, FFN)
    assert outputs["model.layers.1.mlp.experts.up_proj"].shape == (11, FFN, HIDDEN)


def test_what_a_target_has_and_no_file_is_added_and_keeps_its_value() -> None:
    shapes: dict[str, Shape] = {f"model.layers.{at}.self_attn.sinks": (HEADS,) for at in range(2)}
    shapes |= {f"model.layers.{at}.mlp.experts.gate_up_proj": (3, HIDDEN, 2 * FFN) for at in range(2)}
    sources = stored(shapes)
    statements = [
        f"{P}.self_attn.sinks -> {P}.self_attn.sinks, dtype='float32'",
        f"{P}.mlp.experts.gate_up_proj -> {P}.mlp.experts.gate_up_proj, permute='[0,2,1]'",
        "_ -> model.rotary_emb.inv_freq",
        f"_ -> {P}.self_attn.window",
    ]
    added: dict[str, Shape] = {f"model.layers.{at}.self_attn.window": (1,) for at in range(2)}
    added |= {"model.rotary_emb.inv_freq": (HEAD,)}
    expected = interpret("\n".join(statements[:2]), sources)
    checked = Rewrite(statements).check(metas(sources), {**metas(expected), **added})
    assert checked.added == added.keys()
    produced = {name: tensor for name, tensor in resolved(checked, sources, {}).items() if name not in added}
    assert_same(produced, expected)


def test_a_projection_stored_as_query_key_value_is_parted_after_it_is_transposed() -> None:
    blocks = "model.transformer.blocks"
    shapes: dict[str, Shape] = {"model.transformer.wte.embedding": (6, HIDDEN)}
    for at in range(2):
        shapes |= {f"{blocks}.{at}.att_proj.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN)}
        shapes |= {f"{blocks}.{at}.ff_proj.weight": (2 * FFN, HIDDEN)}
    parts = ", ".join(f"{P}.self_attn.{x}_proj.weight" for x in "qkv")
    statements = [
        "model.transformer.wte.embedding -> model.embed_tokens.weight",
        f"{blocks}.$LAYER_ID.att_proj.weight^T -> {parts}, fused_qkv_old, num_heads={HEADS}, "
        f"num_key_value_groups={GROUPS}",
        f"{blocks}.$LAYER_ID.ff_proj.weight^T -> {P}.mlp.ff_proj.weight",
    ]
    outputs = there(statements, stored(shapes), {})
    assert outputs["model.layers.1.self_attn.k_proj.weight"].shape == (HIDDEN, GROUPS * HEAD)


@pytest.mark.parametrize("degree", [1, 2])
def test_projections_fused_in_the_file_are_laid_out_anew_for_each_rank(degree: int) -> None:
    shapes: dict[str, Shape] = {}
    for at in range(2):
        shapes |= {f"model.layers.{at}.self_attn.qkv_proj.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN)}
        shapes |= {f"model.layers.{at}.mlp.gate_up_proj.weight": (2 * FFN, HIDDEN)}
    statements = [
        *(
            f"model.layers.{at}.self_attn.qkv_proj.weight^T -> model.layers.{at}.self_attn.qkv_proj.weight, "
            f"fused_qkv_old, num_heads={HEADS}, num_key_value_groups={GROUPS}, axis=1"
            for at in range(2)
        ),
        f"{P}.mlp.gate_up_proj.weight^T -> {P}.mlp.gate_up_proj.weight, fused_ffn",
    ]
    sources = stored(shapes)
    outputs = there(statements, sources, {"_proj.weight": (1, degree)})
    turned = sources["model.layers.0.mlp.gate_up_proj.weight"].values.transpose()
    assert (outputs["model.layers.0.mlp.gate_up_proj.weight"].values == turned).all() == (degree == 1)
