"""Checkpoints of trainers: written in bounded memory with the plain Trainer's files, and complete or not there."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerState,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

import shardwise as sw
import shardwise.hf as hf
from shardwise.checkpoint import full_tensors
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.hf.checkpoint_folders import newest_complete
from tests.engine.memory import peak_bytes
from tests.hf.tiny_trainers import HELD_OUT, ROWS, arguments, assert_close, build, logged, plain, under

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


class Wrapped(nn.Module):
    """No model of transformers, with a buffer, a frozen parameter and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.inner.model.norm.weight.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def adapted() -> Any:
    import peft

    set_seed(1)
    return peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


def images() -> Any:
    """A model whose files have other names than itself."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4))


PICTURES = [{"pixel_values": torch.full((3, 8, 8), number / 8).cos(), "labels": number % 3} for number in range(8)]
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    # With a parameter without a gradient.
    "a module": (Wrapped, {}),
    # transformers splits its experts as it writes them.
    "experts": (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)), {}),
    "tied": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), {}),
    "adapters": (adapted, {}),
    "pictures": (images, {}),
    "state with Python numbers": (build, {"optim": "adafactor", "learning_rate": 1e-3}),
}
"""Builders, and settings of the trainer."""


def make(
    trainers: Any, folder: str, microbatches: int, *, model: Callable[[], Any] = build, asked: Any = None, **ours: Any
) -> Any:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **(asked or {})}
    set_seed(1)
    args = arguments(folder, microbatches, **settings)
    rows = (PICTURES, PICTURES) if model is images else (ROWS, HELD_OUT)
    return trainers.Trainer(model(), args, train_dataset=rows[0], eval_dataset=rows[1], **ours)


def steps_of(trainer: Any) -> Any:
    return [each for each in logged(trainer) if "train_loss" not in each]


def resumed(trainer: Any, checkpoint: Any = True) -> Any:
    trainer.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(checkpoint))
    return steps_of(trainer)


def alone(folder: Path, **asked: Any) -> Any:
    """A trainer of one rank."""
    return make(hf, str(folder), 4, asked=asked, plan=sw.Plan())


def some(names: Iterable[str], *kept: str) -> list[Any]:
    """All cases; CI runs those that are named."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.stress) for name in names]


