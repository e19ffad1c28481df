"""A script with `shardwise.hf.Trainer` in processes as torchrun starts them, against the plain one in one process."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, TrainerCallback

import shardwise as sw
import shardwise.hf as hf
from shardwise.comm import Channel
from shardwise.errors import PeerError
from shardwise.runs.run_folder import view
from tests.hf.tiny_trainers import PLANS, assert_close, logged, plain, simple, trained, under
from tests.processes.as_started import outputs
from tests.processes.pool import Pool

SCRIPT = """
import json, sys
from transformers import HfArgumentParser
from shardwise.hf import Trainer, TrainingArguments
from tests.hf.tiny_trainers import HELD_OUT, ROWS, build, logged

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(build(), args, train_dataset=ROWS, eval_dataset=HELD_OUT)
trainer.train()
found = trainer.predict(HELD_OUT)
trainer.save_model()
if trainer.is_world_process_zero():
    print(json.dumps([logged(trainer), found.predictions.shape, args.world_size]))
"""
PLAN = "mesh.dp_shard = 2\nsharding.stage = 3\n"
FLAGS = {
    **{"per_device_train_batch_size": "2", "per_device_eval_batch_size": "2", "gradient_accumulation_steps": "2"},
    **{"num_train_epochs": "1", "learning_rate": "1e-2", "logging_steps": "1", "save_strategy": "epoch", "seed": "3"},
    **{"report_to": "none", "disable_tqdm": "true", "use_cpu": "true"},
}


def test_two_processes_train_predict_and_save_as_one(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    out = tmp_path / "out"
    flags = FLAGS | {"output_dir": str(out), "shardwise_plan": str(plan)}
    arguments = ["-c", SCRIPT, *(text for name, each in flags.items() for text in (f"--{name}", each))]
    told = outputs([arguments] * 2)
    # Their progress and logs go to rank 0's output as well.
    (line,) = [each for each in told[0].splitlines() if each.startswith("[[")]
    log, shape, world_size = json.loads(line)
    assert_close(log, plain(simple()))
    assert (shape, world_size) == ([5, 8, 64], 2)
    assert "loss" not in told[1]
    for folder in (out, *out.glob("checkpoint-*")):
        assert isinstance(LlamaForCausalLM.from_pretrained(folder), LlamaForCausalLM)


class SignalAt(TrainerCallback):
    """A signal comes to this process in a step."""

    def __init__(self, number: signal.Signals, step: int) -> None:
        self.number, self.step = number, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            signal.raise_signal(self.number)


def stopped_here(channel: Channel, name: str, step: int, folder: Path) -> Any:
    """What is logged by a run, by one that a signal to the last rank ends in a step, and by the one that resumes."""
    plan, num_data_ranks = PLANS[name]
    asked: dict[str, Any] = {"num_train_epochs": 2, "eval_strategy": "epoch", "enable_jit_checkpoint": True}
    make = simple(**asked)

    def trainer(at: str) -> Any:
        return make(hf, str(folder / at), 4 // num_data_ranks, plan=plan, channel=channel)

    whole, stopped = trained(trainer("whole")), trainer("stopped")
    if channel.rank == channel.size - 1:
        stopped.add_callback(SignalAt(signal.SIGUSR1, step))
    before = signal.getsignal(signal.SIGUSR1)
    stopped.train()
    assert signal.getsignal(signal.SIGUSR1) is before
    saved = sorted(each.name for each in (folder / "stopped").glob("*checkpoint*"))
    channel.exchange(b"", purpose="rank 0 has said how the run has ended")
    state = view(folder / "stopped").state
    channel.exchange(b"", purpose="the other one has looked")
    resumed = trainer("stopped")
    resumed.train(resume_from_checkpoint=True)
    return whole, logged(stopped), logged(resumed), stopped.preemption.exit_code, saved, state


@pytest.mark.parametrize(("name", "step"), [("stage 3", 1), ("pp", 2)], ids=["in an epoch", "at its end"])
def test_a_signal_to_one_rank_saves_and_ends_all_and_the_run_resumes_bit_for_bit(
    pool: Pool, name: str, step: int, tmp_path: Path
) -> None:
    for whole, stopped, resumed, code, saved, state in pool.run(2, stopped_here, name, step, tmp_path):
        assert (code, saved) == (128 + signal.SIGUSR1, [f"checkpoint-{step}"])
        assert state == f"stopped by SIGUSR1 after step {step}, which is saved"
        # Two steps and an evaluation are an epoch. The last line has means over one call of `train`.
        assert stopped[:-1] == whole[: 1 if step == 1 else 3]
        assert resumed[:-1] == whole[:-1]


class LostAt(TrainerCallback):
    """This process is lost in a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


COPIED: dict[str, Any] = {"num_train_epochs": 3, "eval_strategy": "epoch", "shardwise_replicas": 2}


def copied_here(channel: Channel, folder: Path, *, loses: bool = False) -> list[Any]:
    """What a run logs that loses its last rank, or one that resumes from what is newest."""
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(stage=3))
    make = simple(of=hf.TrainingArguments, **COPIED)
    trainer = make(hf, str(folder), 4 // channel.size, plan=plan, channel=channel)
    if not loses:
        trainer.train(resume_from_checkpoint=True)
        return logged(trainer)
    if channel.rank == channel.size - 1:
        trainer.add_callback(LostAt())
    with pytest.raises(PeerError):
        trainer.train()
    return []


lost_here = partial(copied_here, loses=True)


@pytest.mark.parametrize("size", [2, 1])
def test_a_run_that_has_lost_a_rank_resumes_from_memory_on_any_number_of_ranks(
    pool: Pool, size: int, tmp_path: Path
) -> None:
    whole, _ = under("stage 3", simple(**{**COPIED, "of": hf.TrainingArguments, "shardwise_replicas": None}))
    pool.run(2, lost_here, tmp_path, lost=[1])
    assert not [*tmp_path.glob("*checkpoint*")]
    for resumed in pool.run(size, copied_here, tmp_path):
        if size == 2:
            assert resumed[:-1] == whole[:-1]
        assert_close(resumed[:-1], whole[:-1])
