"""A mixture of experts of any size as names and shapes: what goes in, the statements, what has to come out."""

from dataclasses import dataclass

from shardwise.rewrite import TensorMeta

__all__ = ["NAMES_PER_LAYER", "STATEMENTS", "ExpertModel"]

NUM_EXPERTS = 165
NAMES_PER_LAYER = 3 * NUM_EXPERTS + 5

HIDDEN = 2048
EXPERT = 1408
NUM_HEADS, NUM_GROUPS, HEAD = 16, 4, 128
KEY_RANK, VALUE_RANK = 192, 64
DEGREE = 4
"""Tensor-parallel ranks for which gate and up are interleaved."""

STATEMENTS = f"""
# every weight of a linear layer is transposed on the way
model.layers.$L.mlp.experts.$E.gate_proj.weight^T, model.layers.$L.mlp.experts.$E.up_proj.weight^T \
-> layers.$L.experts.$E.gate_up, fused_ffn, dst_tp={DEGREE}
model.layers.$L.mlp.experts.$E.down_proj.weight^T -> layers.$L.experts.$E.down
model.layers.$L.self_attn.q_proj.weight^T, model.layers.$L.self_attn.k_proj.weight^T, \
model.layers.$L.self_attn.v_proj.weight^T \
-> layers.$L.qkv, fused_qkv, num_heads={NUM_HEADS}, num_key_value_groups={NUM_GROUPS}
model.layers.$L.self_attn.kv_b_proj.weight^T -> layers.$L.k_b, layers.$L.v_b, axis=1, sizes='[{KEY_RANK},{VALUE_RANK}]'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModel:
    """So many layers, each of `NAMES_PER_LAYER` tensors."""

    num_layers: int

    def sources(self) -> dict[str, TensorMeta]:
        """What goes in."""
        size = HEAD * NUM_HEADS
        group_size = HEAD * NUM_GROUPS
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            shapes[f"{name}.input_layernorm.weight"] = (HIDDEN,)
            shapes[f"{name}.self_attn.q_proj.weight"] = (size, HIDDEN)
            shapes[f"{name}.self_attn.k_proj.weight"] = (group_size, HIDDEN)
            shapes[f"{name}.self_attn.v_proj.weight"] = (group_size, HIDDEN)
            shapes[f"{name}.self_attn.kv_b_proj.weight"] = (KEY_RANK + VALUE_RANK, HIDDEN)
            for expert in range(NUM_EXPERTS):
                shapes[f"{name}.mlp.experts.{expert}.gate_proj.weight"] = (EXPERT, HIDDEN)
                shapes[f"{name}.mlp.experts.{expert}.up_proj.weight"] = (EXPERT, HIDDEN)
                shapes[f"{name}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, EXPERT)
        return {name: TensorMeta(shape, "bfloat16") for name, shape in shapes.items()}

    def targets(self) -> dict[str, TensorMeta]:
        """What has to come out."""
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
            shapes[f"layers.{layer}.qkv"] = (HIDDEN, HEAD * (NUM_HEADS + 2 * NUM_GROUPS))
            shapes[f"layers.{layer}.k_b"] = (HIDDEN, KEY_RANK)
            shapes[f"layers.{layer}.v_b"] = (HIDDEN, VALUE_RANK)
            for expert in range(NUM_EXPERTS):
                shapes[f"layers.{layer}.experts.{expert}.gate_up"] = (HIDDEN, 2 * EXPERT)
                shapes[f"layers.{layer}.experts.{expert}.down"] = (EXPERT, HIDDEN)
        return {name: TensorMeta(shape, "bfloat16") for name, shape in shapes.items()}
