"""Evaluations of a run whose plan has averages of the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import alone
from shardwise.train.corpus import evaluation_rows, read_corpus
from shardwise.train.references import resolve
from tests.train.runs import finished, laid_out, without_times

WORDS = ("average.decay=0.5", "checkpoint.every=1", "checkpoint.keep=9", "train.evaluate_every=2")


def plain_losses(config: Any) -> list[float]:
    """The held-out losses of torch's average of the weights after each update, and those of the last weights."""
    corpus = read_corpus(config.data, config.folder)
    rows = torch.from_numpy(evaluation_rows(corpus, config.train.global_batch * config.train.evaluate_batches))
    loss_of: Any = resolve("net.py:next_token", folder=config.folder, key="loss")
    net = resolve("net.py:Net", folder=config.folder, key="net")(width=8)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    weights, losses = {name: parameter.data for name, parameter in net.named_parameters()}, []
    for step in range(1, config.train.steps + 1):
        sw.load(config.saves, weights, step=step, strict=False, channel=alone())
        averaged.update_parameters(net)
        if step % 2 == 0:
            with torch.no_grad():
                losses.append(float(loss_of(averaged(rows), {"labels": rows})))
    return losses


@pytest.mark.parametrize(
    "layout", [[], ["mesh.dp_shard=2", "sharding.stage=3"], ["mesh.dp_shard=3", "sharding.stage=0"], ["mesh.pp=2"]]
)
def test_evaluations_are_those_of_the_averages_and_training_is_as_without(tmp_path: Path, layout: list[str]) -> None:
    config = laid_out(tmp_path, *WORDS, *layout)
    done = finished(config)
    assert done.curve("held_out_loss") == pytest.approx(plain_losses(config), rel=1e-5)
    words = [*WORDS, f"train.output={tmp_path / 'other'}", "train.evaluate_average=false"]
    other = finished(laid_out(tmp_path, *words, *layout))
    assert other.curve("loss") == done.curve("loss")
    assert other.curve("held_out_loss") != done.curve("held_out_loss")


def test_a_best_save_has_the_averages_that_were_best_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    tables = "train.callbacks=[{factory = 'shardwise.train:BestSave', options = {load_at_end = true}}]"
    words = [*WORDS, "average.decay=0.1", "train.learning_rate=0.5", "train.decay=constant", "train.steps=12", tables]
    done = finished(laid_out(tmp_path, *words))
    best = tmp_path / "out" / "checkpoints" / "best"
    losses = {line["step"]: line["held_out_loss"] for line in done.metrics if line["held_out_loss"] is not None}
    step = min(losses, key=losses.__getitem__)
    assert step < 12, "the run gets worse at its end, else this shows nothing"
    assert sw.checkpoint.open(best).step == step
    branch = laid_out(tmp_path, *words[:-1], f"train.output={tmp_path / 'branch'}")
    resumed = finished(branch, resume=str(best))
    assert without_times(resumed.metrics) == without_times(done.metrics)[step:]


def test_before_the_first_average_evaluations_are_those_of_the_weights(tmp_path: Path) -> None:
    """The averages are then the weights of the beginning: a run would stop early, for it seems not to improve."""
    words = ["average.start=3", "train.evaluate_every=1", "mesh.dp_shard=2"]
    done = finished(laid_out(tmp_path, *words)).curve("held_out_loss")
    other = finished(laid_out(tmp_path, *words, "train.evaluate_average=false")).curve("held_out_loss")
    assert done[:3] == other[:3], "the first average is taken after step 4, and is a copy of the weights"
    assert done[3] == other[3]
    assert done[4:] != other[4:]
