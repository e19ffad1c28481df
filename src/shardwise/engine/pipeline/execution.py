"""One call under placement: its inputs move to its stage, it is executed there and inferred elsewhere.

Whatever the call gives is described alike on all ranks, by the entry that all of them inferred or were told: which
outputs there are, which of them are inputs or views of inputs, which inputs were written to.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.engine.pipeline.calls import Call, Unit
from shardwise.engine.pipeline.fakes import storage_of
from shardwise.engine.pipeline.flows import Flow
from shardwise.engine.pipeline.inference import Entry, Inputs, Writes, describe
from shardwise.engine.pipeline.nested import filled, is_plain, put_into, tensors_in, told_in, transform
from shardwise.engine.pipeline.sites import user_site
from shardwise.engine.pipeline.values import Family, Memory, Spec, StageTensor, Value
from shardwise.errors import ModelError

if TYPE_CHECKING:
    from shardwise.engine.pipeline.runner import PipelineRunner

_OF_ANOTHER_STAGE = (
    "{name!r} computes with a parameter or a buffer of a module on another stage, which it was given or keeps in an "
    "attribute ({site}); place both modules on one stage, or hand it the tensor"
)


class _RefuseForeign(TorchFunctionMode):
    """Nothing that a module computes may come from another stage's module, which has no values here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(type(each) is nn.Parameter and each.is_meta for each in (*args, *(kwargs or {}).values())):
            raise ModelError(_OF_ANOTHER_STAGE.format(name=self._name, site=user_site()))
        return func(*args, **(kwargs or {}))


