"""How long it takes to parse a rewrite, check it, and resolve what one of many ranks wants."""

import math
import time
from collections.abc import Iterator, Mapping

from benchmarks.rewrite.experts import NAMES_PER_LAYER, STATEMENTS, ExpertModel
from shardwise.rewrite import Checked, Rewrite, TensorMeta
from shardwise.space import Box

__all__ = ["NUM_RANKS", "PHASES", "plan"]

NUM_RANKS = 64
RANK = 37
"""The one whose boxes are resolved: an odd one amid the others."""

PHASES = ("parse", "check", "resolve a slice of every target", "resolve one target in 64")


def plan(num_names: int) -> dict[str, float]:
    """Seconds of each phase. Raises RuntimeError where what is resolved is not what was asked for."""
    model = ExpertModel(num_layers=num_names // NAMES_PER_LAYER)
    sources, targets = model.sources(), model.targets()
    seconds = {}
    begun = time.perf_counter()
    rewrite = Rewrite(STATEMENTS)
    seconds["parse"] = time.perf_counter() - begun
    begun = time.perf_counter()
    checked = rewrite.check(sources, targets)
    seconds["check"] = time.perf_counter() - begun
    wanted = (list(_slices(targets)), list(_share(targets)))
    for phase, boxes in zip(PHASES[2:], wanted, strict=True):
        begun = time.perf_counter()
        fragments = [checked.resolve(name, box) for name, box in boxes]
        seconds[phase] = time.perf_counter() - begun
        found = sum(each.num_elements for some in fragments for each in some)
        if found != sum(box.num_elements for _, box in boxes):
            raise RuntimeError(f"{phase}: {found} elements found")
    _prove(checked, targets)
    return seconds


def _slices(targets: Mapping[str, TensorMeta]) -> Iterator[tuple[str, Box]]:
    """What a rank wants of every target under tensor parallelism: an equal part of the last dim."""
    for name, meta in targets.items():
        size = meta.shape[-1] // NUM_RANKS
        yield name, Box((*(0 for _ in meta.shape[1:]), RANK * size), (*meta.shape[:-1], size))


def _share(targets: Mapping[str, TensorMeta]) -> Iterator[tuple[str, Box]]:
    """What a rank wants that owns whole targets, one in so many."""
    for name, meta in list(targets.items())[RANK::NUM_RANKS]:
        yield name, Box((0,) * len(meta.shape), meta.shape)


def _prove(checked: Checked, targets: Mapping[str, TensorMeta]) -> None:
    """What came out is what was wanted, and comes of all that went in."""
    if {name: meta[:2] for name, meta in checked.outputs.items()} != {name: meta[:2] for name, meta in targets.items()}:
        raise RuntimeError("the outputs are others than the targets")
    if (went_in := _elements(checked.sources)) != (came_out := _elements(targets)):
        raise RuntimeError(f"{went_in} elements went in, and {came_out} came out")


def _elements(metas: Mapping[str, TensorMeta]) -> int:
    return sum(math.prod(meta.shape) for meta in metas.values())
