"""A run that was stopped and goes on is the run that was never stopped."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.errors import DivergedError
from shardwise.train import RunConfig
from shardwise.train.references import resolve
from shardwise.train.run_state import RandomStates
from tests.train.runs import Finished, finished, laid_out, small_run, without_times

SAVES = (
    *("train.steps=6", "checkpoint.every=2", "model.loss=net.py:stops"),
    *("train.global_batch=8", "train.microbatch=2"),  # four microbatches of one process, one of four data ranks
)
IN_THREES = ("train.global_batch=12",)  # for three data ranks
NOISY = "model.factory=net.py:Noisy"


def stopped(config: RunConfig, *, after_updates: float = 4.5) -> None:
    """Run `config` until the loss raises an error, in the update after so many."""
    loss: Any = resolve("net.py:stops", folder=config.folder, key="loss")
    names = loss.__globals__
    names["calls"].clear()
    calls = config.train.global_batch / config.train.microbatch * config.plan.mesh.pp  # all ranks of a pipeline call it
    names["stop_after"][:] = [int(after_updates * calls)]
    with pytest.raises(names["Stop"]):
        finished(config)
    names["stop_after"].clear()


def both(folder: Path, *overrides: str, num_processes: int = 1) -> tuple[Finished, Finished]:
    """A run that goes through, and the same one stopped in its fifth update and resumed."""
    whole, parts = (
        small_run(folder, *SAVES, f"train.output={folder / name}", *overrides, num_processes=num_processes)
        for name in ("whole", "parts")
    )
    through = finished(whole)
    stopped(parts)
    return through, finished(parts, resume="auto")


@pytest.mark.parametrize(
    ("num_processes", "overrides"),
    [
        (1, [NOISY]),
        (1, [NOISY, "checkpoint.background=false", "checkpoint.layout=whole"]),
        (1, [NOISY, "precision.compute=bfloat16", "train.microbatch=4"]),
        (1, ["train.optimizer=torch.optim:SGD", "train.optimizer_options.momentum=0.9", "train.decay=linear"]),
        (2, ["precision.compute=bfloat16"]),
        (2, ["precision.compute=bfloat16", "sharding.stage=0", "checkpoint.background=false"]),
        (2, ["sharding.partition=whole", "checkpoint.layout=whole", "train.microbatch=4"]),
        (4, ["mesh.dp_replicate=2", "mesh.dp_shard=2", "sharding.owners=dp_shard"]),
        (2, [NOISY, "mesh.pp=2"]),
        (4, [NOISY, "mesh.pp=2", "mesh.dp_shard=2", "precision.compute=bfloat16"]),
    ],
)
def test_what_a_resumed_run_measures_equals_the_uninterrupted_run_bit_for_bit(
    tmp_path: Path, num_processes: int, overrides: list[str]
) -> None:
    through, resumed = both(tmp_path, *overrides, num_processes=num_processes)
    assert "goes on from step 4, saved in " in resumed.printed or "goes on from step 2, " in resumed.printed
    assert "seeded anew" not in resumed.printed
    assert without_times(resumed.metrics) == without_times(through.metrics)
    assert [line["step"] for line in resumed.metrics] == list(range(1, 7))
    assert resumed.printed.splitlines()[-1] == through.printed.splitlines()[-1]


def test_a_resumed_run_has_the_averages_of_the_uninterrupted_one(tmp_path: Path) -> None:
    both(tmp_path, "average.decay=0.5", "average.every=2", num_processes=2)
    one, other = (checkpoint.open(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    averages = [name for name in one.tensors if name.endswith("/weight_average")]
    assert averages
    assert all(torch.equal(one.read(name), other.read(name)) for name in averages)
    # And without them it says what becomes of those that were saved.
    shorter = small_run(tmp_path, *SAVES, f"train.output={tmp_path / 'parts'}", "train.steps=7", num_processes=2)
    assert "parameters that the target does not keep; a plan keeps them" in finished(shorter, resume="auto").printed


DRAWING = """
import torch

