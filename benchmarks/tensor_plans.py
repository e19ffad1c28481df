"""What a plan of tensor cuts costs for a model of many experts: the outline, the plan and its regions, by size.

    python -m benchmarks.tensor_plans [--rounds 3] [--write]

58 layers of 256 experts of 3 matrices, as large models have them, on the meta device: 44,544 modules with a style.
Times are processor seconds of this process, the least of several rounds. The sizes take turns: a quarter, a half and
all of the layers. Work that grows faster than the number of layers shows between them.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.markdown import Row, markdown, write_page
from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.plan.tensor_cuts import plan_tensor
from shardwise.plan.tensor_plan import regions_of

RESULT = Path(__file__).parent / "results" / "tensor-plans.md"
LAYERS, EXPERTS, WIDTH, INNER, RANKS = 58, 256, 64, 32, 2
RULES = {"*.gate": "column", "*.up": "column", "*.down": "row"}
PARTS = (4, 2, 1)
"""The number of layers is divided by these."""
ASKED_S = 5.0
"""Of the plan of the whole, at most."""
ASKED_GROWTH = 1.25
"""Of the time of a style from the smallest size to the whole, at most: then it is linear."""
HEADER: Row = ("layers", "styles", "outline, s", "plan, s", "regions, s", "plan of a style, us", "asked", "verdict")


class Expert(nn.Module):
    """Gates, values, and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)


def experts(num_layers: int) -> nn.Module:
    """A model without values; nobody calls it."""
    with torch.device("meta"):
        return nn.ModuleList(nn.ModuleList(Expert() for _ in range(EXPERTS)) for _ in range(num_layers))


def clocked(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it gives."""
    gc.collect()
    begun = time.process_time()
    made = work()
    return time.process_time() - begun, made


def measured(num_layers: int) -> tuple[int, list[float]]:
    """How many styles there are, and the seconds of outline, plan and regions."""
    model = experts(num_layers)  # alone: others would change how often Python looks for garbage
    outlining_s, outline = clocked(lambda: tensor_outline(model))
    planning_s, plan = clocked(lambda: plan_tensor(outline, RULES, num_ranks=RANKS))
    regions_s, _ = clocked(lambda: regions_of(plan))
    return len(plan.styles), [outlining_s, planning_s, regions_s]


def table(rounds: int) -> list[Row]:
    """A row for each size; the sizes take turns."""
    sizes = [LAYERS // part for part in PARTS]
    taken = [{num_layers: measured(num_layers) for num_layers in sizes} for _ in range(rounds)]
    rows: list[Row] = []
    of_style: list[float] = []
    for num_layers in sizes:
        num_styles, _ = taken[0][num_layers]
        least = [min(each) for each in zip(*(turn[num_layers][1] for turn in taken), strict=True)]
        of_style.append(1e6 * least[1] / num_styles)
        rows.append((str(num_layers), f"{num_styles:,}", *(f"{each:.2f}" for each in least), f"{of_style[-1]:.0f}"))
    is_met = least[1] <= ASKED_S and of_style[-1] <= ASKED_GROWTH * of_style[0]
    asked = f"plan {ASKED_S:g} s, of a style {ASKED_GROWTH:g} of the smallest"
    return [*((*row, "", "") for row in rows[:-1]), (*rows[-1], asked, "met" if is_met else "MISSED")]


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_plans", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    found = markdown(HEADER, table(arguments.rounds))
    print(found)
    if arguments.write:
        reading = (
            f"A model on the meta device: {LAYERS} layers of {EXPERTS} experts of 3 matrices, or a part of the layers, "
            f"cut over {RANKS} ranks. Times are processor seconds, the shortest of {arguments.rounds} rounds."
        )
        title = "Plans of tensor cuts for many experts"
        write_page(RESULT, "benchmarks.tensor_plans", title, reading, found, load_before=before)


if __name__ == "__main__":
    main()
