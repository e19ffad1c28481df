"""Evaluations of a run with metrics and losses by name, against a plain evaluation of the saved weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import alone
from shardwise.train.corpus import evaluation_rows, read_corpus
from shardwise.train.references import resolve
from tests.train.runs import finished, laid_out, small_run

MEASURES = """
import torch
from net import next_token


def hits(logits, batch):
    return (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean(-1)


def two_losses(logits, batch):
    loss = next_token(logits, batch)
    size = logits.square().mean()
    return {"loss": loss + 0.01 * size, "token": loss, "size": size}
"""

WORDS = (
    "train.metrics={hits = 'measures.py:hits'}",
    "model.loss=measures.py:two_losses",
    "train.evaluate_first=true",
    "train.evaluate_batches=3",
    "checkpoint.every=2",
    "checkpoint.keep=9",
)


def plainly(config: Any, step: int) -> dict[str, float]:
    """The losses and the metric of all held-out rows, with the weights of a save."""
    corpus = read_corpus(config.data, config.folder)
    rows = torch.from_numpy(evaluation_rows(corpus, config.train.global_batch * config.train.evaluate_batches))
    net: Any = resolve("net.py:Net", folder=config.folder, key="net")(width=8)
    weights = {name: parameter.data for name, parameter in net.named_parameters()}
    sw.load(config.saves, weights, step=step, strict=False, channel=alone())
    batch = {"labels": rows}
    with torch.no_grad():
        logits = net(rows)
        measured: dict[str, Any] = {"hits": named("hits", config)(logits, batch).mean()}
        measured |= named("two_losses", config)(logits, batch)
    return {name: float(value) for name, value in measured.items()}


def named(name: str, config: Any) -> Any:
    return resolve(f"measures.py:{name}", folder=config.folder, key=name)


@pytest.fixture(autouse=True)
def measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measures.py").write_text(MEASURES)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    "layout",
    [[], ["mesh.dp_shard=2", "train.microbatch=2"], ["mesh.dp_shard=3", "sharding.stage=3"], ["mesh.pp=2"]],
)
def test_metrics_and_losses_by_name_are_those_of_all_held_out_rows(tmp_path: Path, layout: list[str]) -> None:
    config = laid_out(tmp_path, *WORDS, *layout)
    done = finished(config)
    for line in done.metrics:
        if line["step"] in (4, 6):
            expected = plainly(config, line["step"])
            assert line["held_out_loss"] == pytest.approx(expected.pop("loss"), rel=1e-5)
            assert line["held_out"] == pytest.approx(expected, rel=1e-5)
        if line["step"]:
            assert line["loss"] == pytest.approx(line["losses"]["token"] + 0.01 * line["losses"]["size"], rel=1e-5)
    assert set(done.metrics[0]) == {"step", "held_out_loss", "held_out"}
    assert f"hits {done.metrics[-1]['held_out']['hits']:.4f}" in done.printed


def test_early_stopping_and_best_saves_go_by_a_metric(tmp_path: Path) -> None:
    options = "options = {metric = 'hits', mode = 'max'"
    tables = (
        f"train.callbacks=[{{factory = 'shardwise.train:BestSave', {options}}}}}, "
        f"{{factory = 'shardwise.train:EarlyStopping', {options}, patience = 2, min_delta = 9.0}}}}]"
    )
    done = finished(small_run(tmp_path, *WORDS, tables, "train.steps=9", "train.evaluate_every=1"))
    assert "ended after step 3: hits has not improved in 2 evaluations" in done.printed
    hits = {line["step"]: line["held_out"]["hits"] for line in done.metrics}
    best = max(hits.values())
    found = sw.checkpoint.open(tmp_path / "out" / "checkpoints" / "best")
    assert found.extra["best"] == {"metric": "hits", "value": best}
    assert found.step == min(step for step, value in hits.items() if value == best)
    # It came before the count of the other one in the file, and has it all the same.
    assert found.extra["run"]["callbacks"]["EarlyStopping"]["best"] == hits[0]
