"""Runs with tensor parallelism, and with every axis at once."""

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train import read_config
from tests.train.runs import Finished, finished, laid_out, small_run, without_times

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid.toml"

SHORT = ["train.steps=2", "train.warmup_steps=1", "train.log_every=1", "train.evaluate_every=2", "train.global_batch=8"]
SMALL = ["data.sequence_length=8", "train.microbatch=1", "train.evaluate_batches=1", "model.config.num_hidden_layers=2"]

RULES = "tensor.rules={embedding='vocab', head='vocab'}"
NOISY = "model.factory=net.py:Noisy"
FEW = ["train.steps=4", "train.global_batch=6"]


def example(folder: Path, *overrides: str, num_processes: int = 1) -> Finished:
    words = [f"train.output={folder}", *SHORT, *SMALL, *overrides]
    return finished(read_config(EXAMPLE, overrides=words, num_processes=num_processes))


def test_the_reference_run_on_eight_simulated_ranks_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """In bfloat16: each of some ten sums between tokens and loss is rounded where one process rounds once, to 2**-9."""
    eight = example(tmp_path / "eight", num_processes=8)
    one = example(tmp_path / "one", "mesh.tp=1", "mesh.pp=1", "mesh.dp_shard=1")
    assert "mesh pp=2,dp_shard=2,tp=2, stage 1, compute bfloat16" in eight.printed
    assert eight.curve("loss") == pytest.approx(one.curve("loss"), rel=2**-6)
    assert eight.curve("grad_norm") == pytest.approx(one.curve("grad_norm"), rel=2**-4)
    assert eight.curve("held_out_loss") == pytest.approx(one.curve("held_out_loss"), rel=2**-6)
    assert eight.curve("loss") != one.curve("loss")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(small_run(tmp_path_factory.mktemp("alone"), NOISY, *FEW))


@pytest.mark.parametrize(
    "layout",
    [
        ["mesh.tp=2", RULES],
        ["mesh.tp=3", "mesh.dp_shard=2", "sharding.stage=3", RULES],
        ["mesh.tp=2", "mesh.pp=2", "tensor.rules={head='colwise_gather_output'}"],
        ["mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2", "sharding.stage=2", RULES],
    ],
)
def test_a_run_with_dropout_is_that_of_one_process_to_the_order_of_sums(
    tmp_path: Path, alone: Finished, layout: list[str]
) -> None:
    done = finished(laid_out(tmp_path, NOISY, *FEW, *layout))
    for name in ("loss", "grad_norm", "held_out_loss"):
        # float32: eps times the some hundred terms of a sum, over four updates of AdamW.
        assert done.curve(name) == pytest.approx(alone.curve(name), rel=1e-4), name


def test_a_save_of_every_axis_goes_on_under_others(tmp_path: Path) -> None:
    words = [NOISY, *FEW, "checkpoint.every=2", f"train.output={tmp_path / 'out'}"]
    first = ["mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2", RULES]
    layouts = [first, ["mesh.dp_shard=3", "sharding.stage=3"], ["mesh.tp=2", "sharding.partition=whole", RULES]]
    for steps, layout in zip((2, 4, 6), layouts, strict=True):
        done = finished(
            laid_out(tmp_path, *words, f"train.steps={steps}", "train.decay=constant", *layout),
            resume="auto" if steps > 2 else None,
        )
        assert (f"goes on from step {steps - 2}" in done.printed) == (steps > 2)
    constant = [*FEW, "train.steps=6", "train.decay=constant", f"train.output={tmp_path / 'alone'}"]
    whole = finished(small_run(tmp_path, NOISY, *constant))
    assert done.curve("loss") == pytest.approx(whole.curve("loss"), rel=1e-4)


def test_a_resumed_run_under_the_same_layout_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    layout = ["mesh.tp=2", "mesh.dp_shard=2", "sharding.stage=3", "precision.compute=bfloat16", RULES]
    words = [NOISY, *FEW, "checkpoint.every=2", "train.decay=constant", *layout]
    whole = finished(laid_out(tmp_path, *words, "train.steps=4", f"train.output={tmp_path / 'whole'}"))
    finished(laid_out(tmp_path, *words, "train.steps=2"))
    parts = finished(laid_out(tmp_path, *words, "train.steps=4"), resume="auto")
    assert parts.curve("loss") == whole.curve("loss")
    assert parts.curve("grad_norm") == whole.curve("grad_norm")
    assert without_times(parts.metrics)[2:] == without_times(whole.metrics)[2:]


def test_ranks_along_tp_need_rules_that_say_something(tmp_path: Path) -> None:
    for words, said in [
        (["mesh.tp=2", "tensor.rules={head='colum'}"], "the rule 'colum' is unknown"),
        (["mesh.tp=2", "tensor.rule='auto'"], "tensor.rule: unknown setting; did you mean tensor.rules?"),
        (["mesh.tp=2", "tensor.rules=3"], 'is neither "auto" nor a mapping'),
    ]:
        with pytest.raises(ConfigError) as caught:
            small_run(tmp_path, *words, num_processes=2)
        assert said in str(caught.value)
