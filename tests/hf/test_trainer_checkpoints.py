"""Checkpoints of trainers: written in bounded memory with the plain Trainer's files, and complete or not there."""

import errno
import json
import os
import shutil
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
from shardwise.hf import checkpoint_folders, streamed_model, streamed_optimizer
from tests.engine.memory import peak_bytes
from tests.hf.tiny_trainers import HELD_OUT, PLANS, ROWS, arguments, assert_close, build, logged, plain, under

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
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


MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    # transformers splits its experts as it writes them.
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)),
    "adapters": adapted,
    "a module": Wrapped,
}


def make(
    trainers: Any, folder: str, microbatches: int, *, model: Callable[[], Any] = build, asked: Any = None, **ours: Any
) -> Any:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **(asked or {})}
    set_seed(1)
    args = arguments(folder, microbatches, **settings)
    return trainers.Trainer(model(), args, train_dataset=ROWS, eval_dataset=HELD_OUT, **ours)


def some(names: Iterable[str], *kept: str) -> list[Any]:
    """All cases; CI runs those that are named."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.stress) for name in names]


@pytest.mark.parametrize("name", some(MODELS, "experts", "a module"))
def test_files_are_those_of_the_plain_trainer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = []
    take = streamed_model.FileNotes.take

    def noted(notes: Any, *args: Any) -> None:
        take(notes, *args)
        streamed.append(notes.needed)

    monkeypatch.setattr(streamed_model.FileNotes, "take", noted)
    this = partial(make, model=MODELS[name], asked={"save_steps": 2})
    plain(this, folder=str(tmp_path / "plain"))
    under("stage 3", this, folder=str(tmp_path / "ours"))
    assert all(streamed)
    theirs, ours = tmp_path / "plain" / "checkpoint-2", tmp_path / "ours" / "checkpoint-2"
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


GOING_ON: dict[str, Any] = {
    "a parameter without a gradient": {"model": Wrapped},
    "adapters": {"model": adapted},
    "state with Python numbers": {"asked": {"optim": "adafactor", "learning_rate": 1e-3}},
}


@pytest.mark.parametrize("name", some(GOING_ON, "a parameter without a gradient"))
def test_a_run_goes_on_from_the_plain_trainer_and_back(name: str, tmp_path: Path) -> None:
    case = GOING_ON[name]
    this = partial(make, **{**case, "asked": {"max_steps": 3, "save_steps": 2, **case.get("asked", {})}})
    expected = [each for each in plain(this, folder=str(tmp_path / "plain")) if "train_loss" not in each]

    def resumed_from(checkpoint: Path, trainer: Any) -> Any:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return [each for each in logged(trainer) if "train_loss" not in each]

    ours = str(tmp_path / "ours")
    for found in under("stage 3", this, partial(resumed_from, tmp_path / "plain" / "checkpoint-2"), folder=ours):
        assert_close(found, expected)
    under("stage 3", this, folder=str(tmp_path / "again"))
    assert_close(plain(this, partial(resumed_from, tmp_path / "again" / "checkpoint-2")), expected)


def images() -> Any:
    """A model whose files have other names than itself."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4))


PICTURES = [{"pixel_values": torch.full((3, 8, 8), number / 8).cos(), "labels": number % 3} for number in range(8)]


@pytest.mark.parametrize("name", some(["renamed", "split"], "split"))
def test_weights_are_taken_over_from_files_that_rename_or_split_them(name: str, tmp_path: Path) -> None:
    asked = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}

    def this(*args: Any, **ours: Any) -> Any:
        trainer = make(*args, model=images if name == "renamed" else MODELS["experts"], asked=asked, **ours)
        if name == "renamed":
            trainer.train_dataset = trainer.eval_dataset = PICTURES
        return trainer

    expected = [each for each in plain(this, folder=str(tmp_path / "plain")) if "train_loss" not in each]
    checkpoint = str(tmp_path / "plain" / "checkpoint-2")

    def loaded(trainer: Any) -> Any:
        trainer._load_from_checkpoint(checkpoint)
        loss = trainer.evaluate()["eval_loss"]
        trainer.state.log_history.clear()
        trainer.train(resume_from_checkpoint=checkpoint)
        return loss, [each for each in logged(trainer) if "train_loss" not in each]

    for loss, found in under("stage 3", this, loaded, folder=str(tmp_path / "ours")):
        assert_close(found, expected)
        assert_close([{"eval_loss": loss}], [{"eval_loss": each["eval_loss"]} for each in expected[3:4]])


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "pickles": lambda model, path: torch.save(dict(model.named_parameters()), path),
    "texts": lambda model, path: path.write_text(str(model.lm_head.weight)),
    "arrays": lambda model, path: np.savez(path, model.lm_head.weight.detach().numpy()),
}


