"""A script with `shardwise.hf.Trainer` in processes as torchrun starts them, against the plain one in one process."""

import json
from pathlib import Path

from transformers import LlamaForCausalLM

from tests.hf.tiny_trainers import assert_close, plain, simple
from tests.processes.as_started import outputs

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
