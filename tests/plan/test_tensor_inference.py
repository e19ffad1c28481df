"""From groups of features to rules: families, parts, orders, and why a family stays whole."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.tensor_inference import ForwardTrace, TracedMap, infer_rules
from tests.properties import tried


def repeated(groups: range, unit: int) -> tuple[int, ...]:
    return tuple(group for group in groups for _ in range(unit))


def chain(outputs: tuple[int, ...], inputs: tuple[int, ...], **settings: object) -> ForwardTrace:
    """Two maps, one after the other."""
    up = TracedMap(module="up", outputs=outputs, has_whole_input=True, weight="up.weight")
    down = TracedMap(module="down", outputs=(0,) * 4, inputs=(inputs,), weight="down.weight")
    return ForwardTrace(maps=(up, down), **settings)  # type: ignore[arg-type]


@tried(40)
@given(st.integers(2, 5), st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_each_part_of_a_fused_map_is_cut_by_its_groups(count: int, inner: int, units: list[int]) -> None:
    groups = range(1, count + 1)
    outputs = tuple(group for unit in units for group in repeated(groups, unit))
    rules = infer_rules(chain(outputs, repeated(groups, inner)), num_ranks=2).rules
    if len(units) == 1:
        assert rules["up"] == f"column(groups={count})"
    else:
        sizes = "+".join(str(count * unit) for unit in units)
        assert rules["up"] == f"column(parts={sizes}, groups={'+'.join([str(count)] * len(units))})"
    assert rules["down"] == f"row(groups={count})"


def test_parts_with_groups_of_their_own_are_cut_side_by_side() -> None:
    outputs = (1, 1, 2, 2, 11, 12, 13)
    rules = infer_rules(chain(outputs, (1, 2, 11, 11, 12, 12, 13, 13)), num_ranks=2).rules
    assert rules == {"up": "column(parts=4+3, groups=2+3)", "down": "row(parts=2+6, groups=2+3)"}


def test_another_order_is_whole() -> None:
    found = infer_rules(chain((1, 2, 3, 4), (2, 1, 3, 4)), num_ranks=2)
    assert found.left["up"] == "its features have another order than those of their reader"


def test_a_map_between_two_families_is_what_the_first_needs() -> None:
    maps = (
        TracedMap(module="a", outputs=(1, 2), has_whole_input=True, weight="a"),
        TracedMap(module="b", inputs=((1, 2),), outputs=(3, 4), weight="b"),
        TracedMap(module="c", inputs=((3, 4),), outputs=(0, 0), weight="c"),
    )
    found = infer_rules(ForwardTrace(maps=maps), num_ranks=2)
    assert found.rules == {"a": "column(groups=2)", "b": "row(groups=2)"}
    assert found.left["c"] == "'b' is cut along its other dim (row)"
    found = infer_rules(ForwardTrace(maps=maps), num_ranks=2, without={"a": "it is asked to be whole"})
    assert found.rules == {"b": "column(groups=2)", "c": "row(groups=2)"}


def test_a_map_that_reads_both_cut_and_whole_values_leaves_its_family_whole() -> None:
    maps = (
        TracedMap(module="a", outputs=(1, 2), has_whole_input=True, weight="a"),
        TracedMap(module="b", inputs=((1, 2),), has_whole_input=True, outputs=(0, 0), weight="b"),
    )
    assert "in another" in infer_rules(ForwardTrace(maps=maps), num_ranks=2).left["a"]
