"""The loop of accelerate on two processes: the numbers of its own loop on one."""

import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.comm import Channel
from tests.accelerate.accelerate_loops import PLANS, ROWS, Run, assert_same_run, train
from tests.processes.as_started import outputs
from tests.processes.pool import Pool

PROGRAM = """
import sys
import torch
from shardwise.accelerate import Accelerator
from tests.accelerate.accelerate_loops import PLANS, train

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, plan=PLANS["stage 3"], gradient_accumulation_steps=2)
    run = train(accelerator, batch=4, folder=f"{sys.argv[1]}/save")
    if accelerator.is_main_process:
        torch.save(run._asdict(), f"{sys.argv[1]}/run.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()
"""


@pytest.mark.slow
def test_a_script_that_torchrun_starts_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    outputs([["-c", PROGRAM, str(tmp_path)]] * 2)
    AcceleratorState._reset_state(reset_partial_state=True)
    expected = train(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), batch=8)
    assert_same_run(Run(**torch.load(tmp_path / "run.pt")), expected)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS[0])


def talk_here(channel: Channel, plan: str, folder: Path) -> tuple[list[float], list[str]]:
    """The first column of a stream's rows here, and warnings of a step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, plan=replace(PLANS[plan], clip_grad_norm=None), channel=channel)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    called, stepped, loader = accelerator.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
    rows = [*loader]
    with warnings.catch_warnings(record=True) as warned:
        accelerator.backward(called(rows[0]).mean())
        stepped.step()
    accelerator.save_model(called, folder)
    state = accelerator.get_state_dict(called)
    if channel.rank == 0:
        torch.testing.assert_close(load_file(folder / "model.safetensors"), dict(state), rtol=0, atol=0)
    return torch.cat(rows)[:, 0].tolist(), [str(each.message) for each in warned]


@pytest.mark.parametrize("plan", ["stage 3", "pp"])
def test_ranks_of_a_model_see_the_same_and_agree(pool: Pool, plan: str, tmp_path: Path) -> None:
    found = pool.run(2, talk_here, plan, tmp_path)
    whole = ROWS[0][:, 0].tolist()
    if plan == "pp":
        assert [rows for rows, _ in found] == [whole] * 2
    else:
        assert sorted(found[0][0] + found[1][0]) == sorted(whole)
    assert [warned for _, warned in found] == [[]] * 2


def stopped_here(channel: Channel, folder: Path) -> list[tuple[list[float], int]]:
    """The losses and the exit code of a run, of one that a signal to rank 1 ends in step 2, and of the next one."""

    def run(*, asked_at: int = 0, begin: int = 0) -> tuple[list[float], int]:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(1)
        plan = replace(PLANS["stage 3"], clip_grad_norm=None)
        accelerator = Accelerator(cpu=True, plan=plan, channel=channel, gradient_accumulation_steps=2)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        loader: Any = DataLoader(TensorDataset(ROWS[0]), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        if begin:
            accelerator.load_state(folder)
        losses = []
        with sw.Preemption() as preemption:
            for (inputs,) in accelerator.skip_first_batches(loader, 2 * begin):
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                assert accelerator.report is not None
                losses.append(accelerator.report.loss)
                if preemption.requested(accelerator.engine):
                    accelerator.save_state(folder)
                    break
                if len(losses) == asked_at - 1 and channel.rank == 1:
                    signal.raise_signal(signal.SIGTERM)
        return losses, preemption.exit_code

    return [run(), run(asked_at=2), run(begin=2)]


def test_a_loop_that_asks_for_signals_ends_on_all_ranks_and_resumes_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    for (whole, _), (stopped, code), (resumed, none) in pool.run(2, stopped_here, tmp_path):
        assert (len(whole), len(stopped), code, none) == (3, 2, 128 + signal.SIGTERM, 0)
        assert stopped + resumed == whole
