"""Whole runs against a trainer in plain PyTorch, and against themselves under other layouts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from shardwise.comm import simulate
from shardwise.errors import (
    ConfigError,
    DataError,
    DivergedError,
    MismatchError,
    ModelError,
    OptimizerError,
    ShardwiseError,
)
from shardwise.train import RunConfig, rank
from shardwise.train.corpus import Corpus, evaluation_rows, read_corpus
from shardwise.train.observers import LossCurve
from shardwise.train.rank import run
from shardwise.train.references import resolve
from tests.train.runs import Finished, finished, small_run


def plainly_trained(config: RunConfig) -> tuple[list[float], list[float], list[float]]:
    """Training losses, gradient norms and held-out losses of `config`, by the usual loop on one process."""
    train = config.train
    corpus = read_corpus(config.data, config.folder)
    held_out = torch.from_numpy(evaluation_rows(corpus, train.global_batch * train.evaluate_batches))
    loss_of: Any = resolve("net.py:next_token", folder=config.folder, key="loss")
    torch.manual_seed(train.seed)
    net = resolve("net.py:Net", folder=config.folder, key="net")(width=8)
    matrices, vectors = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    losses, norms, evaluations = [], [], []
    for update in range(train.steps):
        rows = torch.from_numpy(sample_rows(corpus, update, train.global_batch, train.seed))
        optimizer.zero_grad()
        parts = []
        for row in rows.split(1):
            loss = loss_of(net(row), {"labels": row})
            loss.backward()
            parts.append(loss.item())
        for parameter in net.parameters():
            parameter.grad.div_(len(rows))
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * rate(update, train.steps, train.warmup_steps)
        optimizer.step()
        losses.append(math.fsum(parts) / len(parts))
        if (update + 1) % 4 == 0 or update + 1 == train.steps:
            with torch.no_grad():
                evaluations.append(loss_of(net(held_out), {"labels": held_out}).item())
    return losses, norms, evaluations


def sample_rows(corpus: Corpus, update: int, global_batch: int, seed: int) -> Any:
    return corpus.rows(np.arange(update * global_batch, (update + 1) * global_batch), seed=seed)


def rate(update: int, steps: int, warmup: int) -> float:
    if update < warmup:
        return (update + 1) / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (update - warmup) / (steps - 1 - warmup))) / 2


@pytest.fixture(scope="module")
def alone_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Finished]:
    config = small_run(tmp_path_factory.mktemp("alone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "LossCurve", LossCurve)  # with its picture
        return config, finished(config)


def test_a_run_equals_the_usual_loop_in_plain_pytorch(alone_run: tuple[RunConfig, Finished]) -> None:
    config, done = alone_run
    losses, norms, evaluations = plainly_trained(config)
    assert done.curve("loss") == losses
    assert done.curve("grad_norm") == norms
    assert done.curve("held_out_loss") == pytest.approx(evaluations, rel=1e-6)


@pytest.mark.parametrize(
    ("num_processes", "overrides"),
    [
        (2, []),
        (2, ["sharding.stage=0"]),
        (3, ["sharding.partition=whole"]),
        (4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"]),
        (6, []),
        (1, ["train.microbatch=4"]),
        (2, ["train.microbatch=6"]),
        (4, ["mesh.pp=2", "mesh.dp_shard=2"]),
        (6, ["mesh.pp=3", "mesh.dp_replicate=2", "sharding.stage=0", "train.microbatch=3"]),
    ],
)
def test_the_loss_curve_does_not_depend_on_the_layout(
    tmp_path: Path, alone_run: tuple[RunConfig, Finished], num_processes: int, overrides: list[str]
) -> None:
    expected = alone_run[1]
    done = finished(small_run(tmp_path, *overrides, num_processes=num_processes))
    for curve in ("loss", "grad_norm", "held_out_loss", "learning_rate"):
        assert done.curve(curve) == pytest.approx(expected.curve(curve), rel=2e-5)


def test_a_run_says_what_it_does_and_ends_with_both_losses(alone_run: tuple[RunConfig, Finished]) -> None:
    config, done = alone_run
    lines = done.printed.splitlines()
    assert lines[0].startswith("small: Net, 4.4 k parameters, mesh single, stage 1, compute as the model is")
    assert "12 rows of 16 tokens, as 1 (data ranks) x 12 (microbatches) x 1 (rows)" in lines[1]
    progress = [line.split("  ")[0] for line in lines if line.startswith("step ")]
    assert progress == ["step 1/6", "step 2/6", "step 4/6", "step 6/6"]
    loss = done.curve("held_out_loss")[-1]
    assert lines[-1].startswith(f"held-out loss {loss:.4f}; of a model that knows only byte frequencies: ")
    assert "the model goes on:" in done.printed
    assert (config.output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((config.output / "tensorboard").glob("events*"))


def test_metrics_have_one_line_per_update(alone_run: tuple[RunConfig, Finished]) -> None:
    lines = alone_run[1].metrics
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["held_out_loss"] is not None for line in lines] == [False, False, False, True, False, True]
    assert not any(line["skipped"] for line in lines)
    assert all(line["tokens_per_second"] > 0 for line in lines)
    elapsed = [line["elapsed_s"] for line in lines]
    assert elapsed == sorted(elapsed)


def test_all_ranks_draw_the_same_sample_and_only_one_shows_it(tmp_path: Path) -> None:
    printed = {n: finished(small_run(tmp_path, num_processes=n)).printed for n in (1, 2)}
    assert printed[2].count("the model goes on:") == 1
    goes_on = {n: text.split("the model goes on:")[1].split("held-out loss")[0] for n, text in printed.items()}
    assert goes_on[1] == goes_on[2]


def test_a_model_without_logits_trains_and_gives_no_sample(tmp_path: Path) -> None:
    done = finished(small_run(tmp_path, "model.factory=net.py:silent", "model.loss=net.py:next_score"))
    assert "no sample: " in done.printed
    assert done.printed.splitlines()[-1].startswith("held-out loss ")


def test_a_skipped_update_is_reported_and_does_not_use_up_its_learning_rate(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text(
        "import torch\nfrom net import Net, next_token\n\ncalls = []\n\n"
        "def sometimes(logits, batch):\n    calls.append(0)\n"
        "    return next_token(logits, batch) * (float('inf') if len(calls) == 2 else 1.0)\n"
    )
    overrides = ["model.loss=huge.py:sometimes", "train.microbatch=12", "train.steps=4", "train.evaluate_every=9"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        done = finished(small_run(tmp_path, *overrides))
    assert [line["skipped"] for line in done.metrics] == [False, True, False, False]
    assert [line["loss"] is None for line in done.metrics] == [False, True, False, False]
    rates = done.curve("learning_rate")
    assert rates[1] == rates[2] > rates[0]
    assert "update skipped" in done.printed


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["model.config.width=true"], ModelError, "model.factory: net.py:Net raised TypeError"),
        (["model.config.depth=3"], ModelError, "unexpected keyword argument 'depth'"),
        (["model.factory=builtins:dict"], ModelError, "gave a dict, not a torch.nn.Module"),
        (["data.sequence_length=4000"], DataError, "tokens are too few"),
        (["train.optimizer=torch.optim:SGD", "train.optimizer_options.beta=1"], OptimizerError, "beta"),
        (["train.optimizer=builtins:dict"], OptimizerError, "dict"),
        (["precision.keep=['lost']"], ShardwiseError, "lost"),
    ],
)
def test_what_is_wrong_before_the_first_update_is_raised_by_every_rank(
    tmp_path: Path, overrides: list[str], kind: type[ShardwiseError], message: str
) -> None:
    for num_processes in (1, 2):
        config = small_run(tmp_path, *overrides, num_processes=num_processes)
        with pytest.raises(kind, match=message) as caught:
            finished(config)
        assert "rank" not in str(getattr(caught.value, "__notes__", ""))
        assert not config.output.exists()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_that_learns_nothing_any_more_ends_and_says_since_when(tmp_path: Path, num_processes: int) -> None:
    overrides = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.steps=60", "train.evaluate_every=60"]
    with pytest.raises(DivergedError, match=r"not been finite since step 2: 20 updates in a row.*learning_rate"):
        finished(small_run(tmp_path, *overrides, num_processes=num_processes))
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 20


def test_a_run_that_ends_without_finite_outputs_ends_without_a_sample(tmp_path: Path) -> None:
    done = finished(small_run(tmp_path, "train.learning_rate=1e30", "train.warmup_steps=0"))
    assert "gives no finite logits" in done.printed
    assert done.printed.splitlines()[-1].startswith("held-out loss nan")


def test_an_output_that_is_no_folder_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match=r"train\.output: the folder .*out cannot be written to \(File exists\)"):
        finished(small_run(tmp_path))


def test_a_factory_that_exits_is_an_error_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("def exits(**_):\n    raise SystemExit(7)\n")
    with pytest.raises(ModelError, match=r"exits\.py:exits raised SystemExit: 7"):
        finished(small_run(tmp_path, "model.factory=exits.py:exits"))


def test_a_factory_that_fails_on_one_rank_stops_all_ranks(tmp_path: Path) -> None:
    good, bad = (small_run(tmp_path, *words, num_processes=2) for words in ([], ["model.config.width=[]"]))
    with pytest.raises(ModelError, match=r"rank 1: model\.factory: net\.py:Net raised TypeError"):
        simulate(2, lambda channel: run(bad if channel.rank else good, channel, Console(quiet=True)))


def test_different_seeds_on_different_ranks_are_refused(tmp_path: Path) -> None:
    configs = [small_run(tmp_path, f"train.seed={seed}", num_processes=2) for seed in (1, 2)]
    with pytest.raises(MismatchError, match=r"ranks were given the seeds \[1, 2\]"):
        simulate(2, lambda channel: run(configs[channel.rank], channel, Console(quiet=True)))


def test_activations_change_no_number_and_are_said(tmp_path: Path) -> None:
    without = finished(small_run(tmp_path))
    (tmp_path / "again").mkdir()
    asked = ["activations.checkpoint=['norm', 'head']", "activations.budget_bytes=1000000"]
    again = finished(small_run(tmp_path / "again", *asked))
    assert again.curve("loss") == without.curve("loss")
    assert "saved tensors" not in without.printed
    assert "at most 1000000 bytes of saved tensors on each rank\nthe first step measures the modules\n" in again.printed
    assert "keep: norm, head\n" in again.printed
