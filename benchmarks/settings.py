"""What it costs one of many ranks to learn the settings and names that all ranks know together.

    python -m benchmarks.settings [--ranks 4096] [--names 20000] [--write]

One rank is real. The others are answers that a channel holds ready: those of a mesh of 8 stages, whose optimizers have
states of other kinds, and of a rank 0 that alone knows the configuration of the model. Counted are the processor time
of the real rank, and the bytes that it is given, each value once for each rank that gives it.

A relayout, `engine.whole` and a save begin with this.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.markdown import Row, markdown, write_page
from shardwise.engine.model.state import settings_texts
from shardwise.moving import Gathering
from shardwise.moving.piece_exchange import merged_settings

RESULTS = Path(__file__).parent / "results" / "settings.md"
PURPOSE = "settings"
STAGES = 8
TURNS = 20


@lru_cache(maxsize=2)
def names(count: int) -> list[str]:
    """Of the parameters of a model."""
    return [f"model.layers.{at // 10}.self_attn.projections.{at % 10}.weight" for at in range(count)]


def settings_of(rank: int, num_ranks: int, num_names: int) -> dict[str, Any]:
    """What a rank says."""
    stage = rank * STAGES // num_ranks
    optimizer = {
        "kind": "torch.optim.adamw.AdamW",
        "groups": [{"parameters": names(num_names), "settings": {"lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8}}],
        "plain": {f"of_stage_{stage}": "int"},
        "none": {},
    }
    known = {"config.json": {"hidden_size": 4096}} if rank == 0 else {}
    return {"plan": "mesh.dp_shard = 512\n", "ties": {}, **known, "random": {"seed": 0}, "optimizers": [optimizer]}


class Ready:
    """The channel of one of many ranks, with the answers of the others."""

    def __init__(self, rank: int, texts_of: Sequence[Sequence[bytes]]) -> None:
        self.rank, self.size = rank, len(texts_of)
        self.received_bytes = 0
        digests = [[xxhash.xxh3_128_digest(text) for text in texts] for texts in texts_of]
        first_of: dict[bytes, int] = {}
        for other, each in enumerate(digests):
            for digest in each:
                first_of.setdefault(digest, other)
        self._digests = [b"+" + b"".join(each) for each in digests]
        self._texts_of, self._of, self._first_of = texts_of, digests, first_of

    def exchange(self, mine: bytes, *, purpose: str) -> list[bytes]:
        """What the ranks give: digests first, and then the texts that are not known to all."""
        answers = self._digests
        if purpose == PURPOSE:
            alike = set.intersection(*map(set, self._of))
            sent = [
                [
                    text.decode()
                    for text, digest in zip(self._texts_of[rank], self._of[rank], strict=True)
                    if self._first_of[digest] == rank and digest not in alike
                ]
                if rank in {*self._first_of.values()}
                else []
                for rank in range(self.size)
            ]
            answers = [json.dumps(texts).encode() for texts in sent]
        assert mine == answers[self.rank]
        self.received_bytes += sum(map(len, answers))
        return answers


def measured(num_ranks: int, num_names: int, rank: int) -> tuple[float, float, int]:
    """Least and median milliseconds of one exchange, and the bytes that it gives the rank."""
    kinds = {(each == 0, each * STAGES // num_ranks): each for each in reversed(range(num_ranks))}
    texts = {kind: settings_texts(settings_of(each, num_ranks, num_names)) for kind, each in kinds.items()}
    channel = Ready(rank, [texts[each == 0, each * STAGES // num_ranks] for each in range(num_ranks)])
    own = settings_of(rank, num_ranks, num_names)
    # What the others give is made before: a rank does not make it.
    answers: dict[str, list[bytes]] = {}
    given = channel.exchange

    def exchange(mine: bytes, *, purpose: str) -> list[bytes]:
        if purpose not in answers:
            answers[purpose] = given(mine, purpose=purpose)
        return answers[purpose]

    channel.exchange = exchange  # type: ignore[method-assign]
    spent = []
    for _ in range(TURNS):
        begun = time.process_time()
        with Gathering(PURPOSE).agreed(channel) as gathered:  # type: ignore[arg-type]
            gathered.own = settings_texts(own)
        settings = merged_settings(gathered.texts, purpose=PURPOSE)
        spent.append(1000 * (time.process_time() - begun))
        (optimizer,) = settings["optimizers"]
        assert len(optimizer["groups"][0]["parameters"]) == num_names
        assert len(optimizer["plain"]) == min(STAGES, num_ranks)
        assert "config.json" in settings
    return min(spent[1:]), statistics.median(spent[1:]), channel.received_bytes


def main() -> None:
    """Measure, print, and write the results where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--names", type=int, default=20_000)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows: list[Row] = []
    for num_ranks in (8, 256, given.ranks):
        for num_names in (given.names // 10, given.names):
            least, median, received = measured(num_ranks, num_names, num_ranks // 2)
            cells = f"{least:.1f}", f"{median:.1f}", f"{received / 1e6:.2f}"
            rows.append((str(num_ranks), str(num_names), *cells))
    table = markdown(("ranks", "names", "least ms", "median ms", "received MB"), rows)
    print(table)
    if given.write:
        reading = "Asked: at most 50 ms of processor time and 2 MB for a rank of 4,096, with 20,000 names."
        write_page(RESULTS, "benchmarks.settings", "Settings of many ranks", reading, table, load_before=load_before)


if __name__ == "__main__":
    main()