def assert_same_files(ours: Path, theirs: Path) -> None:
    added = {"shardwise", "rng_state_0.pth", "rng_state_1.pth"}
    assert {each.name for each in ours.iterdir()} == {each.name for each in theirs.iterdir()} | added
    (file,) = theirs.glob("*.safetensors")
    wanted, found = (safetensors.torch.load_file(each) for each in (file, ours / file.name))
    assert list(found) == list(wanted)
    for key, each in wanted.items():
        torch.testing.assert_close(found[key], each, rtol=1e-4, atol=1e-5)
    wanted, found = (torch.load(each / "optimizer.pt", weights_only=True) for each in (theirs, ours))
    assert found["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(found["state"], wanted["state"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MODELS, "a module", "experts"))
def test_files_are_those_of_the_plain_trainer_and_a_run_goes_on_from_it_and_back(name: str, tmp_path: Path) -> None:
    model, settings = MODELS[name]
    evaluated = {"max_steps": 3, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    this = partial(make, model=model, asked={**evaluated, **settings})
    ours, theirs = tmp_path / "ours" / "checkpoint-2", tmp_path / "plain" / "checkpoint-2"
    expected = [each for each in plain(this, folder=str(theirs.parent)) if "train_loss" not in each]
    under("stage 3", this, folder=str(ours.parent))
    if not settings:
        assert_same_files(ours, theirs)
    for found in under("stage 3", this, partial(resumed, checkpoint=theirs), folder=str(tmp_path / "again")):
        assert_close(found, expected)
    if name not in ("experts", "pictures"):  # the plain Trainer does not read those into such a model
        assert_close(plain(this, partial(resumed, checkpoint=ours)), expected)


def test_what_a_model_writes_with_its_values_has_them(tmp_path: Path) -> None:
    class Writing(LlamaForCausalLM):
        def save_pretrained(self, save_directory: Any, *args: Any, **more: Any) -> None:
            super().save_pretrained(save_directory, *args, **more)
            folder = Path(save_directory)
            torch.save(dict(self.named_parameters()), folder / "own.pt")
            (folder / "own.txt").write_text(str(self.lm_head.weight))
            np.savez(folder / "own.npz", self.lm_head.weight.detach().numpy())

    this = partial(make, model=lambda: Writing(LlamaConfig(**SIZES)))
    under("stage 3", this, lambda trainer: [trainer.engine, trainer.save_model()], folder=str(tmp_path / "ours"))
    plain(this, lambda trainer: trainer.save_model(), folder=str(tmp_path / "plain"))
    for name in ("own.pt", "own.txt", "own.npz"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


class Sharded(LlamaForCausalLM):
    def save_pretrained(self, *args: Any, **more: Any) -> None:
        super().save_pretrained(*args, **{**more, "max_shard_size": "8KB"})


def test_shards_have_the_index_of_the_library(tmp_path: Path) -> None:
    this = partial(make, model=lambda: Sharded(LlamaConfig(**SIZES)), asked={"max_steps": 1})
    for folder, run in (("plain", plain), ("ours", partial(under, "pp"))):
        run(this, folder=str(tmp_path / folder))
    theirs, ours = tmp_path / "plain" / "checkpoint-1", tmp_path / "ours" / "checkpoint-1"
    index = "model.safetensors.index.json"
    assert json.loads((ours / index).read_text()) == json.loads((theirs / index).read_text())
    assert len(list(ours.glob("model-*.safetensors"))) > 2
    assert isinstance(LlamaForCausalLM.from_pretrained(ours), LlamaForCausalLM)


def test_no_rank_holds_the_model_or_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_tensors, "WINDOW_BYTES", 1 << 14)  # else a window is larger than the small model
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    this = partial(make, model=lambda: LlamaForCausalLM(LlamaConfig(**sizes)), asked={"max_steps": 1})
    plain(this, folder=str(tmp_path / "plain"))
    checkpoint = str(tmp_path / "plain" / "checkpoint-1")
    whole = 4 * LlamaForCausalLM(LlamaConfig(**sizes)).num_parameters()
    largest = 4 * 128 * 256

    def measured(trainer: Any) -> list[int]:
        trainer.train()
        trainer.is_in_train = False
        # Methods that transformers calls: a whole run has the memory of its steps in it.
        calls = [
            partial(trainer._save_checkpoint, None, None),
            partial(trainer._load_from_checkpoint, checkpoint),
            partial(trainer._load_optimizer_and_scheduler, checkpoint),
        ]
        # One thread is looked at: the profiler cannot look at two.
        return [peak_bytes(call) if trainer.engine.channel.rank == 0 else call() or 0 for call in calls]

    peaks = under("stage 3", this, measured, folder=str(tmp_path / "ours"))[0]
    # Whole, the weights alone are 30 times the largest of them.
    assert max(peaks) < 4 * largest < whole / 6, (peaks, largest, whole)


class Killed(BaseException):
    """Ends a run as a signal does: nothing of ours cleans up."""


@cache
def four_steps() -> Any:
    return [
        each for each in plain(partial(make, asked={"max_steps": 4, "save_strategy": "no"})) if "train_loss" not in each
    ]


KILLS: dict[str, tuple[Any, str]] = {
    "before the model": (LlamaForCausalLM, "save_pretrained"),
    "before the optimizer": (torch.optim.Optimizer, "state_dict"),
    "before the scheduler": (torch, "save"),
    "before the state": (TrainerState, "save_to_json"),
    "before the name": (os, "fsync"),
    "before old folders go": (shutil, "rmtree"),
}
"""Functions of other libraries that a save calls."""


@pytest.mark.parametrize("at", some(KILLS, "before the optimizer", "before the state", "before old folders go"))
def test_a_killed_save_is_no_checkpoint(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = alone(tmp_path, max_steps=4, save_total_limit=1)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    class KillsThird(transformers.TrainerCallback):
        """The third save is killed; the second is the last good one."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                monkeypatch.setattr(*KILLS[at], killed)

    trainer.add_callback(KillsThird())
    with pytest.raises(Killed):
        trainer.train()
    monkeypatch.undo()
    last = 3 if at == "before old folders go" else 2
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / f"checkpoint-{last}")
    assert_close(resumed(alone(tmp_path, max_steps=4, save_total_limit=1)), four_steps())
    # A later save clears away what the killed one left.
    assert [each.name for each in tmp_path.iterdir() if "checkpoint" in each.name] == ["checkpoint-4"]


@pytest.mark.quick
def test_a_checkpoint_that_was_to_be_replaced_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, max_steps=1).train()
    rename = os.rename

    def killed(source: Any, target: Any) -> None:
        rename(source, target)
        raise Killed

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(Killed):
        alone(tmp_path, max_steps=1).train()
    monkeypatch.undo()
    assert get_last_checkpoint(str(tmp_path)) is None
    assert len(resumed(alone(tmp_path, max_steps=2))) == 2
    assert sorted(each.name for each in tmp_path.glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-2"]


def test_a_checkpoint_counts_where_it_is_later_than_what_else_a_run_may_resume_from(tmp_path: Path) -> None:
    alone(tmp_path, max_steps=2).train()
    assert newest_complete(tmp_path, after=1) == (tmp_path / "checkpoint-2", {})
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    found, passed = newest_complete(tmp_path, after=1)
    assert (found, [*passed]) == (None, [tmp_path / "checkpoint-2"])
    assert newest_complete(tmp_path, after=2) == (None, {})
    assert newest_complete(tmp_path / "none", after=0) == (None, {})


def test_a_run_with_copies_begins_where_there_is_nothing_to_resume_from(tmp_path: Path) -> None:
    """A launcher starts one script, the first time and after a loss."""
    copied = partial(alone, tmp_path, of=hf.TrainingArguments, max_steps=4, shardwise_replicas=1)
    assert_close(resumed(copied(save_strategy="no")), four_steps())
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(CheckpointError, match="is complete"):
        resumed(copied())


@pytest.mark.quick
def test_a_run_goes_on_from_the_latest_step_and_not_from_the_last_name(tmp_path: Path) -> None:
    alone(tmp_path, max_steps=10, save_steps=5).train()
    trainer = alone(tmp_path, max_steps=11, save_steps=5)
    assert len(resumed(trainer)) == 11
    assert trainer.engine.counters.updates == 1, "checkpoint-10 is later than checkpoint-5"


def test_a_full_disk_is_said_on_all_ranks_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "disk full", str(tmp_path))

    def refused(trainer: Any) -> str:
        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
        with pytest.raises(ShardwiseError) as found:
            trainer.train()
        return str(found.value)

    for words in under("pp", make, refused, folder=str(tmp_path)):
        assert "disk full" in words
    assert list(tmp_path.glob("*checkpoint*")) == []


CUT = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


def refused_resume(trainer: Any, checkpoint: Any = True) -> str:
    with pytest.raises(CheckpointError) as found:
        resumed(trainer, checkpoint)
    return str(found.value)


@pytest.mark.parametrize("name", some(CUT, "model.safetensors", "trainer_state.json"))
def test_files_that_are_cut_off_are_named_on_all_ranks(name: str, tmp_path: Path) -> None:
    plain(make, folder=str(tmp_path))
    file = tmp_path / "checkpoint-2" / name
    file.write_bytes(file.read_bytes()[:-9])
    words = under("pp", make, partial(refused_resume, checkpoint=file.parent), folder=str(tmp_path))
    assert words[0] == words[1]
    assert str(file) in words[0]
    assert "give another checkpoint" in words[0]
    assert "weights_only" not in words[0]
    with pytest.warns(UserWarning, match=f"checkpoint-2 is passed over for .*checkpoint-1: .*{name}"):
        under("one process", make, resumed, folder=str(tmp_path))


def test_without_a_complete_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    words = under("pp", make, refused_resume, folder=str(tmp_path))
    assert all("has no checkpoint to resume from" in each for each in words)
    (tmp_path / "checkpoint-7").mkdir()
    words = under("pp", make, refused_resume, folder=str(tmp_path))
    assert all("trainer_state.json is missing, which is written last" in each for each in words)


@pytest.mark.quick
def test_the_scale_of_losses_goes_from_a_plain_checkpoint_to_ours_and_back(tmp_path: Path) -> None:
    plain(make, folder=str(tmp_path / "plain"))
    theirs = tmp_path / "plain" / "checkpoint-1"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    scaler.scale(torch.ones(()))  # the scale is made at the first loss
    torch.save({**scaler.state_dict(), "_growth_tracker": 7}, theirs / "scaler.pt")
    precision = sw.Precision(compute="float16", loss_scale="dynamic")

    def scale(channel: sw.Channel) -> Any:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3), precision=precision)
        trainer = make(hf, str(tmp_path / "ours"), 2, plan=plan, channel=channel)
        trainer.train(resume_from_checkpoint=str(theirs))
        return trainer.engine.settings()["loss_scale"]

    assert sw.simulate(2, scale) == [{"scale": 2.0**9, "in_a_row": 8}] * 2
    back = torch.load(tmp_path / "ours" / "checkpoint-2" / "scaler.pt", weights_only=True)
    torch.amp.GradScaler("cpu").load_state_dict(back)
    assert (back["scale"], back["_growth_tracker"]) == (2.0**9, 8)


def test_weights_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    under("stage 3", partial(make, asked={"save_only_model": True}), folder=str(tmp_path))
    names = {each.name for each in (tmp_path / "checkpoint-2").iterdir()}
    assert "model.safetensors" in names
    assert not {"shardwise", "optimizer.pt"} & names

    def evaluated(trainer: Any, *, late: bool = False) -> float:
        if late:
            trainer.evaluate()
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))  # as transformers does for weights alone
        return float(trainer.evaluate()["eval_loss"])

    wanted = plain(make, evaluated)
    assert under("pp", make, evaluated) == pytest.approx([wanted] * 2, rel=1e-6)
    assert under("stage 3", make, partial(evaluated, late=True)) == pytest.approx([wanted] * 2, rel=1e-6)


@pytest.mark.quick
def test_the_best_model_is_kept_loaded_and_saved_whole(tmp_path: Path) -> None:
    asked = {
        **{"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1},
        **{"learning_rate": 0.5, "metric_for_best_model": "loss", "max_steps": -1},
    }

    def run(trainer: Any) -> Any:
        trainer.train()
        trainer.save_model()
        return trainer.evaluate()["eval_loss"], trainer.state.best_metric, trainer.state.best_global_step

    best = partial(make, asked=asked)
    wanted = plain(best, run, folder=str(tmp_path / "plain"))
    assert wanted[2] == 1
    for found in under("stage 3", best, run, folder=str(tmp_path / "ours")):
        assert found == pytest.approx(wanted, rel=1e-5)
    kept = [[each.name for each in (tmp_path / side).glob("checkpoint-*")] for side in ("ours", "plain")]
    assert kept[0] == kept[1]
    row = {key: each[None] for key, each in HELD_OUT[0].items()}
    ours, theirs = (LlamaForCausalLM.from_pretrained(tmp_path / side).eval() for side in ("ours", "plain"))
    assert ours(**row).loss.item() == pytest.approx(theirs(**row).loss.item(), rel=1e-5)


def test_without_optimizer_pt_runs_go_on_from_the_save(tmp_path: Path) -> None:
    def lean(trainer: Any) -> None:
        trainer.args.shardwise_optimizer_pt = False
        trainer.train()

    under("stage 3", make, lean, folder=str(tmp_path))
    assert not (tmp_path / "checkpoint-1" / "optimizer.pt").exists()
    go_on = partial(resumed, checkpoint=tmp_path / "checkpoint-1")
    expected = [each for each in plain(make) if "train_loss" not in each]
    for found in under("stage 1", make, go_on, folder=str(tmp_path / "again")):
        assert_close(found, expected)


def test_a_checkpoint_is_complete_for_every_rank_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_read = threading.Event()
    write, read = TrainerState.save_to_json, TrainerState.load_from_json

    def written(state: TrainerState, path: str) -> None:
        has_read.wait(0.2)  # after the others have read it, where they do not wait
        write(state, path)

    def looked_for(path: str) -> Any:
        try:
            return read(path)
        finally:
            has_read.set()

    monkeypatch.setattr(TrainerState, "save_to_json", written)
    monkeypatch.setattr(TrainerState, "load_from_json", looked_for)

    def again(trainer: Any) -> Any:
        trainer.train()
        return trainer.train(resume_from_checkpoint=True)

    under("pp", partial(make, asked={"max_steps": 1, "save_steps": 1}), again, folder=str(tmp_path))
