"""Plans read back from their texts: two plans with one text would be taken for one where ranks compare digests."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.plan import Bucket, Ownership, Placement
from shardwise.plan.buckets import Slot
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


def ownership_from(text: str) -> Ownership:
    buckets: list[Bucket] = []
    owners = replicas = 0
    for line in text.splitlines():
        match line.split(maxsplit=2 if line.startswith(" ") else 7):
            case ["owners", num_owners, "replicas", num_replicas] if not buckets:
                owners, replicas = int(num_owners), int(num_replicas)
            case ["bucket", working, master, "trainable" | "frozen" as kind, "parts", parts, *rest]:
                bucket = Bucket(
                    working=working,
                    master=master,
                    trainable=kind == "trainable",
                    slots=(),
                    counts=tuple(map(int, parts.split(","))),
                    unit=_unit_from(rest),
                )
                buckets.append(bucket)
            case [start, length, name]:
                slot = Slot(name=json.loads(name), start=int(start), num_elements=int(length))
                buckets[-1] = replace(buckets[-1], slots=(*buckets[-1].slots, slot))
            case _:
                raise ValueError(line)
    return Ownership(num_owners=owners, num_replicas=replicas, buckets=tuple(buckets))


def _unit_from(rest: Sequence[str]) -> Any:
    if not rest:
        return None
    keyword, text = rest
    assert keyword == "unit"
    return json.loads(text)
