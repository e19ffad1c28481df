"""The bytes that a rank holds of the model, and allocates for modules of other stages; the microbatches it holds."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.pipeline.models import Batch
from benchmarks.pipeline.ours import Ours
from benchmarks.pipeline.outcome import Cell, Memory
from benchmarks.pipeline.timelines import most_in_flight
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.engine.pipeline.transfers import MicrobatchFlow

__all__ = ["measure_memory", "parameter_bytes", "resident_bytes"]

FOREIGN, SENDING = "a module of another stage", "sending"


def measure_memory(cell: Cell, side: Ours, batch: Batch, whole: nn.Module) -> Memory:
    """Under 1F1B. `whole`: the model, uncut."""
    runner = side.runner
    stage = runner.stages.rank
    with _marked(runner), _profiled() as seen:
        spans = side.do(batch).spans
    foreign, num_bytes = _allocated(seen)
    assert runner.schedule is not None
    return Memory(
        rank=runner.stages.rank,
        resident_bytes=resident_bytes(side.engine.model),
        stage_bytes=sum(
            parameter_bytes(whole.get_submodule(name))
            for name, place in runner.placement.modules.items()
            if place == stage
        ),
        foreign_calls=foreign,
        foreign_bytes=num_bytes,
        in_flight=most_in_flight(spans, stage),
        counted_in_flight=runner.peak_in_flight,
        promised_in_flight=min(runner.placement.num_stages - stage, cell.num_microbatches),
    )


def resident_bytes(model: nn.Module) -> int:
    """Of the memory behind all parameters that are here, each byte once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in model.parameters()
        if not each.is_meta
    }
    return sum(storages.values())


def parameter_bytes(module: nn.Module) -> int:
    """Of all elements."""
    return sum(each.nbytes for each in module.parameters())


@contextmanager
def _profiled() -> Iterator[profile]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield seen


@contextmanager
def _marked(runner: PipelineRunner) -> Iterator[None]:
    with ExitStack() as patches:
        for unit in runner.stages.units:
            if not runner.stages.is_local(unit.stage):
                outer = _mark(FOREIGN, vars(unit.module)["forward"])
                patches.enter_context(patch.dict(vars(unit.module), {"forward": outer}))
        patches.enter_context(patch.object(MicrobatchFlow, "_depart", _mark(SENDING, MicrobatchFlow._depart)))
        yield


def _mark(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*arguments: Any, **named: Any) -> Any:
        with record_function(name):
            return function(*arguments, **named)

    return marked


def _allocated(seen: profile) -> tuple[int, int]:
    """The calls of foreign modules, and the bytes allocated in them other than to send what is this rank's own."""
    marks: dict[str, list[tuple[int, int]]] = {FOREIGN: [], SENDING: []}
    allocations = []
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() in marks:
            marks[event.name()].append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif event.name() == "[memory]" and event.nbytes() > 0:
            allocations.append((event.start_ns(), event.nbytes()))

    def lies_in(name: str, at: int) -> bool:
        return any(start <= at <= stop for start, stop in marks[name])

    num_bytes = sum(size for at, size in allocations if lies_in(FOREIGN, at) and not lies_in(SENDING, at))
    return len(marks[FOREIGN]), num_bytes
