"""TRL's GRPOTrainer in processes as torchrun starts them: what they draw and learn is what simulated ranks do."""

import json
from functools import partial
from pathlib import Path

import pytest

import shardwise as sw
from tests.hf.trl_runs import drawn
from tests.processes.as_started import outputs

SCRIPT = """
import json, sys
from pathlib import Path
from tests.hf.trl_runs import drawn

for plan in sys.argv[2:]:
    print(json.dumps(["found", *drawn(Path(sys.argv[1]), plan)]))
"""
PLANS = ("stage 3", "tp")


@pytest.mark.stress  # each process imports TRL, some ten seconds
def test_two_processes_generate_and_train_as_simulated_ranks(tmp_path: Path) -> None:
    told = outputs([["-c", SCRIPT, str(tmp_path / "processes"), *PLANS]] * 2)
    found = [[json.loads(line) for line in out.splitlines() if line.startswith('["found"')] for out in told]
    for at, plan in enumerate(PLANS):
        simulated = sw.simulate(2, partial(drawn, tmp_path / "simulated", plan))
        for number in range(2):
            _, answers, own, norms = found[number][at]
            assert (answers, own) == simulated[number][:2]
            assert norms == pytest.approx(simulated[number][2], rel=1e-4)