def execute(
    runner: "PipelineRunner",
    flow: Flow,
    call: Call,
    stage: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of the call, with values of `stage` in it; None: the latest stage among the inputs."""
    inputs = Inputs(call, args, kwargs, flow.adopted, flow.opaque)
    staged = {at: each for at, each in enumerate(inputs.tensors) if isinstance(each, StageTensor)}
    if stage is None:
        stage = max(each.value.stage for each in staged.values())
    for each in staged.values():
        _refuse_custom_function(each)
    if any(runner.stage_of(module) not in (None, stage) for module in inputs.modules):
        raise ModelError(_OF_ANOTHER_STAGE.format(name=call.name, site=user_site()))
    flow.enter(call.name, stage, inputs.numbers)
    moved = {at: flow.to_stage(each, stage) for at, each in staged.items()}
    signature, entry = runner.inference.look_up(call, inputs)
    result: Any = None
    told: list[Any] | None = None
    used: list[torch.Tensor] = []
    made: list[torch.Tensor] | None = None
    is_new = entry is None
    if runner.is_local(stage):
        used = _tensors_here(inputs, moved)
        versions = [each._version for each in used]
        result = _run(runner, flow, call, stage, inputs, used, is_described=not is_new)
        if entry is None:
            written = [at for at, each in enumerate(used) if each._version != versions[at]]
            fresh = describe(
                result, used, inputs.objects, written=written, writes_kept=True, has_known_shapes=False
            )
            entry = flow.tell(stage, lambda: fresh)
        elif entry.tells:
            flow.tell(stage, lambda: told_in(result))
        made = tensors_in(result)
        _check(call, entry, made, flow, is_example=not _all_known(entry, moved))
        _check_writes(call, entry, used, versions)
    elif entry is None:
        entry = flow.tell(stage, _nothing)
    elif entry.tells:
        told = flow.tell(stage, _nothing)
    if is_new:
        runner.inference.learn(signature, entry)
    assert entry is not None
    if call.draws:
        _draw_alike(runner, flow, call, inputs, is_local=result is not None)
    _write(runner, flow, call, inputs, entry, moved)
    if entry.writes_kept and isinstance(call, Unit):
        flow.touch(f"{call.name}.")
    wrapped = _wrap(flow, call, stage, inputs, entry, moved, made)
    if made is not None:
        _note_doubts(call, entry, used, made, moved, wrapped)
    if result is not None:
        _note_opaque(flow, inputs, result)
    return _deliver(call, inputs, entry if told is None else entry.telling(told), result, wrapped)


def _note_opaque(flow: Flow, inputs: Inputs, result: Any) -> None:
    """Remember objects that were made here: other ranks have nothing that stands for what is in them."""
    known = {id(each) for each in inputs.objects}

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) and not is_plain(leaf) and id(leaf) not in known:
            flow.opaque[id(leaf)] = leaf
        return leaf

    transform(result[0], note)


def _run(
    runner: "PipelineRunner",
    flow: Flow,
    call: Call,
    stage: int,
    inputs: Inputs,
    tensors: Sequence[torch.Tensor],
    *,
    is_described: bool,
) -> Any:
    """The result of a call that is executed here."""
    args, kwargs = inputs.filled(tensors, inputs.objects)
    writes = Writes(call, args, kwargs, inputs.objects)
    try:
        # Where it could be tried, it was seen that it needs nothing of other stages.
        with runner.glue.aside(), nullcontext() if is_described else _RefuseForeign(call.name):
            answer, records = call.run(args, kwargs)
            return answer, records, writes.found()
    except Exception as error:
        error.add_note(
            f"shardwise: in {call.name!r} on stage {stage} (rank {runner.rank} of the pipeline), microbatch "
            f"{flow.number}"
        )
        raise


def _tensors_here(inputs: Inputs, moved: Mapping[int, Value]) -> list[torch.Tensor]:
    """The tensors that a call takes where it is executed."""
    tensors = [moved[at].local if at in moved else each for at, each in enumerate(inputs.tensors)]
    assert all(each is not None for each in tensors)
    return tensors  # type: ignore[return-value]


def _draw_alike(runner: "PipelineRunner", flow: Flow, call: Call, inputs: Inputs, *, is_local: bool) -> None:
    """Draw what the owner draws: what comes next in the program goes on from the same numbers on all ranks."""
    if runner.random.stream_ends_with_call():
        return
    specs = [flow.shape_known(each) if isinstance(each, StageTensor) else None for each in inputs.tensors]
    if is_local:
        return
    zeros = [
        each if spec is None else torch.zeros(spec.shape, dtype=spec.dtype, device=runner.device)
        for each, spec in zip(inputs.tensors, specs, strict=True)
    ]
    args, kwargs = inputs.filled(zeros, inputs.objects)
    with torch.no_grad():
        call.run(args, kwargs)


def _nothing() -> Any:
    raise AssertionError("only the owner of a stage has news of it")


def _all_known(entry: Entry, moved: dict[int, Value]) -> bool:
    return entry.has_known_shapes and all(value.has_known_shape for value in moved.values())


def _check(call: Call, entry: Entry, made: Sequence[torch.Tensor], flow: Flow, *, is_example: bool) -> None:
    """What came out is what all other ranks take it for."""
    if any(each.is_meta for each in made):
        raise ModelError(_OF_ANOTHER_STAGE.format(name=call.name, site=user_site()))
    expected = [output.spec for output in entry.outputs]
    actual = [Spec.of(each) for each in made]
    fits = len(expected) == len(actual) and all(
        want.dtype == got.dtype
        and want.requires_grad == got.requires_grad
        and len(want.shape) == len(got.shape)
        and (is_example or want.shape == got.shape)
        for want, got in zip(expected, actual, strict=True)
    )
    if not fits:
        raise ModelError(
            f"{call.name!r} gave {_described(actual)} in microbatch {flow.number}, and before, for inputs of the same "
            f"shapes, {_described(expected)}; other stages rely on its number of outputs, their dtypes and dims, and "
            f"on which of them require a gradient ({user_site()})"
        )


def _check_writes(call: Call, entry: Entry, used: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """What was written to is what all other ranks take it for; a write that is left out does no harm."""
    written = [each for each, before in zip(used, versions, strict=True) if each._version != before]
    if written and not {storage_of(each) for each in written} <= {storage_of(used[at]) for at, _ in entry.written}:
        raise ModelError(
            f"{call.name!r} writes in place to a tensor that it was given ({user_site()}), and before, for inputs of "
            "the same shapes, it did not; other stages rely on it: return the new values instead"
        )


def _described(specs: Sequence[Spec]) -> str:
    each = [
        f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}{' with gradient' if spec.requires_grad else ''}"
        for spec in specs
    ]
    return ", ".join(each) or "no tensors"


def _write(
    runner: "PipelineRunner", flow: Flow, call: Call, inputs: Inputs, entry: Entry, moved: dict[int, Value]
) -> None:
    """Account for inputs that were written to in place."""
    for at, spec in entry.written:
        tensor = inputs.tensors[at]
        if not isinstance(tensor, StageTensor):
            _write_to_plain(runner, flow, call, tensor, moved)
            continue
        value = moved[at]
        if value.memory.doubt:
            raise ModelError(
                f"{user_site()}: {call.name!r} writes in place to what {value.memory.doubt}, and other ranks cannot "
                "know which of these tensors share their memory; write to a copy (clone), or write inside of a module "
                "that is placed on a stage"
            )
        if tensor.value is not value:
            _refuse_views_left_behind(call, inputs, tensor, moved)
            if tensor.value.is_kept:
                raise ModelError(
                    f"{user_site()}: {call.name} writes values of stage {value.stage} to {tensor.value.maker!r}, which "
                    f"the model keeps on stage {tensor.value.stage}; place both on one stage"
                )
            tensor.rebind(value)  # it was handed on and written to there: from now on it lives there
        if value.memory.plain is not None:
            flow.shade(value.memory.plain)
        origin = value.memory.origin
        while origin is not None:  # views stayed behind
            origin.stale = (
                f"a view of what {value.maker!r} made on an earlier stage is used, after {call.name!r} wrote to it with "
                f"values of stage {value.stage}; write to a copy (clone) instead"
            )
            origin = origin.origin
        value.memory.num_writes += 1
        value.maker, value.spec = call.name, spec
        tensor.family.reset()


def _refuse_views_left_behind(
    call: Call, inputs: Inputs, tensor: StageTensor, moved: Mapping[int, Value]
) -> None:
    """A call got copies of two views of one memory, and wrote to one of them: the other copy does not show it."""
    for at in moved:
        other = inputs.tensors[at]
        assert isinstance(other, StageTensor)
        if other is not tensor and other.value.memory is tensor.value.memory:
            raise ModelError(
                f"{call.name!r} writes in place to what {tensor.value.maker!r} made on stage {tensor.value.stage}, and "
                f"is given another view of it ({user_site()}), which stays as it was on stage {moved[at].stage}; write "
                "to a copy (clone) instead"
            )


def _write_to_plain(
    runner: "PipelineRunner", flow: Flow, call: Call, tensor: torch.Tensor, moved: dict[int, Value]
) -> None:
    """A tensor that all ranks have was written to on one: from now on it stands for a value of that stage."""
    if runner.is_buffer_of_all(tensor):
        raise ModelError(
            f"{user_site()}: {call.name} writes values of a stage to a buffer of a module that runs on all ranks; "
            "place that module on a stage"
        )
    if isinstance(call, Unit) or not moved:
        raise ModelError(
            f"{call.name!r} writes in place to a tensor that it was given and that all ranks have, but is executed on "
            f"one rank only ({user_site()}); return the new values instead"
        )
    stage = max(value.stage for value in moved.values())
    local = tensor if any(value.local is not None for value in moved.values()) else None
    spec = Spec.of(tensor)._replace(requires_grad=any(value.spec.requires_grad for value in moved.values()))
    flow.hold(tensor, Value(stage, spec, local, call.name))
    flow.shade(tensor)


def _wrap(
    flow: Flow,
    call: Call,
    stage: int,
    inputs: Inputs,
    entry: Entry,
    moved: dict[int, Value],
    made: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """The outputs as values of the stage."""
    known = _all_known(entry, moved)
    made_of = [moved[at].lineage if at in moved else 0 for at in range(len(inputs.tensors))]
    wrapped: list[torch.Tensor] = []
    for at, output in enumerate(entry.outputs):
        local = None if made is None else made[at]
        if output.same_as is not None:
            wrapped.append(_same(flow, inputs.tensors[output.same_as], moved.get(output.same_as), output.spec))
            continue
        if output.view_of is not None and output.view_of in moved:
            memory = moved[output.view_of].memory
        elif output.beside is not None and isinstance(beside := wrapped[output.beside], StageTensor):
            memory = beside.value.memory
        else:
            memory = Memory(plain=None if output.view_of is None else inputs.tensors[output.view_of])
        has_known_shape = known or not output.spec.shape
        value = Value(
            stage,
            output.spec,
            local,
            call.name,
            memory=memory,
            has_known_shape=has_known_shape,
            lineage=flow.lineage_of(f"{call.name} {at}", made_of),
            module=call.name if isinstance(call, Unit) else _origin(inputs, stage),
        )
        wrapped.append(StageTensor(flow, value))
    return wrapped


def _note_doubts(
    call: Call,
    entry: Entry,
    used: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    moved: Mapping[int, Value],
    wrapped: Sequence[torch.Tensor],
) -> None:
    """Where a result shares memory with something that all ranks take for apart from it, or the other way round.

    Strides, which decide it, depend on kernels that fake tensors may not know, and on shapes that only the owner knows.
    Reading is right all the same; only a write in place would be seen elsewhere than in one process.
    """
    places = {storage_of(each): at for at, each in reversed(list(enumerate(used)))}
    earlier: dict[int, int] = {}
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
        if is_right or not isinstance(value, StageTensor):
            continue
        if output.same_as is not None:
            value.value.local = tensor
        memories = [value.value.memory]
        memories += [moved[each].memory for each in (shares[0], output.view_of) if each in moved]
        for memory in memories:
            memory.doubt = f"{call.name!r} gave or was given on stage {value.value.stage}"


def _origin(inputs: Inputs, stage: int) -> str:
    """The placed module from which the result of an operation comes: that of its first input on the stage."""
    values = [each.value for each in inputs.tensors if isinstance(each, StageTensor)]
    return next((each.module for each in values if each.stage == stage), values[0].module)


def _same(flow: Flow, tensor: torch.Tensor, value: Value | None, spec: Spec) -> torch.Tensor:
    """An output that is one of the inputs."""
    if not isinstance(tensor, StageTensor) or value is None:
        return flow.adopted(tensor)
    if tensor.value is not value:
        return StageTensor(flow, value, tensor.family if value in tensor.family.copies.values() else Family(value))
    value.spec = spec  # requires_grad_(), unsqueeze_()
    return tensor


def _deliver(call: Call, inputs: Inputs, entry: Entry, result: Any, wrapped: Sequence[torch.Tensor]) -> Any:
    """The result as the program gets it, after hooks inside the module have been told."""
    if result is None:
        answer, records, writes = filled(entry.skeleton, wrapped, inputs.objects)
    else:
        following = iter(wrapped)
        answer, records, writes = transform(
            result, lambda leaf: next(following) if isinstance(leaf, torch.Tensor) else leaf
        )
    for number, key, value in writes:
        put_into(inputs.containers[number], key, value)
    if records and isinstance(call, Unit) and (changed := call.tell_hooks(records)):
        raise ModelError(
            f"a forward hook on {changed!r}, inside the placed module {call.name!r}, changes its output; hooks inside "
            "placed modules are called after the whole module, on all ranks, and can only look: put the change into "
            "the module, or place its parts one by one"
        )
    return answer


def _refuse_custom_function(tensor: StageTensor) -> None:
    """Ops inside a custom autograd function run without a graph: its backward would be lost without a word."""
    with torch._C.DisableTorchFunctionSubclass():
        node = tensor.grad_fn
    if node is not None:
        name = type(node).__name__.removesuffix("Backward")
        raise ModelError(
            f"{user_site()}: the custom autograd function {name} is called on values of a stage, between placed "
            "modules; call it inside a module, and place that module on a stage (if it is an activation checkpoint: "
            "use_reentrant=False)"
        )
