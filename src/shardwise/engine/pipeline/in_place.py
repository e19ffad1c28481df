"""Writes in place: to values of a stage, to their copies and views, and to what all ranks have."""

from collections.abc import Mapping, Sequence

import torch

from shardwise.engine.pipeline.call_inference import CallInputs, CallOutcome
from shardwise.engine.pipeline.fakes import storage_of
from shardwise.engine.pipeline.flows import MicrobatchFlow
from shardwise.engine.pipeline.sites import user_site
from shardwise.engine.pipeline.stage_values import Spec, StageTensor, StageValue
from shardwise.engine.pipeline.staged_calls import PlacedModule, StagedCall
from shardwise.errors import ModelError


def account_for_writes(
    flow: MicrobatchFlow, call: StagedCall, inputs: CallInputs, entry: CallOutcome, moved: dict[int, StageValue]
) -> None:
    """Account for inputs that were written to in place, and for what a module keeps."""
    if entry.writes_kept and isinstance(call, PlacedModule):
        flow.touch(f"{call.name}.")
    for at, spec in entry.written:
        tensor = inputs.tensors[at]
        if not isinstance(tensor, StageTensor):
            _write_to_plain(flow, call, tensor, spec, moved)
            continue
        value = moved[at]
        if value.memory.doubt:
            raise ModelError(
                f"{user_site()}: {call.name!r} writes in place to what {value.memory.doubt}, and other ranks cannot "
                "know which of these tensors share their memory; write to a copy (clone), or write inside of a module "
                "that is placed on a stage"
            )
        _refuse_views_left_behind(call, value, moved)
        if tensor.value is not value and tensor.value.is_kept:
            raise ModelError(
                f"{user_site()}: {call.name} writes values of stage {value.stage} to {tensor.value.maker!r}, which "
                f"the model keeps on stage {tensor.value.stage}; place both on one stage"
            )
        if value.memory.plain is not None:
            flow.shade(value.memory.plain)
        origin = value.memory.origin
        while origin is not None:  # views stayed behind
            origin.stale = (
                f"a view of what {value.maker!r} made on another stage is used, after {call.name!r} wrote to it with "
                f"values of stage {value.stage}; write to a copy (clone) instead"
            )
            origin = origin.origin
        value.memory.num_writes += 1
        value.maker, value.spec = call.name, spec
        tensor.rebind(value)  # where it was handed on and written to, it lives from now on


def _refuse_views_left_behind(call: StagedCall, value: StageValue, moved: Mapping[int, StageValue]) -> None:
    """A call got copies of two views of one memory, and wrote to one of them: the other copy does not show it."""
    for other in moved.values():
        if other.memory is not value.memory and other.memory.root is value.memory.root:
            raise ModelError(
                f"{call.name!r} writes in place to what {value.maker!r} made, and is given another view of it "
                f"({user_site()}), which stays as it was on stage {value.stage}; write to a copy (clone) instead"
            )


def _write_to_plain(
    flow: MicrobatchFlow, call: StagedCall, tensor: torch.Tensor, spec: Spec, moved: dict[int, StageValue]
) -> None:
    """A tensor that all ranks have was written to on one: from now on it stands for a value of that stage."""
    if flow.stages.is_buffer_of_all(tensor):
        raise ModelError(
            f"{user_site()}: {call.name} writes values of a stage to a buffer of a module that runs on all ranks; "
            "place that module on a stage"
        )
    if isinstance(call, PlacedModule) or not moved:
        raise ModelError(
            f"{call.name!r} writes in place to a tensor that it was given and that all ranks have, but is executed on "
            f"one rank only ({user_site()}); return the new values instead"
        )
    stage = max(value.stage for value in moved.values())
    local = tensor if any(value.local is not None for value in moved.values()) else None
    flow.hold(tensor, StageValue(stage, spec, local, call.name))
    flow.shade(tensor)


def check_writes(call: StagedCall, entry: CallOutcome, used: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """What was written to is what all other ranks take it for; a write that is left out does no harm."""
    written = [each for each, before in zip(used, versions, strict=True) if each._version != before]
    if written and not {storage_of(each) for each in written} <= {storage_of(used[at]) for at, _ in entry.written}:
        raise ModelError(
            f"{call.name!r} writes in place to a tensor that it was given ({user_site()}), and before, for inputs of "
            "the same shapes, it did not; other stages rely on it: return the new values instead"
        )


def note_doubts(
    call: StagedCall,
    entry: CallOutcome,
    used: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    moved: Mapping[int, StageValue],
    wrapped: Sequence[torch.Tensor],
) -> bool:
    """Where a result shares memory with something that all ranks take for apart from it, or the other way round.

    Strides, which decide it, depend on kernels that fake tensors may not know, and on shapes that only the owner knows.
    Reading is right all the same; only a write in place would be seen elsewhere than in one process. Gives whether
    there is no such place.
    """
    places = {storage_of(each): at for at, each in reversed(list(enumerate(used)))}
    earlier: dict[int, int] = {}
    is_alike = True
    for at, (output, tensor) in enumerate(zip(entry.outputs, made, strict=True)):
        storage = storage_of(tensor)
        shares = (places.get(storage), earlier.get(storage))
        earlier.setdefault(storage, at)
        if output.view_of is not None:
            is_right = storage_of(used[output.view_of]) == storage
        elif output.beside is not None:
            is_right = storage_of(made[output.beside]) == storage
        else:
            is_right = shares == (None, None)
        value = wrapped[at]
        is_alike &= is_right
        if is_right or not isinstance(value, StageTensor):
            continue
        if output.same_as is not None:
            value.value.local = tensor
        memories = [value.value.memory]
        memories += [moved[each].memory for each in (shares[0], output.view_of) if each is not None and each in moved]
        for memory in memories:
            memory.doubt = f"{call.name!r} gave or was given on stage {value.value.stage}"
    return is_alike
