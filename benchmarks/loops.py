"""What loops do besides steps, against the same loop without it, in turns.

    python -m benchmarks.loops [--write] [--rows "NAME,NAME"] [--rounds 40] [--shapes 1x32,4x32] [--k 4]
        [--ranks 1,2]

Each row has two sides with a model each, from one seed and on the same rows. They take turns within one process, and
within two that are joined by gloo, and swap who goes first. A ratio is that of one turn; the median counts. It is given
of the time that passes, and of the processor time of rank 0, which other programs on the machine disturb less.

The metrics have a base that computes them as well: its loss function updates them, without ranks and exchanges. An
average reads and writes 12 bytes per owned element in each update, where fused AdamW moves 28: so its share of a step
falls with the tokens of an update. 2x128 with k = 4 is the size of the examples, as in `benchmarks.offload`.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

import shardwise as sw
from benchmarks.cells import in_processes
from benchmarks.markdown import markdown, write_page
from benchmarks.workload import ADAMW, VOCABULARY, Batch, Shape, batches, llama
from shardwise.comm import Channel, alone

RESULTS = Path(__file__).parent / "results" / "loops.md"
READING = """Goal: a list of microbatches costs nothing; what else is asked for adds 1 % of a step at most, each. Shares
of a step are of the time that passes, and of the processor time of rank 0."""
NUM_BATCHES = 8
HEADER = ("what", "tokens of a microbatch", "ranks", "without, ms", "with, ms", "ratio", "ratio of processor time")

Turn: TypeAlias = Callable[[Batch], object]
Sides: TypeAlias = tuple[Turn, Turn]
"""Without and with what a row is about."""


def engine_on(channel: Channel, k: int, *, loss: Any = None, build: Any = None, **asked: Any) -> sw.Engine:
    """The model of the other benchmarks; `asked`: what else the plan has."""
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), merge=sw.Merge(microbatches=k), clip_grad_norm=1.0, **asked)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, **ADAMW)  # noqa: E731
    return sw.parallelize((build or llama)(), plan, optimizer=optimizer, loss=loss, channel=channel)


def stepping(engine: sw.Engine, *, listed: bool = False) -> Turn:
    """One update, of one batch or of its microbatches."""
    return lambda batch: engine.step(batch.microbatches if listed else batch.whole).loss


def lists(channel: Channel, k: int) -> Sides:
    """A list of microbatches against one batch of the same rows."""
    return stepping(engine_on(channel, k)), stepping(engine_on(channel, k), listed=True)


def scalar_loss(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's own."""
    loss: torch.Tensor = output.loss
    return loss


