"""The saves of a run: when they come, how many stay, how a run goes on from them, and what is refused."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from shardwise import checkpoint
from shardwise.comm import alone
from shardwise.errors import CheckpointError, ConfigError, DivergedError
from shardwise.train import RunConfig
from shardwise.train.references import resolve
from tests.contracts.object_file_system import ObjectFileSystem
from tests.refusals import Refusals
from tests.train.row_kinds import run_of
from tests.train.runs import PLAIN, finished, laid_out, plain_losses, small_run, without_times

SAVES = (
    *("train.steps=6", "checkpoint.every=2", "model.loss=net.py:stops"),
    *("train.global_batch=8", "train.microbatch=2"),  # four microbatches of one process, one of four data ranks
)
NOISY = "model.factory=net.py:Noisy"
BF16 = "precision.compute=bfloat16"
DYNAMIC, FIXED = "precision.loss_scale=dynamic", "precision.loss_scale=1024"
TP = "tensor.rules={embedding='vocab', head='vocab'}"


def stopped(config: RunConfig, *, after_updates: float = 4.5) -> None:
    """Run `config` until the loss raises an error, in the update after so many."""
    loss: Any = resolve("net.py:stops", folder=config.folder, key="loss")
    names = loss.__globals__
    names["calls"].clear()
    mesh = config.plan.mesh  # all ranks of a pipeline call it, and all along tp
    calls = config.train.global_batch / config.train.microbatch * mesh.pp * mesh.tp
    names["stop_after"][:] = [int(after_updates * calls)]
    with pytest.raises(names["Stop"]):
        finished(config)
    names["stop_after"].clear()


@pytest.mark.parametrize(
    "overrides",
    [
        [NOISY],
        ["train.optimizer=net.py:Drawing", "checkpoint.background=false", "checkpoint.layout=whole"],
        # The scale 65536 is infinite in float16: the first updates are skipped, and take no learning rate.
        pytest.param(["precision.compute=float16", DYNAMIC], marks=pytest.mark.quick),
        ["mesh.tp=2", "mesh.dp_shard=2", "sharding.stage=3", BF16, TP],
        ["mesh.pp=2", "mesh.dp_shard=2", NOISY, BF16, "average.decay=0.5", "average.every=2"],
    ],
    ids=" ".join,
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been_bit_for_bit(tmp_path: Path, overrides: list[str]) -> None:
    whole, parts = (
        laid_out(tmp_path, *SAVES, f"train.output={tmp_path / name}", *overrides) for name in ("whole", "parts")
    )
    expected = finished(whole)
    stopped(parts)
    resumed = finished(parts, resume="auto")
    assert "goes on from step 4, saved in " in resumed.printed or "goes on from step 2, " in resumed.printed
    assert "seeded anew" not in resumed.printed
    assert without_times(resumed.metrics) == without_times(expected.metrics)
    assert any(line["skipped"] for line in expected.metrics) == (DYNAMIC in overrides)
    assert [line["step"] for line in resumed.metrics] == list(range(1, 7))
    assert resumed.printed.splitlines()[-1] == expected.printed.splitlines()[-1]
    assert not checkpoint.diff(whole.saves, parts.saves).tensors


def test_what_an_optimizer_draws_begins_anew_under_another_mesh_and_a_line_says_so(tmp_path: Path) -> None:
    drawing = [*SAVES, "train.optimizer=net.py:Drawing", "sharding.partition=whole"]
    stopped(small_run(tmp_path, *drawing))
    saves = str(tmp_path / "out" / "checkpoints")
    a, b = (
        finished(laid_out(tmp_path, *drawing, "mesh.pp=2", f"train.output={tmp_path / name}"), resume=saves)
        for name in "ab"
    )
    line = (
        "as in an optimizer, are seeded anew. The run was saved under mesh single on cpu, and goes on under mesh pp=2"
    )
    assert a.printed.count(line) == 1
    assert without_times(a.metrics) == without_times(b.metrics), "and it can be repeated"


@pytest.mark.parametrize("kind", ["jsonl", "stream", "endless", "turns"])
def test_rows_go_on_in_the_middle_of_an_epoch_under_another_layout(tmp_path: Path, kind: str) -> None:
    words = (*PLAIN, "checkpoint.every=4", f"train.output={tmp_path / 'parts'}")
    expected = plain_losses(run_of(tmp_path, kind, *PLAIN))
    finished(run_of(tmp_path, kind, *words, "train.steps=4", "mesh.dp_shard=2"))
    layout = [] if kind == "turns" else ["mesh.dp_shard=3", "sharding.stage=3"]
    then = finished(run_of(tmp_path, kind, *words, *layout), resume="auto")
    assert then.curve("loss") == pytest.approx(expected, rel=1e-5)


FROZEN = "train.groups=[{parameters=['norm', 'head.bias'], frozen=true}]"
ONE = "train.groups=[{parameters=['head.weight'], learning_rate=0.01, weight_decay=0.0}]"
NONE = "train.seed=5"


@pytest.mark.parametrize(
    ("then", "now", "layouts"),
    [
        (NONE, ONE, [[], []]),
        (NONE, FROZEN, [["average.decay=0.5"]] * 2),
        (FROZEN, ONE, [["mesh.dp_shard=2", "sharding.stage=3"], ["mesh.dp_shard=3"]]),
    ],
    ids=["none to one", "none to frozen", "frozen to one"],
)
def test_a_run_goes_on_after_its_groups_were_changed(
    tmp_path: Path, then: str, now: str, layouts: list[list[str]]
) -> None:
    words = (*PLAIN, "checkpoint.every=2", "train.evaluate_every=100")
    finished(laid_out(tmp_path, *words, then, "train.steps=4", *layouts[0]))
    catalogue = checkpoint.open(tmp_path / "out" / "checkpoints")
    state = {each: catalogue.read(each) for each in catalogue.tensors}
    resumed = finished(laid_out(tmp_path, *words, now, *layouts[1]), resume="auto")
    assert "optimizers have other groups than in the saved run: lr and weight_decay are those of now" in resumed.printed
    expected = plain_losses(small_run(tmp_path, *words, now), begin=4, state=state)
    assert resumed.curve("loss")[4:] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_over_says_so_and_evaluates_and_can_be_made_longer_without_new_patience(tmp_path: Path) -> None:
    words = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.evaluate_every=60", "checkpoint.every=8"]
    first = finished(small_run(tmp_path, *words, "train.steps=16"))
    again = finished(small_run(tmp_path, *words, "train.steps=5"), resume="auto")
    assert "nothing is left to do: the save is of step 16, and train.steps is 5" in again.printed
    assert again.printed.splitlines()[-1] == first.printed.splitlines()[-1]
    assert "loss curve" not in again.printed
    assert "saved step" not in again.printed
    with pytest.raises(DivergedError, match="not been finite since step 2: 20 updates in a row"):
        finished(small_run(tmp_path, *words, "train.steps=60"), resume="auto")


@pytest.mark.parametrize(
    ("then", "now", "said", "scale"),
    [
        ([], [DYNAMIC], "was left out in the saved run and is dynamic from here on, beginning at 65536", 65536.0),
        ([FIXED], [DYNAMIC], "was 1024.0 in the saved run and is dynamic from here on, beginning at 65536", 65536.0),
        ([DYNAMIC], [FIXED], "was dynamic in the saved run and is 1024.0 from here on", 1024.0),
        ([DYNAMIC], [], "was dynamic in the saved run and is left out from here on", None),
    ],
    ids=["none, dynamic", "number, dynamic", "dynamic, number", "dynamic, none"],
)
def test_another_loss_scale_than_in_the_saved_run_is_said_and_taken(
    tmp_path: Path, then: list[str], now: list[str], said: str, scale: float | None
) -> None:
    words = ["train.microbatch=12", "checkpoint.every=2"]
    finished(small_run(tmp_path, *then, *words, "train.steps=2"))
    resumed = finished(small_run(tmp_path, *now, *words, "train.steps=3"), resume="auto")
    assert f"precision.loss_scale {said}\n" in resumed.printed
    assert resumed.metrics[-1].get("loss_scale") == scale


def test_the_configuration_wins_where_it_was_changed_and_the_optimizer_where_it_was_not(tmp_path: Path) -> None:
    words = ["train.optimizer=net.py:Counting", "checkpoint.every=2", "train.decay=constant"]
    finished(small_run(tmp_path, *words))
    changed = [*words, "train.steps=9", "train.learning_rate=0.5", "train.weight_decay=0.25"]
    resumed = finished(small_run(tmp_path, *changed), resume="auto")
    assert "optimizer 0, group 0: lr was 0.02 in the saved run and is 0.5 from here on" in resumed.printed
    assert "optimizer 0, group 0: weight_decay was 0.1 in the saved run and is 0.25 from here on" in resumed.printed
    assert "group 1: weight_decay" not in resumed.printed
    assert resumed.curve("learning_rate")[-3:] == [0.5] * 3
    groups = checkpoint.open(tmp_path / "out" / "checkpoints").contents.settings["optimizers"][0]["groups"]
    assert [group["settings"]["count"] for group in groups] == [9, 9]
    assert [group["settings"]["weight_decay"] for group in groups] == [0.25, 0.0]
    assert "in the saved run" not in finished(small_run(tmp_path, *changed, "train.steps=11"), resume="auto").printed


# When they come, and how many stay ----------------------------------------------------------------------------------


def folders(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["checkpoint.keep=2", "checkpoint.background=false"], [9, 10]),
        (["checkpoint.keep=9"], [3, 6, 9, 10]),
        (["checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=3"], [3, 6, 9, 10]),
    ],
    ids=str,
)
def test_the_newest_saves_stay_and_the_last_update_is_saved(tmp_path: Path, words: list[str], steps: list[int]) -> None:
    done = finished(laid_out(tmp_path, "train.steps=10", "checkpoint.every=3", *words, "mesh.dp_shard=2"))
    saves = tmp_path / "out" / "checkpoints"
    assert [checkpoint.open(saves / folder).step for folder in folders(saves)] == steps
    assert all(checkpoint.verify(saves / folder).good for folder in folders(saves))
    assert f"saved step 10 to {saves} (" in done.printed


OBJECTS: dict[str, bytes] = {}


class Failing(ObjectFileSystem):
    """In "full", files of rank 1 cannot be written; of "kept", nothing can be removed."""

    protocol = "failing"

    def __init__(self, **_: Any) -> None:
        super().__init__(OBJECTS)

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if "full" in path and "rank00001" in path and "r" not in mode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, mode, **more)

    def rm_file(self, path: str) -> None:
        if "kept" in path:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        super().rm_file(path)


@pytest.mark.parametrize(("place", "said"), [("full", "Input/output error"), ("kept", "Operation not permitted")])
def test_saves_that_fail_stop_the_run_on_all_ranks(tmp_path: Path, place: str, said: str) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    address = f"checkpoint.path=failing://{tmp_path.name}/{place}"
    words = ["train.steps=20", "checkpoint.every=3", "checkpoint.keep=1", "train.evaluate_every=20", address]
    with pytest.raises(CheckpointError, match=said):
        finished(small_run(tmp_path, *words, num_processes=2))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert 3 <= len(lines) < 10, "the next save is the last chance to notice"


def test_saves_can_lie_at_an_address_and_none_are_made_unless_asked_for(tmp_path: Path) -> None:
    address = f"checkpoint.path=memory://{tmp_path.name}/run"
    words = ["train.steps=4", "checkpoint.every=2", "checkpoint.layout=whole", address]
    done = finished(small_run(tmp_path, *words, num_processes=2))
    assert f"saved step 4 to memory://{tmp_path.name}/run (" in done.printed
    longer = finished(small_run(tmp_path, *words, "train.steps=6"), resume="auto")
    assert f"goes on from step 4, saved in memory://{tmp_path.name}/run/save-00000002" in longer.printed
    none = finished(small_run(tmp_path, "checkpoint.keep=1", f"train.output={tmp_path / 'none'}"))
    assert not (tmp_path / "none" / "checkpoints").exists()
    assert "saved step" not in none.printed


def test_auto_begins_where_there_is_no_save_and_says_which(tmp_path: Path) -> None:
    torn = tmp_path / "out" / "checkpoints" / "save-00000001"
    torn.mkdir(parents=True)
    (torn / "5e1f09ab-rank00000.safetensors").write_bytes(b"half")
    done = finished(small_run(tmp_path, "checkpoint.every=3", num_processes=2), resume="auto")
    assert f"--resume auto: {torn.parent} holds no save yet; torn and not loadable: save-00000001" in done.printed
    assert folders(torn.parent) == ["save-00000001", "save-00000002"]


def test_a_resumed_run_continues_its_metrics_and_drops_what_came_after_the_save(tmp_path: Path) -> None:
    words = ["checkpoint.every=4", "train.steps=6"]
    done = finished(small_run(tmp_path, *words))
    saves, metrics = tmp_path / "out" / "checkpoints", tmp_path / "out" / "metrics.jsonl"
    branch = small_run(tmp_path, *words, f"train.output={tmp_path / 'branch'}", "train.steps=8")
    assert [line["step"] for line in finished(branch, resume=str(saves)).metrics] == [7, 8]
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == done.metrics
    assert [checkpoint.open(tmp_path / each / "checkpoints").step for each in ("out", "branch")] == [6, 8]
    with metrics.open("a") as file:
        file.write('{"step": 7, "loss"')  # torn by a kill
    resumed = finished(small_run(tmp_path, *words), resume=str(saves / "save-00000001"))
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert resumed.metrics[:4] == done.metrics[:4]
    elapsed = resumed.curve("elapsed_s")
    assert elapsed == sorted(elapsed)


@pytest.mark.parametrize(("victim", "num_processes"), [("manifest.json", 2), ("*rank00000.safetensors", 1)])
def test_a_damaged_newest_save_is_named_with_the_way_to_the_one_before_it(
    tmp_path: Path, victim: str, num_processes: int
) -> None:
    config = small_run(tmp_path, "checkpoint.every=2", num_processes=num_processes)
    through = finished(config)
    saves = tmp_path / "out" / "checkpoints"
    (file,) = (saves / "save-00000003").glob(victim)
    damaged = bytearray(file.read_bytes())
    damaged[-20] ^= 4
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError) as caught:
        finished(config, resume="auto")
    assert str(file) in str(caught.value)
    older = f"{saves}/save-00000002"
    assert str(caught.value).endswith(f"to take the save before it: --resume {older} (step 4)")
    assert finished(config, resume=older).curve("loss") == through.curve("loss")
    # What cannot be read does not count among those that are kept.
    kept = ["save-00000002"] if victim == "manifest.json" else []
    assert folders(saves) == [*kept, "save-00000003", "save-00000004"]


# What is refused ----------------------------------------------------------------------------------------------------


def again(*words: str, resume: str | None = "auto", ranks: int = 1, text: str = "") -> Any:
    """A run with other settings than the one whose saves are there."""

    def refused(folder: Path) -> None:
        finished(small_run(folder, "checkpoint.every=6"))
        before = (folder / "out" / "metrics.jsonl").read_text()
        config = small_run(folder, *words, num_processes=ranks)
        if text:
            (folder / "text.txt").write_text((folder / "text.txt").read_text().replace("7 squared", text, 1))
        try:
            finished(config, resume=resume)
        finally:
            assert (folder / "out" / "metrics.jsonl").read_text() == before

    return refused


def from_folder(folder: Path) -> None:
    config = small_run(folder)
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    finished(config, resume=str(folder))


def from_tensors(folder: Path) -> None:
    checkpoint.save(folder / "mine", {"w": torch.zeros(2)}, extra={"step": 3}, channel=alone())
    finished(small_run(folder), resume=str(folder / "mine"))


def damaged(folder: Path) -> None:
    config = small_run(folder, "checkpoint.every=6")
    finished(config)
    (folder / "out" / "checkpoints" / "save-00000001" / "manifest.json").write_text("{}")
    finished(config, resume="auto")


def rows_of_others(folder: Path) -> None:
    finished(run_of(folder, "sized", "checkpoint.every=6"))
    finished(run_of(folder, "sized", "data.seed=8", "data.dataset_options.size=60"), resume="auto")


def rows_of_text(folder: Path) -> None:
    finished(run_of(folder, "sized", "checkpoint.every=6"))
    finished(small_run(folder), resume="auto")


REFUSED = Refusals(
    "train.checkpointing",
    {
        "a fresh start where saves are": again(resume=None),
        "a fresh start of two ranks": again(resume=None, ranks=2),
        "another seed": again("train.seed=6"),
        "another global batch on two ranks": again("train.global_batch=24", ranks=2),
        "other rows": again("data.sequence_length=8"),
        "another share held out": again("data.held_out=0.3"),
        "another text of the same length": again(text="7 quadred"),
        "another width": again("model.config.width=16"),
        "no position of a run in a folder": from_folder,
        "no position of a run in a save": from_tensors,
        "no save": lambda folder: finished(small_run(folder), resume=str(folder / "absent")),
        "the only save is damaged": damaged,
        "other samples": rows_of_others,
        "a text instead of rows": rows_of_text,
    },
    kind=(ConfigError, CheckpointError),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_gone_on_with_is_refused(case: str) -> None:
    REFUSED.check(case)
