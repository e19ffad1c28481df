"""The loop of accelerate on two processes: the numbers of its own loop on one."""

from pathlib import Path

import accelerate
import pytest
from accelerate.state import AcceleratorState

from shardwise.accelerate import Accelerator
from shardwise.comm import Channel
from tests.accelerate.accelerate_loops import PLANS, Run, assert_same_run, train
from tests.processes.pool import Pool


def train_here(channel: Channel, plan: str, steps: int, folder: Path, resumes: bool) -> Run:
    AcceleratorState._reset_state(reset_partial_state=True)  # of the test before: it keeps settings for the process
    made = PLANS[plan]
    accelerator = Accelerator(cpu=True, plan=made, channel=channel, gradient_accumulation_steps=steps)
    return train(accelerator, batch=8 // made.mesh.num_data_ranks, folder=folder, resumes=resumes)


@pytest.mark.parametrize(
    ("saved", "resumed", "steps"), [("stage 3", "pp", 1), ("pp", "tp", 2), ("tp", "stage 3", 2), ("stage 0", "tp", 1)]
)
def test_a_loop_goes_on_under_another_layout(pool: Pool, tmp_path: Path, saved: str, resumed: str, steps: int) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    expected = train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps), batch=8)
    folder = tmp_path / "save"
    assert_same_run(pool.run(2, train_here, saved, steps, folder, False)[0], expected)
    again = pool.run(2, train_here, resumed, steps, folder, True)[0]
    assert_same_run(again, expected, of_last=len(again.norms))
