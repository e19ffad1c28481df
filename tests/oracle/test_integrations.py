"""Programs train in the loops of other trainers as one process does."""

import pytest

from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.integrations import by_accelerate, by_lightning
from tests.oracle.layouts import LAYOUTS
from tests.oracle.places import Place
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "program", "layout"),
    [
        (by_accelerate, "words", "one rank, k=3"),
        (by_accelerate, "branches", "replicas, k=2"),
        (by_accelerate, "units tied", "stage 3, whole, k=2"),
        (by_accelerate, "chain", "stages x data"),
        (by_accelerate, "tied head", "four stages"),
        (by_accelerate, "decoder", "tp"),
        (by_lightning, "words", "two ranks"),
        (by_lightning, "batch norm", "two ranks, k=3, tiny buckets"),
        (by_lightning, "reader", "stage 3, replicas"),
        (by_lightning, "multi-loss", "stages x stage 3"),
        (by_lightning, "u-net", "two stages, interleaved"),
        (by_lightning, "decoder", "tp"),
    ],
)
def test_a_program_trains_like_one_process(place: Place, program: str, layout: str) -> None:
    assert_trains_like_one_process(PROGRAMS[program], plan_of(PROGRAMS[program], **LAYOUTS[layout]), place)
