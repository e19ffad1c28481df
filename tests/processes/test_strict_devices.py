"""All that engines send between devices, over the strict double of NCCL in real processes: the bits of CPU ranks.

Messages between devices have an order of their own: receives are posted ahead, headers go between the hosts. Simulated
ranks match their calls elsewhere. So each plan goes one journey here that calls what an engine has. The devices run as
late as they can, so that what nobody waits for has not come.
"""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.testing.library import compiler
from tests.oracle.journeys import JOURNEYS, journey, plan_of, same
from tests.processes.pool import STRICT_DEVICE, Pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: nothing runs on the fake device"),
]

FEW = (
    "pp",
    "stage 2",
    "stage 3",
    "stage 3, parameters on the host",
    "masters on the host",
    "pp and tp",
    "pp and stage 3, interleaved",
)
"""Those that find all that is known to go wrong; the others are for `make stress`."""


@pytest.mark.parametrize(
    "name", [each if each in FEW else pytest.param(each, marks=pytest.mark.stress) for each in JOURNEYS]
)
def test_what_engines_do_between_devices_has_the_bits_of_cpu_ranks(pool: Pool, name: str, tmp_path: Path) -> None:
    plan, to, optimizer = JOURNEYS[name]
    text, other, size = plan.text(), plan_of(to).text(), plan.mesh.size
    real = pool.run(size, journey, text, other, optimizer, tmp_path / "devices", transport=STRICT_DEVICE)
    expected = sw.simulate(size, lambda channel: journey(channel, text, other, optimizer, tmp_path / "cpu"))
    for ours, theirs in zip(real, expected, strict=True):
        assert len(ours) == len(theirs)
        for at, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            assert same(one, two), at
