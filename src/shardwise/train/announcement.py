"""The lines that a run prints before its first update, and on its schedule."""

import re
from collections.abc import Iterable, Mapping

from torch import nn

from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.plan import Placement
from shardwise.plan.schedules import SCHEDULES, Schedule
from shardwise.plan.timeline import ideal_bubble
from shardwise.runs.quantities import count
from shardwise.space import Mesh
from shardwise.train.config import RunConfig
from shardwise.train.run_data import RunData

_SHOWN_NAMES = 5


def sizes_of(model: nn.Module) -> dict[str, int]:
    """The elements of every parameter; to call before `parallelize`, which drops the parameters of other ranks."""
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def changed_schedule(pipeline: PipelineRunner | None) -> list[str]:
    """A line where the pipeline could not run the schedule that was asked for."""
    schedule = None if pipeline is None else pipeline.schedule
    # `adapt` appends to the name how it changed a schedule: "1f1b, stages 0 to 2 in step". A schedule written by the
    # user has a name of its own, and is never changed.
    if schedule is None or schedule.name in SCHEDULES or ", " not in schedule.name:
        return []
    return [
        f"schedule run: {schedule.name}. Values go back to earlier stages, or ranks wait for announcements, so "
        "stages cannot run ahead of each other. See docs/guides/pipeline.md, Models that feed values back"
    ]


def announcement(
    config: RunConfig,
    model: nn.Module,
    sizes: Mapping[str, int],
    data: RunData,
    *,
    placement: Placement | None,
) -> list[str]:
    """The lines. `sizes`: see `sizes_of`; `placement`: of the stages, where there are any."""
    plan, train = config.plan, config.train
    num_data_ranks = plan.mesh.num_data_ranks
    length = "" if data.corpus is None else f" of {data.tokens_per_row} tokens"
    drawn = [f"initial parameters: drawn by each module, from its name and the seed {train.seed}"]
    return [
        f"{config.name}: {type(model).__name__}, {count(sum(sizes.values()))} parameters, mesh {plan.mesh}, "
        f"stage {plan.sharding.stage}, compute {plan.precision.compute or 'as the model is'}",
        *([] if config.model.initialise == "whole" else drawn),
        *([] if placement is None else _stage_lines(config, sizes, placement)),
        f"an update: {train.global_batch} rows{length}, as {num_data_ranks} (data ranks) x "
        f"{plan.merge.microbatches} (microbatches) x {train.microbatch} (rows)",
        _data_words(config, data),
    ]


def _data_words(config: RunConfig, data: RunData) -> str:
    read = config.train.steps * config.train.global_batch * data.tokens_per_row
    evaluated = len(data.held_out) * data.tokens_per_row
    if data.corpus is not None:
        return (
            f"text: {count(len(data.corpus.training))} tokens to train on, {config.train.steps} updates read "
            f"{count(read)}; {count(data.corpus.held_out.size)} held out, an evaluation reads {count(evaluated)}"
        )
    known = data.data.num_samples
    size = "samples without a known end" if known is None else f"{count(known)} samples to train on"
    name = config.data.dataset or config.data.source
    return f"{name}: {size}, {config.train.steps} updates read {count(read)}; an evaluation reads {count(evaluated)}"


def abbreviated(names: Iterable[str]) -> str:
    """Names in one line: neighbours that differ by one in their last number are put together, and many are left out.

    >>> abbreviated(["embed", "layers.0", "layers.1", "layers.2", "norm"])
    'embed, layers.0-2, norm'
    >>> abbreviated(["encoder.3.mlp", "encoder.4.mlp", "a", "b", "c", "d", "e"])
    'encoder.3-4.mlp, a, b, ... (2 more), e'
    """
    groups: list[tuple[str, str, int, int]] = []
    for name in names:
        # The last number of a name counts layers; numbers before it, as in "block.0.layer.3", are part of the head.
        found = re.fullmatch(r"(.*?\b)(\d+)((?:\.[^.\d][^.]*)*)", name)
        head, number, tail = (found[1], int(found[2]), found[3]) if found else (name, -1, "")
        if groups and number >= 0 and (head, tail, number - 1) == (*groups[-1][:2], groups[-1][3]):
            groups[-1] = (head, tail, groups[-1][2], number)
        else:
            groups.append((head, tail, number, number))
    words = [
        f"{head}{'' if first < 0 else first}{f'-{last}' if last > first else ''}{tail}"
        for head, tail, first, last in groups
    ]
    if len(words) > _SHOWN_NAMES:
        left_out = len(words) - _SHOWN_NAMES + 1
        words[_SHOWN_NAMES - 2 : -1] = [f"... ({left_out} more)"]
    return ", ".join(words)


def _stage_lines(config: RunConfig, sizes: Mapping[str, int], placement: Placement) -> list[str]:
    """The schedule, and a line for each stage."""
    plan = config.plan
    held = [0] * placement.num_stages
    for name, size in sizes.items():
        held[_stage_of(name, placement)] += size
    whole = sum(held) or 1
    placed = {**placement.modules, **placement.parameters}
    lines = [_schedule_line(config, placement)]
    for stage, size in enumerate(held):
        names = abbreviated(name for name, its_stage in placed.items() if its_stage == stage)
        ranks = _ranks_of(plan.mesh, placement.rank_of(stage))
        lines.append(f"  stage {stage} ({ranks}): {names}: {count(size)} parameters, {size / whole:.0%}")
    return lines


def _schedule_line(config: RunConfig, placement: Placement) -> str:
    plan = config.plan
    schedule, num_microbatches = plan.pipeline.schedule, plan.merge.microbatches
    is_named = schedule in SCHEDULES
    name = schedule if is_named else Schedule.parse(schedule).name
    line = f"schedule {name}: {num_microbatches} (microbatches) through {placement.num_stages} stages"
    if not is_named:
        return line
    bubble = ideal_bubble(
        schedule,
        num_ranks=placement.num_ranks,
        num_chunks=placement.num_stages // placement.num_ranks,
        num_microbatches=num_microbatches,
    )
    return f"{line}; a bubble of {bubble:.1%} if all took the same time"


def _stage_of(parameter: str, placement: Placement) -> int:
    """The stage of a parameter: given, or that of the module around it which is placed."""
    if parameter in placement.parameters:
        return placement.parameters[parameter]
    module = parameter
    while module not in placement.modules:
        assert module, "a placement has a stage for every parameter"
        module = module.rpartition(".")[0]
    return placement.modules[module]


def _ranks_of(mesh: Mesh, coordinate: int) -> str:
    ranks = [rank for rank in range(mesh.size) if mesh.coordinates(rank)["pp"] == coordinate]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