class Drawing(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)
"""


@pytest.mark.parametrize("restores", [True, False])
def test_what_an_optimizer_draws_goes_on_because_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    if not restores:
        monkeypatch.setattr(RandomStates, "restore", lambda *_, **__: None)
    through, resumed = both(tmp_path, "train.optimizer=drawing.py:Drawing")
    assert (without_times(resumed.metrics) == without_times(through.metrics)) is restores


def test_what_an_optimizer_draws_begins_anew_under_another_mesh_and_a_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    drawing = [*SAVES, "train.optimizer=drawing.py:Drawing", "sharding.partition=whole"]
    stopped(small_run(tmp_path, *drawing))
    resumed = finished(small_run(tmp_path, *drawing, "mesh.pp=2", num_processes=2), resume="auto")
    line = (
        "as in an optimizer, are seeded anew. The run was saved under mesh single on cpu, and goes on under mesh pp=2"
    )
    assert resumed.printed.count(line) == 1


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """The run of one process that nobody stops, made once."""

    @cache
    def run(*rows: str) -> Finished:
        return finished(small_run(tmp_path_factory.mktemp("through"), *SAVES, NOISY, *rows))

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([*IN_THREES], [*IN_THREES, "mesh.dp_shard=3"]),
        (["mesh.dp_shard=2"], ["sharding.stage=0"]),
        (["mesh.dp_shard=2"], ["mesh.dp_replicate=2", "mesh.dp_shard=2"]),
        ([*IN_THREES, "mesh.dp_shard=3", "sharding.partition=whole"], [*IN_THREES, "mesh.dp_shard=2"]),
        (["mesh.pp=2"], ["mesh.pp=2", "mesh.dp_shard=2"]),
        (["mesh.pp=2", "mesh.dp_shard=2"], ["mesh.dp_replicate=2"]),
        (["mesh.dp_shard=2"], ["mesh.pp=3"]),
    ],
)
def test_a_run_goes_on_under_another_layout_with_nearly_the_same_losses_and_the_same_dropout(
    tmp_path: Path, through: Callable[..., Finished], before: list[str], after: list[str]
) -> None:
    expected = through(*IN_THREES) if IN_THREES[0] in before else through()
    stopped(laid_out(tmp_path, *SAVES, NOISY, *before))
    resumed = finished(laid_out(tmp_path, *SAVES, NOISY, *after), resume="auto")
    for curve in ("loss", "grad_norm", "held_out_loss", "learning_rate"):
        assert resumed.curve(curve) == pytest.approx(expected.curve(curve), rel=5e-5)
    assert "seeded anew" not in resumed.printed


@pytest.mark.parametrize(
    ("before", "after"), [([], ["mesh.pp=2"]), (["mesh.pp=3"], []), (["mesh.pp=2"], ["mesh.pp=3"])]
)
def test_a_run_goes_on_with_other_stages_bit_for_bit(
    tmp_path: Path, through: Callable[..., Finished], before: list[str], after: list[str]
) -> None:
    stopped(laid_out(tmp_path, *SAVES, NOISY, *before))
    resumed = finished(laid_out(tmp_path, *SAVES, NOISY, *after), resume="auto")
    assert without_times(resumed.metrics) == without_times(through().metrics)
    assert resumed.printed.splitlines()[-1] == through().printed.splitlines()[-1]


def test_a_resume_under_another_mesh_can_be_repeated_bit_for_bit(tmp_path: Path) -> None:
    noisy = [*SAVES, NOISY]
    stopped(small_run(tmp_path, *noisy, num_processes=2))
    saves = str(tmp_path / "out" / "checkpoints")
    again = [
        finished(small_run(tmp_path, *noisy, f"train.output={tmp_path / name}"), resume=saves) for name in ("a", "b")
    ]
    assert without_times(again[0].metrics) == without_times(again[1].metrics)
    assert again[0].metrics[0]["step"] > 1


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    constant = [*SAVES, NOISY, "train.decay=constant"]
    longer = finished(small_run(tmp_path, *constant, f"train.output={tmp_path / 'through'}"))
    finished(small_run(tmp_path, *constant, "train.steps=3"))
    resumed = finished(small_run(tmp_path, *constant), resume="auto")
    assert "goes on from step 3" in resumed.printed
    assert resumed.curve("loss") == longer.curve("loss")
    assert resumed.metrics[2]["held_out_loss"] is not None, "the line of step 3 is of the shorter run"


@pytest.mark.parametrize("steps", [6, 5])
def test_a_run_that_is_over_says_so_and_evaluates(tmp_path: Path, steps: int) -> None:
    done = finished(small_run(tmp_path, *SAVES))
    again = finished(small_run(tmp_path, *SAVES, f"train.steps={steps}"), resume="auto")
    assert f"nothing is left to do: the save is of step 6, and train.steps is {steps}" in again.printed
    assert again.metrics == done.metrics
    assert again.printed.splitlines()[-1] == done.printed.splitlines()[-1]
    assert "loss curve" not in again.printed
    assert "saved step" not in again.printed


def test_the_schedule_goes_on_after_the_updates_that_were_taken(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(
        "from net import next_token, Stop\n\ncalls = []\nstop = [True]\n\n"
        "def sometimes(logits, batch):\n    calls.append(0)\n"
        "    if stop[0] and len(calls) == 6:\n        raise Stop\n"
        "    return next_token(logits, batch) * (float('inf') if len(calls) in (2, 3) else 1.0)\n"
    )
    words = ["model.loss=huge.py:sometimes", "train.microbatch=12", "train.steps=8", "train.evaluate_every=99"]
    words += ["checkpoint.every=3", "checkpoint.background=false"]
    config = small_run(tmp_path, *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        names = resolve("huge.py:sometimes", folder=tmp_path, key="loss").__globals__
        with pytest.raises(names["Stop"]):
            finished(config)
        names["stop"][0] = False
        names["calls"][:] = [0] * 3
        resumed = finished(config, resume="auto")
        names["calls"].clear()
        through = finished(small_run(tmp_path, *words, f"train.output={tmp_path / 'through'}"))
    assert [line["skipped"] for line in through.metrics] == [False, True, True] + [False] * 5
    assert without_times(resumed.metrics) == without_times(through.metrics)


def test_patience_with_skipped_updates_is_not_renewed_by_a_resume(tmp_path: Path) -> None:
    words = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.evaluate_every=60", "checkpoint.every=8"]
    finished(small_run(tmp_path, *words, "train.steps=16"))
    with pytest.raises(DivergedError, match="not been finite since step 2: 20 updates in a row"):
        finished(small_run(tmp_path, *words, "train.steps=60"), resume="auto")


DYNAMIC, FIXED = "precision.loss_scale=dynamic", "precision.loss_scale=1024"
ONE_MICROBATCH = "train.microbatch=12"


def test_a_dynamic_scale_goes_on_where_it_was_and_metrics_have_it(tmp_path: Path) -> None:
    # The scale 65536 is infinite in float16.
    words = ["precision.compute=float16", DYNAMIC, "checkpoint.every=3", "train.decay=constant", ONE_MICROBATCH]
    through = finished(small_run(tmp_path, *words, f"train.output={tmp_path / 'through'}"))
    finished(small_run(tmp_path, *words, "train.steps=3"))
    resumed = finished(small_run(tmp_path, *words), resume="auto")
    scales = resumed.curve("loss_scale")
    assert scales[0] == 65536.0 > scales[2] == scales[3]
    assert [one / two for one, two in pairwise(scales)] == [1.0 + line["skipped"] for line in resumed.metrics[:-1]]
    assert resumed.curve("loss_scale") == through.curve("loss_scale")
    assert any(line["skipped"] for line in resumed.metrics)
    assert "loss_scale" not in resumed.printed


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
    finished(small_run(tmp_path, *then, ONE_MICROBATCH, "checkpoint.every=2", "train.steps=2"))
    resumed = finished(small_run(tmp_path, *now, ONE_MICROBATCH, "checkpoint.every=2", "train.steps=3"), resume="auto")
    assert f"precision.loss_scale {said}\n" in resumed.printed
    assert resumed.metrics[-1].get("loss_scale") == scale


def test_the_configuration_wins_where_it_was_changed_and_the_optimizer_where_it_was_not(tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(
        "import torch\n\nclass Counting(torch.optim.SGD):\n"
        "    def __init__(self, groups, lr, weight_decay=0.0):\n"
        "        super().__init__(groups, lr=lr, weight_decay=weight_decay)\n"
        "        for group in self.param_groups:\n            group['count'] = 0\n\n"
        "    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n            group['count'] += 1\n"
        "        return super().step(closure)\n"
    )
    words = ["train.optimizer=counting.py:Counting", "checkpoint.every=2", "train.decay=constant"]
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
    again = finished(small_run(tmp_path, *changed, "train.steps=11"), resume="auto")
    assert "in the saved run" not in again.printed


def test_optimizers_with_other_groups_keep_what_was_saved_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "single.py").write_text(
        "import torch\n\ndef single(groups, lr, **options):\n"
        "    parameters = [p for group in groups for p in group['params']]\n"
        "    return torch.optim.AdamW(parameters, lr=lr, weight_decay=options.get('weight_decay', 0.0))\n"
    )
    words = ["checkpoint.every=2", "train.weight_decay=0.0"]
    finished(small_run(tmp_path, *words))
    resumed = finished(small_run(tmp_path, *words, "train.optimizer=single.py:single", "train.steps=8"), resume="auto")
    assert "optimizers have other groups than in the saved run" in resumed.printed
    assert len(resumed.metrics) == 8
