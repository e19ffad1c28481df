"""Whatever modules take, give and do beside, and whichever way values flow: stages train like one process."""

from typing import Any

import pytest

from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.pipeline_values import PIPELINE_PROGRAMS
from tests.oracle.program import plan_of

OTHERS: list[dict[str, Any]] = [
    {"mesh": "pp=2", "k": 2, "schedule": "interleaved"},
    {"mesh": "pp=2", "k": 5, "schedule": "fthenb"},
    {"mesh": "pp=2,dp_shard=2", "k": 2, "clip": 0.05},
]
"""Where there are four stages; each of them for some programs, and for all in the long runs."""


def layouts() -> list[Any]:
    found: list[Any] = []
    for number, (name, program) in enumerate(PIPELINE_PROGRAMS.items()):
        k = 5 if number % 4 == 0 else 3  # of uneven microbatches some
        found.append((name, {"mesh": f"pp={program.num_stages}", "k": k}))
        if "tie" in name:  # with one microbatch gradients of ties go down from stage to stage, and have one order
            found.append((name, {"mesh": f"pp={program.num_stages}"}))
        for at, layout in enumerate(OTHERS if program.num_stages == 4 else []):
            marks = [] if number % 6 == at else [pytest.mark.stress]
            found.append(pytest.param(name, layout, marks=marks))
    return found


# torch's compiler looks at the gradient of values that are no leaves, and is warned by torch about it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("name", "layout"), layouts(), ids=str)
def test_stages_train_like_one_process(name: str, layout: dict[str, Any]) -> None:
    assert_trains_like_one_process(PIPELINE_PROGRAMS[name], plan_of(PIPELINE_PROGRAMS[name], **layout))