@pytest.mark.parametrize("name", some(WRITERS, "pickles"))
def test_what_a_model_writes_with_its_values_has_them(name: str, tmp_path: Path) -> None:
    class Writing(LlamaForCausalLM):
        def save_pretrained(self, save_directory: Any, *args: Any, **more: Any) -> None:
            super().save_pretrained(save_directory, *args, **more)
            WRITERS[name](self, Path(save_directory) / "own.npz")

    this = partial(make, model=lambda: Writing(LlamaConfig(**SIZES)))
    under("stage 3", this, lambda trainer: [trainer.engine, trainer.save_model()], folder=str(tmp_path / "ours"))
    plain(this, lambda trainer: trainer.save_model(), folder=str(tmp_path / "plain"))
    assert (tmp_path / "ours" / "own.npz").read_bytes() == (tmp_path / "plain" / "own.npz").read_bytes()


def test_shards_have_the_index_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = LlamaForCausalLM.save_pretrained
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", partial_of(save, max_shard_size="8KB"))
    for folder, run in (("plain", plain), ("ours", partial(under, "pp"))):
        run(partial(make, asked={"max_steps": 1}), folder=str(tmp_path / folder))
    theirs, ours = tmp_path / "plain" / "checkpoint-1", tmp_path / "ours" / "checkpoint-1"
    index = "model.safetensors.index.json"
    assert json.loads((ours / index).read_text()) == json.loads((theirs / index).read_text())
    assert len(list(ours.glob("model-*.safetensors"))) > 2
    assert isinstance(LlamaForCausalLM.from_pretrained(ours), LlamaForCausalLM)


def partial_of(method: Any, **more: Any) -> Any:
    return lambda self, *args, **kwargs: method(self, *args, **kwargs, **more)


def test_no_rank_holds_the_model_or_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_tensors, "WINDOW_BYTES", 1 << 14)
    sizes = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    this = partial(make, model=lambda: LlamaForCausalLM(LlamaConfig(**sizes)), asked={"max_steps": 1})
    plain(this, folder=str(tmp_path / "plain"))
    checkpoint = str(tmp_path / "plain" / "checkpoint-1")
    whole = 4 * LlamaForCausalLM(LlamaConfig(**sizes)).num_parameters()
    largest = 4 * 128 * 256

    def measured(trainer: Any) -> list[int]:
        trainer.train()
        trainer.is_in_train = False
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


def resumed(trainer: Any) -> Any:
    trainer.train(resume_from_checkpoint=True)
    return [each for each in logged(trainer) if "train_loss" not in each]


@cache
def four_steps() -> Any:
    asked = {"max_steps": 4, "save_strategy": "no"}
    return [each for each in plain(partial(make, asked=asked)) if "train_loss" not in each]


KILLS = {
    "before the model": (streamed_model.FileNotes, "write"),
    "before the optimizer": (streamed_optimizer._StateArchive, "write"),
    "before the scheduler": (torch, "save"),
    "before the state": (TrainerState, "save_to_json"),
    "before the name": (checkpoint_folders, "_sync"),
    "before old folders go": (shutil, "rmtree"),
}


