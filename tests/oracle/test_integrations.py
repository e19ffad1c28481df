"""Programs train in the loops of other trainers as one process does."""

import pytest

from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.integrations import by_accelerate, by_lightning
from tests.oracle.layouts import LAYOUTS
from tests.oracle.places import Place
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS


@pytest.mark.parametrize("place", [by_accelerate, by_lightning])
@pytest.mark.parametrize(
    ("program", "layout"),
    [
        ("words", "one rank, k=3"),
        ("branches", "replicas, k=2"),
        ("batch norm", "two ranks, k=3, tiny buckets"),
        ("units tied", "stage 3, whole, k=2"),
        ("chain", "stages x data"),
        ("tied head", "two stages"),
        ("u-net", "four stages"),
        ("multi-loss", "stages x stage 3"),
        ("decoder", "tp"),
        ("decoder", "all"),
    ],
)
def test_a_program_trains_like_one_process(place: Place, program: str, layout: str) -> None:
    assert_trains_like_one_process(PROGRAMS[program], plan_of(PROGRAMS[program], **LAYOUTS[layout]), place)
