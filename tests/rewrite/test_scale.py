"""Work grows with the number of keys and no faster: lines of Python are counted, not seconds."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from shardwise.rewrite import Checked, Rewrite
from shardwise.space import Box

Shape = tuple[int, ...]

STATEMENTS = """
model.embed.weight -> embedding.weight
model.layers.$LAYER_ID.q.weight^T, model.layers.$LAYER_ID.k.weight^T, model.layers.$LAYER_ID.v.weight^T \
    -> layers.$LAYER_ID.qkv.weight, fused_qkv, num_heads=4, num_key_value_groups=2
model.layers.$LAYER_ID.norm.weight -> layers.$LAYER_ID.norm.weight, dtype='float32'
model.layers.$LAYER_ID.experts.$EXPERT_ID.gate.weight^T, model.layers.$LAYER_ID.experts.$EXPERT_ID.up.weight^T \
    -> layers.$LAYER_ID.experts.$EXPERT_ID.gate_up.weight, fused_ffn, dst_tp=2
model.layers.$LAYER_ID.experts.$EXPERT_ID.down.weight -> layers.$LAYER_ID.experts.$EXPERT_ID.down.weight, permute='[]'
model.layers.$LAYER_ID.fused.weight -> layers.$LAYER_ID.one.weight, layers.$LAYER_ID.two.weight, axis=0
model.layers.$LAYER_ID.parts.*.weight -> layers.$LAYER_ID.parts.weight, stack=0
"""
NUM_EXPERTS = 10


def model(num_layers: int) -> dict[str, Shape]:
    """38 keys a layer."""
    known: dict[str, Shape] = {"model.embed.weight": (32, 8)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        known |= {f"{prefix}.{x}.weight": (8 if x == "q" else 4, 8) for x in "qkv"}
        known |= {f"{prefix}.norm.weight": (8,), f"{prefix}.fused.weight": (6, 2), f"{prefix}.untouched": (3,)}
        known |= {f"{prefix}.parts.{part}.weight": (2,) for part in range(2)}
        for expert in range(NUM_EXPERTS):
            known |= {f"{prefix}.experts.{expert}.{x}.weight": (4, 8) for x in ("gate", "up", "down")}
    return known


def num_lines(work: Callable[[], Any]) -> int:
    """How many lines of Python the work runs."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_rank_of_two(checked: Checked) -> None:
    """Every output's first half along its last dim."""
    for name, (shape, *_) in checked.outputs.items():
        box = Box((0,) * len(shape), (*shape[:-1], (shape[-1] + 1) // 2))
        assert checked.resolve(name, box)


def test_two_thousand_keys_become_what_they_should() -> None:
    known = model(53)
    assert len(known) > 2000
    checked = Rewrite(STATEMENTS).check(known)
    assert len(checked.outputs) == 1 + 53 * (1 + 1 + 2 * NUM_EXPERTS + 2 + 1 + 1)
    assert checked.outputs["layers.52.experts.9.gate_up.weight"].shape == (8, 8)
    one_rank_of_two(checked)


def test_work_grows_with_the_number_of_keys_and_no_faster() -> None:
    few, many = model(4), model(32)
    rewrite = Rewrite(STATEMENTS)
    one, other = rewrite.check(few), rewrite.check(many)
    for small, large in (
        (num_lines(lambda: rewrite.check(few)), num_lines(lambda: rewrite.check(many))),
        (num_lines(lambda: one_rank_of_two(one)), num_lines(lambda: one_rank_of_two(other))),
        (num_lines(lambda: one.inverse()), num_lines(lambda: other.inverse())),
    ):
        assert large <= 8 * 1.3 * small, (small, large)


def test_statements_that_are_written_out_for_each_layer_cost_their_number() -> None:
    def work(num_layers: int) -> Callable[[], Any]:
        text = "\n".join(f"a.{at}.w^T -> b.{at}.w" for at in range(num_layers))
        known = {f"a.{at}.w": (2, 3) for at in range(num_layers)}
        return lambda: Rewrite(text).check(known)

    small, large = num_lines(work(50)), num_lines(work(400))
    assert large <= 8 * 1.3 * small, (small, large)


def test_a_join_of_many_costs_their_number() -> None:
    def work(num_parts: int) -> Callable[[], Any]:
        known: dict[str, Shape] = {f"e.{at}.w": (1, 2) for at in range(num_parts)}
        checked = Rewrite("e.*.w -> w, axis=0").check(known)
        return lambda: [checked.resolve("w", Box((at, 0), (1, 2))) for at in range(num_parts)]

    small, large = num_lines(work(50)), num_lines(work(400))
    assert large <= 8 * 2 * small, (small, large)  # finding one among many may cost the logarithm