@pytest.mark.parametrize("at", some(KILLS, "before the optimizer", "before the state", "before old folders go"))
def test_a_killed_save_is_no_checkpoint(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = partial(make, asked={"max_steps": 4, "save_total_limit": 1})
    holder, name = KILLS[at]
    trainer = this(hf, str(tmp_path), 4, plan=sw.Plan())

    class KillsThird(transformers.TrainerCallback):
        """The third save is killed; the second is the last good one."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                monkeypatch.setattr(holder, name, killed)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    trainer.add_callback(KillsThird())
    with pytest.raises(Killed):
        trainer.train()
    monkeypatch.undo()
    last = 3 if at == "before old folders go" else 2
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / f"checkpoint-{last}")
    assert_close(resumed(this(hf, str(tmp_path), 4, plan=sw.Plan())), four_steps())
    # A later save clears away what the killed one left.
    assert [each.name for each in tmp_path.iterdir() if "checkpoint" in each.name] == ["checkpoint-4"]


def test_a_checkpoint_that_was_to_be_replaced_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = partial(make, asked={"max_steps": 1})
    under("one process", this, folder=str(tmp_path))
    rename = os.rename

    def killed(source: Any, target: Any) -> None:
        rename(source, target)
        raise Killed

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(Killed):
        this(hf, str(tmp_path), 4, plan=sw.Plan()).train()
    monkeypatch.undo()
    assert get_last_checkpoint(str(tmp_path)) is None
    trainer = this(hf, str(tmp_path), 4, plan=sw.Plan())
    assert trainer._sw_checked(True) == str(tmp_path / "checkpoint-1")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-1"]
    trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("at", some(list(KILLS)[:3], "before the model"))
def test_a_full_disk_is_said_on_all_ranks_and_leaves_no_checkpoint(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, name = KILLS[at]

    def full(*args: Any, **kwargs: Any) -> None:
        # As torch.save has it, and as files have it.
        raise RuntimeError("disk full") if holder is torch else OSError(errno.ENOSPC, "disk full", str(tmp_path))

    def refused(trainer: Any) -> str:
        monkeypatch.setattr(holder, name, full)
        with pytest.raises(ShardwiseError) as found:
            trainer.train()
        return str(found.value)

    for words in under("pp", make, refused, folder=str(tmp_path)):
        assert "disk full" in words
    assert list(tmp_path.iterdir()) == []


CUT = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", some(CUT, "model.safetensors", "trainer_state.json"))
def test_files_that_are_cut_off_are_named_on_all_ranks(name: str, tmp_path: Path) -> None:
    plain(make, folder=str(tmp_path))
    file = tmp_path / "checkpoint-2" / name
    file.write_bytes(file.read_bytes()[:-9])

    def refused(trainer: Any) -> str:
        with pytest.raises(CheckpointError) as found:
            trainer.train(resume_from_checkpoint=str(file.parent))
        return str(found.value)

    words = under("pp", make, refused, folder=str(tmp_path))
    assert words[0] == words[1]
    assert str(file) in words[0]
    assert "give another checkpoint" in words[0]
    assert "weights_only" not in words[0]
    with pytest.warns(UserWarning, match=f"checkpoint-2 is passed over for .*checkpoint-1: .*{name}"):
        under("one process", make, resumed, folder=str(tmp_path))


def test_without_a_complete_checkpoint_nothing_is_resumed(tmp_path: Path) -> None:
    def refused(trainer: Any) -> str:
        with pytest.raises(ShardwiseError) as found:
            trainer.train(resume_from_checkpoint=True)
        return str(found.value)

    assert all("has no checkpoint to resume from" in each for each in under("pp", make, refused, folder=str(tmp_path)))
    (tmp_path / "checkpoint-7").mkdir()
    words = under("pp", make, refused, folder=str(tmp_path))
    assert all("trainer_state.json is missing, which is written last" in each for each in words)


def test_the_scale_of_losses_goes_from_a_plain_checkpoint_to_ours_and_back(tmp_path: Path) -> None:
    plain(make, folder=str(tmp_path / "plain"))
    theirs = tmp_path / "plain" / "checkpoint-1"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    torch.save({**scaler.state_dict(), "_growth_tracker": 7}, theirs / "scaler.pt")
    precision = sw.Precision(compute="float16", loss_scale="dynamic")

    def scale(channel: sw.Channel) -> Any:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3), precision=precision)
        trainer = make(hf, str(tmp_path / "ours"), 2, plan=plan, channel=channel)
        trainer.train(resume_from_checkpoint=str(theirs))
        return trainer.engine.settings()["loss_scale"]

    assert sw.simulate(2, scale) == [{"scale": 2.0**9, "in_a_row": 8}] * 2
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(torch.load(tmp_path / "ours" / "checkpoint-2" / "scaler.pt", weights_only=True))
    assert (back.get_scale(), back._get_growth_tracker()) == (2.0**9, 8)


@pytest.mark.parametrize("name", some(["stage 3", "pp", "tp"], "stage 3"))
def test_on_a_device_runs_are_those_of_one_process(name: str, fake: str, tmp_path: Path) -> None:
    plan, num_data_ranks = PLANS[name]
    asked = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 2}
    this = partial(make, asked=asked)

    def on(channel: sw.Channel) -> Any:
        ours = partial(this, hf, str(tmp_path), 4 // num_data_ranks, plan=plan, channel=channel)
        found = []
        for checkpoint in (None, str(tmp_path / "checkpoint-2")):
            trainer = ours()
            # As transformers has it where its own devices are.
            trainer.args.__dict__["_setup_devices"] = channel.device
            trainer.train(resume_from_checkpoint=checkpoint)
            assert trainer.accelerator.device == channel.device
            found.append(logged(trainer))
        return found

    expected = plain(this)
    for first, second in sw.simulate(plan.mesh.size, on, device=fake):
        assert_close(first, expected)
        assert_close(second[:-1], expected[:-1])