def dict_loss(output: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same, and three numbers that cost nothing to compute."""
    logits, labels = output.logits.detach(), batch["labels"]
    return {"loss": output.loss, "first": logits[0, 0, 0], "copy": output.loss.detach(), "tokens": labels.numel()}


def dicts(channel: Channel, k: int) -> Sides:
    """A loss function that returns a dict with three more entries, against one that returns the loss."""
    return stepping(engine_on(channel, k, loss=scalar_loss)), stepping(engine_on(channel, k, loss=dict_loss))


def of_tokens(output: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and targets of all tokens but the first."""
    return output.logits[:, :-1].argmax(-1).flatten(), batch["labels"][:, 1:].flatten()


def right(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The share of tokens that are right, of each row."""
    found: torch.Tensor = (output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).double().mean(1)
    return found


def metrics(channel: Channel, k: int) -> Sides:
    """Two metrics of torchmetrics and a function in an evaluation, against a loss function that computes the same."""
    pairs = {
        "accuracy": (MulticlassAccuracy(VOCABULARY, average="micro", validate_args=False), of_tokens),
        "perplexity": (Perplexity(), lambda output, batch: (output.logits[:, :-1], batch["labels"][:, 1:])),
    }
    own = [(metric.clone(), inputs) for metric, inputs in pairs.values()]
    means: list[torch.Tensor] = []

    def counting(output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for metric, inputs in own:
            metric.update(*inputs(output, batch))
        means.append(right(output, batch).mean())
        return scalar_loss(output, batch)

    def by_hand(batch: Batch) -> float:
        loss = plain.evaluate(batch.whole).loss
        _ = [float(metric.compute()) for metric, _ in own], float(torch.stack(means).mean())
        for metric, _ in own:
            metric.reset()
        means.clear()
        return loss

    plain, engine = engine_on(channel, k, loss=counting), engine_on(channel, k, loss=scalar_loss)
    return by_hand, lambda batch: engine.evaluate(batch.whole, metrics={**pairs, "right": right}).metrics


def averages(channel: Channel, k: int) -> Sides:
    """A running average of the weights, against none. It moves 12 bytes per owned element, whatever the rows."""
    return stepping(engine_on(channel, k)), stepping(engine_on(channel, k, average=sw.Average(decay=0.999)))


def nothing(channel: Channel, k: int) -> Sides:
    """Two equal sides: how far turns differ without a cause."""
    return stepping(engine_on(channel, k)), stepping(engine_on(channel, k))


ROWS: dict[str, Callable[[Channel, int], Sides]] = {
    "nothing: two equal sides": nothing,
    "list of microbatches": lists,
    "dict of 3 entries besides the loss": dicts,
    "evaluation with 3 metrics": metrics,
    "average of the weights": averages,
}


Turns: TypeAlias = list[tuple[float, float, float, float]]
"""For each round the milliseconds of both sides, and those of a processor."""


def in_turns(sides: Sides, drawn: Sequence[Batch], num_rounds: int, *, num_warm: int = 3) -> Turns:
    """What both sides take in each round."""
    found: Turns = []
    for number in range(num_warm + num_rounds):
        if number == num_warm:
            gc.collect()
            gc.freeze()
        taken, used = [0.0, 0.0], [0.0, 0.0]
        for at in (0, 1) if number % 2 else (1, 0):
            begun, begun_use = time.perf_counter(), time.process_time()
            sides[at](drawn[number % len(drawn)])
            taken[at] = (time.perf_counter() - begun) * 1e3
            used[at] = (time.process_time() - begun_use) * 1e3
        if number >= num_warm:
            found.append((*taken, *used))  # type: ignore[arg-type]  # four of them
    gc.unfreeze()
    return found


def measure(
    channel: Channel, names: Sequence[str], shapes: Sequence[str], k: int, num_rounds: int
) -> list[tuple[str, ...]]:
    """The rows of one number of ranks."""
    rows: list[tuple[str, ...]] = []
    for name, shape in product(names, shapes):
        drawn = batches(Shape.parse(shape), k, rank=channel.rank, count=NUM_BATCHES)
        found = in_turns(ROWS[name](channel, k), drawn, num_rounds)
        without, given, *_ = (statistics.median(each) for each in zip(*found, strict=True))
        ratio, of_use = (statistics.median(each[at + 1] / each[at] for each in found) for at in (0, 2))
        figures = f"{without:.2f}", f"{given:.2f}", f"{ratio:.3f}", f"{of_use:.3f}"
        rows.append((name, shape, str(channel.size), *figures))
    return rows


def of_rank(rank: int, folder: Path, *, names: Sequence[str], shapes: Sequence[str], k: int, num_rounds: int) -> None:
    """What a process does that is joined with others."""
    rows = measure(sw.default_channel(), names, shapes, k, num_rounds)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"some of: {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--shapes", default="1x32,4x32,2x128", help="rows x tokens of a microbatch")
    parser.add_argument("--ranks", default="1,2", help="1, 2, or both")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    names, shapes = arguments.rows.split(","), arguments.shapes.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row is named {', '.join(unknown)}; there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    ranks = arguments.ranks.split(",")
    rows = measure(alone(), names, shapes, arguments.k, arguments.rounds) if "1" in ranks else []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        work = partial(of_rank, names=names, shapes=shapes, k=arguments.k, num_rounds=arguments.rounds)
        if "2" in ranks:
            in_processes(work, Path(name))
            rows += map(tuple, json.loads((Path(name) / "rows.json").read_text()))
    table = markdown(HEADER, rows)
    print(table)
    if arguments.write:
        write_page(RESULTS, "benchmarks.loops", "Loops", READING, table, load_before=before)


if __name__ == "__main__":
    main()
