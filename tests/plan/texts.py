"""Plans read back from their texts: two plans with one text would be taken for one where ranks compare digests."""

import tomllib
from collections.abc import Mapping
from typing import Any

from shardwise.plan import Placement
from shardwise.plan.tensor_plan import ParameterCut, Style, TensorPlan


def placement_from(text: str) -> Placement:
    return Placement(**{"modules": {}, "parameters": {}, **tomllib.loads(text)})


def tensor_plan_from(text: str) -> TensorPlan:
    table = tomllib.loads(text)
    return TensorPlan(
        num_ranks=table["num_ranks"],
        summed=frozenset(table["summed"]),
        named=frozenset(table["named"]),
        cuts={name: ParameterCut(**_tuples(cut)) for name, cut in table.get("cuts", {}).items()},
        styles={
            name: tuple(Style(**_tuples(each)) for each in styles) for name, styles in table.get("styles", {}).items()
        },
    )


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    def tupled(value: Any) -> Any:
        return tuple(map(tupled, value)) if isinstance(value, list) else value

    return {key: tupled(value) for key, value in table.items()}
