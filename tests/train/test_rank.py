"""Whole runs against loops in plain PyTorch, and against themselves under other layouts; and what they say."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from shardwise.comm import simulate
from shardwise.data import DataPlace, first_batches
from shardwise.errors import DivergedError, MismatchError, ModelError
from shardwise.train import RunConfig, check_references, rank
from shardwise.train.announcement import abbreviated
from shardwise.train.corpus import evaluation_rows, read_corpus
from shardwise.train.observers import LossCurve
from shardwise.train.references import resolve
from shardwise.train.run_data import build_data
from tests.train.row_kinds import KINDS, order, pretrained_folder, run_of
from tests.train.runs import PLAIN, Finished, finished, laid_out, plain_losses, small_run


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
        numbers = np.arange(update * train.global_batch, (update + 1) * train.global_batch)
        rows = torch.from_numpy(corpus.rows(numbers, seed=train.seed))
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


def rate(update: int, steps: int, warmup: int) -> float:
    if update < warmup:
        return (update + 1) / warmup
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (update - warmup) / (steps - 1 - warmup))) / 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Finished]:
    config = small_run(tmp_path_factory.mktemp("alone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank, "LossCurve", LossCurve)  # with its picture
        return config, finished(config)


def test_a_run_equals_the_usual_loop_in_plain_pytorch(alone: tuple[RunConfig, Finished]) -> None:
    config, done = alone
    losses, norms, evaluations = plainly_trained(config)
    assert done.curve("loss") == losses
    assert done.curve("grad_norm") == norms
    assert done.curve("held_out_loss") == pytest.approx(evaluations, rel=1e-6)


TP = "tensor.rules={embedding='vocab', head='vocab'}"
LAYOUTS = [
    ["mesh.dp_replicate=2", "mesh.dp_shard=2", "sharding.stage=0", "train.microbatch=3"],
    ["mesh.pp=1", "pipeline.schedule=interleaved", "pipeline.balance=flops"],
    ["mesh.tp=2", "mesh.pp=2", "mesh.dp_shard=2", "sharding.stage=2", TP],
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_the_curves_of_a_run_do_not_depend_on_the_layout(
    tmp_path: Path, alone: tuple[RunConfig, Finished], layout: list[str]
) -> None:
    done = finished(laid_out(tmp_path, *layout))
    for curve in ("loss", "grad_norm", "held_out_loss", "learning_rate"):
        assert done.curve(curve) == pytest.approx(alone[1].curve(curve), rel=2e-5)


# Data, groups, turns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind, (_, batches, _) in KINDS.items() if batches is not None])
def test_the_batches_of_a_run_are_its_rows_in_the_order_of_its_seed(tmp_path: Path, kind: str) -> None:
    config = run_of(tmp_path, kind)
    check_references(config)
    batch: Any = KINDS[kind][1]
    expected = [batch(numbers) for numbers in order(kind)]
    for found, wanted in zip(first_batches(build_data(config).data, DataPlace(), 6), expected, strict=True):
        assert found.keys() >= wanted.keys()
        for name, each in wanted.items():
            torch.testing.assert_close(found[name], each, rtol=1e-6, atol=1e-6)


GROUPS = (
    "train.groups=[{parameters=['*.bias'], learning_rate=0.05, weight_decay=0.3}, "
    "{parameters=['norm', '*.bias'], frozen=true}, {parameters=['embed*'], learning_rate=0.0}]"
)
OF_WORDS = "train.groups=[{parameters=['*norm*'], frozen=true}, {parameters=['lm_head'], learning_rate=0.1}]"
STAGES = "pipeline.stages={'generator.*'=0, 'critic.*'=1}"
TRAINS: dict[str, tuple[str, list[str]]] = {
    "groups in parts": ("text", [GROUPS, "mesh.dp_shard=3", "sharding.stage=3"]),
    "groups of stages": ("text", [GROUPS, "mesh.pp=2"]),
    "lines, pp": ("jsonl", ["mesh.pp=2", "mesh.dp_replicate=3"]),
    "images of a worker": ("images", ["mesh.dp_shard=3", "sharding.stage=2", "data.num_workers=1"]),
    "columns, tp": ("parquet", ["mesh.tp=2", "tensor.rules={inner='column', head='row'}"]),
    "a collator of workers": ("collator", ["data.num_workers=2", "mesh.dp_shard=2"]),
    "named values": ("named", ["mesh.pp=2", "mesh.dp_shard=2"]),
    "turns alone": ("turns", []),
    "turns, two optimizers": ("turns", ["mesh.dp_shard=2", "sharding.stage=3", "train.optimizer=gan.py:two"]),
    "turns, pp": ("turns", ["mesh.pp=2", STAGES, "mesh.dp_shard=2"]),
    "other dims, pp": ("frames", ["mesh.pp=2"]),
    "words, pp": ("words", ["mesh.pp=2", OF_WORDS]),
    "words, tp": ("words", ["mesh.tp=2", "tensor.rules=auto"]),
    "words, weighed": ("words", ["model.loss_weight=nets.py:tokens", "mesh.dp_shard=2"]),
    "words, pretrained": (
        "pretrained",
        ["model.pretrained=llama", "model.config={attn_implementation='eager'}", "mesh.dp_shard=2", "sharding.stage=3"],
    ),
}


@pytest.mark.parametrize("case", TRAINS)
def test_rows_groups_and_turns_train_as_in_a_plain_loop(tmp_path: Path, case: str) -> None:
    kind, overrides = TRAINS[case]
    if kind == "pretrained":
        pretrained_folder(tmp_path)
    of_words = kind in ("words", "pretrained")
    words = [*PLAIN, *overrides]
    config = laid_out(tmp_path, *words) if kind == "text" else run_of(tmp_path, "words" if of_words else kind, *words)
    check_references(config)
    through = finished(config)
    assert through.curve("loss") == pytest.approx(plain_losses(config), rel=1e-4 if of_words else 1e-5)
    assert kind == "text" or "samples " in through.printed
    if kind == "turns":
        names = [sorted(line["losses"]) for line in through.metrics if line["loss"] is not None]
        assert names == [["size"] if step in (3, 6) else ["wrong"] for step in range(1, 7)]
        assert sorted(through.metrics[-1]["held_out"]) == ["size"]  # by the loss of [model]


# What a run says ----------------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does_and_ends_with_both_losses(alone: tuple[RunConfig, Finished]) -> None:
    config, done = alone
    lines = done.printed.splitlines()
    assert lines[0].startswith("small: Net, 4.4 k parameters, mesh single, stage 1, compute as the model is")
    assert "12 rows of 16 tokens, as 1 (data ranks) x 12 (microbatches) x 1 (rows)" in lines[1]
    progress = [line.split("  ")[0] for line in lines if line.startswith("step ")]
    assert progress == ["step 1/6", "step 2/6", "step 4/6", "step 6/6"]
    loss = done.curve("held_out_loss")[-1]
    assert lines[-1].startswith(f"held-out loss {loss:.4f}; of a model that knows only byte frequencies: ")
    assert done.printed.count("the model goes on:") == 1
    assert (config.output / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((config.output / "tensorboard").glob("events*"))
    assert [line["step"] for line in done.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["held_out_loss"] is not None for line in done.metrics] == [False, False, False, True, False, True]
    elapsed = [line["elapsed_s"] for line in done.metrics]
    assert elapsed == sorted(elapsed)


SAYS: dict[str, tuple[list[str], list[str]]] = {
    "stages": (
        ["mesh.pp=2", "mesh.dp_shard=2", "train.microbatch=3", "train.steps=2"],
        [
            "schedule 1f1b: 2 (microbatches) through 2 stages; a bubble of 33.3% if all took the same time\n"
            "  stage 0 (ranks 0-1): embedding, norm: 2.1 k parameters, 47%\n"
            "  stage 1 (ranks 2-3): head: 2.3 k parameters, 53%\n"
        ],
    ),
    "stages in another order": (
        ["mesh.pp=2", "pipeline.stages={embedding=1, norm=0, head=0}", "train.steps=1", "train.warmup_steps=0"],
        ["schedule run: 1f1b, as fthenb"],
    ),
    "activations": (
        ["activations.checkpoint=['norm', 'head']", "activations.budget_bytes=1000000"],
        [
            "at most 1000000 bytes of saved tensors on each rank\nthe first step measures the modules\n",
            "keep: norm, head\n",
        ],
    ),
    "no logits": (
        ["model.factory=net.py:Mute", "model.loss=net.py:next_score", "mesh.dp_shard=2"],
        ["no sample: ", "held-out loss "],
    ),
    "nothing finite": (
        ["train.learning_rate=1e30", "train.warmup_steps=0"],
        ["gives no finite logits", "held-out loss nan"],
    ),
    "by module": (
        ["model.initialise=by module", "mesh.dp_shard=2"],
        ["initial parameters: drawn by each module, from its name and the seed 5"],
    ),
}


@pytest.mark.parametrize("case", SAYS)
def test_a_run_says_what_is_special_about_it(tmp_path: Path, case: str) -> None:
    overrides, said = SAYS[case]
    printed = finished(laid_out(tmp_path, *overrides)).printed
    for each in said:
        assert each in printed


def test_a_skipped_update_is_reported_and_does_not_use_up_its_learning_rate(tmp_path: Path) -> None:
    words = ["model.loss=net.py:second_is_infinite", "train.microbatch=12", "train.steps=4", "train.warmup_steps=3"]
    done = finished(small_run(tmp_path, *words, "train.evaluate_every=9"))
    assert [line["skipped"] for line in done.metrics] == [False, True, False, False]
    assert [line["loss"] is None for line in done.metrics] == [False, True, False, False]
    rates = done.curve("learning_rate")
    assert rates[1] == rates[2] > rates[0]
    assert "update skipped" in done.printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.learning_rate=1e30"], r"not been finite since step 2: 20 updates in a row.*learning_rate"),
        (
            ["model.factory=net.py:Lost", "precision.compute=float16", "precision.loss_scale=1024"],
            r"since step 1: .* Losses were scaled by 1024: see precision.loss_scale",
        ),
    ],
)
def test_a_run_that_learns_nothing_any_more_ends_and_says_since_when(
    tmp_path: Path, words: list[str], said: str
) -> None:
    overrides = ["train.warmup_steps=0", "train.steps=60", "train.evaluate_every=60", *words]
    with pytest.raises(DivergedError, match=said):
        finished(small_run(tmp_path, *overrides, num_processes=2))
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == (20 if "1e30" in words[0] else 19)


def test_what_one_rank_alone_has_wrong_stops_all_ranks(tmp_path: Path) -> None:
    def run(*words: str) -> None:
        configs = [small_run(tmp_path, *each, num_processes=2) for each in ((), words)]
        simulate(2, lambda channel: rank.run(configs[channel.rank], channel, Console(quiet=True)))

    with pytest.raises(ModelError, match=r"rank 1: model\.factory: net\.py:Net raised TypeError"):
        run("model.config.width=[]")
    with pytest.raises(MismatchError, match=r"ranks were given the seeds \[5, 2\]"):
        run("train.seed=2")


def test_many_names_become_few_words() -> None:
    layers = [f"model.layers.{number}" for number in range(3, 12)]
    for names, said in (
        (["model.embed", *layers, "model.norm"], "model.embed, model.layers.3-11, model.norm"),
        (["a.0.b", "a.1.b", "a.1.c", "a.2.c"], "a.0-1.b, a.1-2.c"),
        (["h.0.0", "h.0.1", "h.1.0"], "h.0.0-1, h.1.0"),
        (["layers.2", "layers.0", "x1", "x2", ""], "layers.2, layers.0, x1, x2, "),
        (list("abcdefg"), "a, b, c, ... (3 more), g"),
    ):
        assert abbreviated(names) == said
