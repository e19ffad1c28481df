"""One call under placement: its inputs move to its stage, it is executed there and inferred elsewhere.

All ranks describe the outputs of the call alike, by the entry that they inferred or were sent: the outputs, those that
are inputs or views of inputs, and the inputs that were written to.

    y = block(h), h on stage 0, block on stage 1    rank of stage 0        rank of stage 1        rank of stage 2
    Arguments: tensors, objects, numbers apart      alike                  alike                  alike
    flow.enter: count the call                      alike                  alike                  alike
    flow.to_stage(h, 1)                             sends                  receives               counts the transfer
    _outcome                                        looks up               looks up and runs      looks up
    _account_for_writes, _wrap, _deliver            y: StageTensor, local=None on ranks 0 and 2, the tensor on rank 1

Most outcomes are plain, tensors in tuples and no write. Once known they are replayed: the rank that executes the call
compares shapes, memories and versions, with few calls of Python, and goes the long way on for what is unlike.

In-place writes, in `_account_for_writes` (all ranks decide the same, from the entry):

    to a value on its own stage          counted; its copies on other stages are behind and cross anew when used
    to a copy on the call's stage        the program's object is that copy from now on; views on the old stage are stale
    to a tensor that all ranks have      it stands for a value of the stage; views of it taken before are refused
    by a module to buffers of its stage  copies of these on other stages are behind
    to what another stage's module keeps, or a buffer of a module of all ranks       refused
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from shardwise.comm.nested_values import (
    ContainerSlot,
    SeenContainers,
    TensorSlot,
    filled,
    is_plain,
    put_into,
    tensors_in,
    transform,
)
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.pipeline.arguments import Arguments, put_in
from shardwise.engine.pipeline.changed_objects import ObjectContents, put_changes
from shardwise.engine.pipeline.infer import CallOutcome, Inference, Known, Writes, describe
from shardwise.engine.pipeline.nested import Opaque, numbers_and_texts_in, state_text, user_site
from shardwise.engine.pipeline.stage_tensor import Spec, StageTensor, StageValue, ValueCopies, ViewMemory
from shardwise.engine.pipeline.staged_calls import (
    OF_ANOTHER_STAGE,
    Fakes,
    ForeignParameters,
    PlacedModule,
    StagedCall,
)
from shardwise.engine.pipeline.transfers import MicrobatchFlow
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, storage_of, version_of
from shardwise.errors import ModelError


class Inside(NamedTuple):
    """Where a call is executed, or tried."""

    stage: int
    lent: Sequence[nn.Module] = ()
    """Modules that it was given, and all inside of them."""
    fakes: Fakes | None = None
    """With which it is tried; None: it is executed."""


_inside = functools.cache(Inside)


class _Begun(NamedTuple):
    """A call that all ranks have counted, and whose inputs have come to its stage."""

    flow: MicrobatchFlow
    call: StagedCall
    stage: int
    given: Arguments
    moved: dict[int, StageValue]
    """The values of stages among its tensors, by number, on the stage of the call."""

    @property
    def inside(self) -> Inside:
        """Where it is executed."""
        return Inside(self.stage, self.given.lent) if self.given.lent else _inside(self.stage)


class _Here(NamedTuple):
    """A call that was executed on this rank."""

    result: Any
    """What it gave, the records of inner hooks, and the writes to containers."""
    used: list[torch.Tensor]
    """The tensors that it took."""
    made: list[torch.Tensor]
    written: list[int]
    """Of those that it took, which were written to: autograd counts, also where a trial saw no write."""

    @classmethod
    def of(cls, result: Any, used: list[torch.Tensor], versions: list[int]) -> "_Here":
        """versions: of what it took, before."""
        written = [
            at for at, (each, before) in enumerate(zip(used, versions, strict=True)) if version_of(each) != before
        ]
        return cls(result, used, tensors_in(result), written)


@dataclass(frozen=True, kw_only=True, slots=True)
class Executor:
    """Executes calls on their stages, and infers their outcome elsewhere."""

    inference: Inference
    random: KeyedRandom
    foreign: ForeignParameters
    aside: Callable[[Inside], AbstractContextManager[None]]
    """The context in which a placed module runs: the glue sees none of its operations."""

    def execute(
        self,
        flow: MicrobatchFlow,
        call: StagedCall,
        stage: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of the call, with values of `stage` in it; None: the latest stage among the inputs."""
        begun = _begin(flow, call, stage, args, kwargs)
        given = begun.given
        if call.is_user_code and given.objects:
            if flow.purpose == "generation":
                return self._finish(begun, *self._outcome_with_objects(begun))
            flow.give(call.name, given.objects)
        known = self.inference.look_up(given)
        if known is None:
            with self.aside(self._trying(begun)):
                known = self.inference.try_out(call, given, begun.stage)
            self._learn(begun, known)
        # The key has the shapes of the values; a copy on another stage may have come there when its was not known yet.
        if (
            known.outcome is not None
            and known.is_plain
            and given.is_plain
            and all(map(_HAS_KNOWN_SHAPE, begun.moved.values()))
        ):
            return self._replay(begun, known.outcome)
        entry, here = self._outcome(begun, known.outcome)
        if call.draws:
            self._draw_alike(begun, is_local=here is not None)
        return self._finish(begun, entry, here)

    def answer(self, flow: MicrobatchFlow, call: StagedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call reads from values, on all ranks: numbers, texts, and containers of these."""
        begun = _begin(flow, call, None, args, kwargs)

        def read() -> Any:
            real_args, real_kwargs, _ = begun.given.filled(_tensors_here(begun), begun.given.objects)
            with self.aside(begun.inside):
                return call.run_plainly(real_args, real_kwargs)

        try:
            return flow.answer(begun.stage, read)
        except Exception as error:
            _note_place(error, begun)
            raise

    def _replay(self, begun: _Begun, entry: CallOutcome) -> Any:
        """The result of a call whose outcome is known, and tensors alone."""
        flow, call, stage, given, _ = begun
        made: list[torch.Tensor] | None = None
        if flow.stages.is_local(stage):
            used = _tensors_here(begun)
            versions = list(map(version_of, used))
            args, kwargs, _ = given.filled(used, ())
            try:
                with self.aside(_inside(stage)):
                    result = call.run_plainly(args, kwargs)
            except Exception as error:
                _end(error, begun)
                raise
            made = _plain_outputs(entry, result, used)
            if made is None or versions != list(map(version_of, used)):
                # Whether it is refused, and how, is decided where it always is.
                here = _Here.of((result, (), ()), used, versions)
                _check(begun, entry, here)
                return self._finish(begun, entry, here)
        self.inference.num_replayed += 1
        if entry.writes_kept and isinstance(call, PlacedModule):
            flow.touch(call.name, begun.stage)
        wrapped = _wrap(begun, entry, made, are_known=True)
        if type(entry.skeleton[0]) is TensorSlot:  # as of most modules
            return wrapped[0]
        (answer,) = put_in(entry.skeleton[:1], wrapped)
        return answer

    def _finish(self, begun: _Begun, entry: CallOutcome, here: _Here | None) -> Any:
        """The result of a call with this outcome."""
        _account_for_writes(begun, entry)
        wrapped = _wrap(begun, entry, None if here is None else here.made, are_known=_all_known(entry, begun))
        if here is not None:
            _note_doubts(begun, entry, here, wrapped)
            _note_opaque(begun, here.result)
        return self._deliver(begun, entry, None if here is None else here.result, wrapped)

    def _outcome(self, begun: _Begun, entry: CallOutcome | None) -> tuple[CallOutcome, _Here | None]:
        """The outcome of a call, and its tensors where it is executed; entry: what is known of it."""
        flow, call, stage, given, _ = begun
        if not flow.stages.is_local(stage):
            if entry is None:
                entry = flow.announce(stage, _nothing)
                self._learn(begun, Known.of(entry, call))
            elif entry.announces:
                entry = entry.announcing(flow.announce(stage, _nothing))
            return entry, None
        here = self._run(begun, is_described=entry is not None)
        if entry is None:
            made_known = describe(here.result, here.used, given.objects, call, here.written, has_known_shapes=False)
            entry = flow.announce(stage, lambda: made_known)
            # What is learnt is the first outcome, with its shapes as an example: `has_known_shapes` says so.
            self._learn(begun, Known.of(entry, call))
        elif entry.announces:
            flow.announce(stage, lambda: numbers_and_texts_in(here.result))
        _check(begun, entry, here)
        return entry, here

    def _trying(self, begun: _Begun) -> Inside:
        return begun.inside._replace(fakes=self.inference.fakes)

    def _learn(self, begun: _Begun, known: Known) -> None:
        # A recomputation runs on some ranks only. What these learnt in it, others would wait for.
        if begun.flow.is_forward:
            self.inference.learn(begun.given, known)

    def _outcome_with_objects(self, begun: _Begun) -> tuple[CallOutcome, _Here | None]:
        """The outcome of a call that may change objects which it is given, and which outlive it: a cache that grows.

        It depends on all that they hold, so nothing of it is remembered. The rank of the stage says what it gave.
        """
        flow, call, stage, given, _ = begun
        # Those that a placed module made are on one rank only.
        objects = [each for each in given.objects if not isinstance(each, Opaque) and id(each) not in flow.opaque]
        if not flow.stages.is_local(stage):
            entry, changes, held = flow.announce(stage, _nothing)
            if changes is None:
                with self.aside(self._trying(begun)):
                    self.inference.follow(call, given, stage)
            elif not put_changes(objects, changes, self.inference.hollow, flow.device):
                held = "?"
            if held and held != state_text(objects):
                kinds = " and ".join(sorted({type(each).__name__ for each in objects}))
                raise ModelError(
                    f"{call.name!r} is given a {kinds} and runs on another stage, and what it does to that cannot be "
                    f"followed here ({user_site()}). Generate without a cache (use_cache=False)"
                )
            return entry, None
        before = ObjectContents(objects)
        here = self._run(begun, is_described=False)
        entry = describe(here.result, here.used, given.objects, call, here.written, has_known_shapes=True)
        changes = ObjectContents(objects).changes_since(before)
        held = state_text(objects) if changes is None else ""
        flow.announce(stage, lambda: (entry, changes, held))
        return entry, here

    def _run(self, begun: _Begun, *, is_described: bool) -> _Here:
        """Execute a call here."""
        flow, call, _, given, _ = begun
        used = _tensors_here(begun)
        versions = list(map(version_of, used))
        args, kwargs, containers = given.filled(used, given.objects)
        # What a generation does to objects goes to the other ranks.
        writes = Writes(call, containers, () if flow.purpose == "generation" else given.objects)
        try:
            # Where it could be tried, it was seen that it needs nothing of other stages.
            refusing = nullcontext() if is_described else self.foreign.refusing(call.name)
            with self.aside(begun.inside), given.lending(used), refusing:
                return _Here.of(writes.result(*call.run(args, kwargs, given.lent)), used, versions)
        except Exception as error:
            _end(error, begun)
            raise

    def _draw_alike(self, begun: _Begun, *, is_local: bool) -> None:
        """Draw as many random numbers as the owner: the program goes on with the same stream on all ranks."""
        flow, call, _, given, _ = begun
        if self.random.stream_ends_with_call():
            return
        specs = [flow.shape_known(each) if isinstance(each, StageTensor) else None for each in given.tensors]
        # The shapes above are asked for on all ranks, for an announcement needs its sender: only then do ways part.
        if is_local:
            return
        zeros = [
            each if spec is None else torch.zeros(spec.shape, dtype=spec.dtype, device=flow.device)
            for each, spec in zip(given.tensors, specs, strict=True)
        ]
        args, kwargs, _ = given.filled(zeros, given.objects)
        with torch.no_grad():
            call.run(args, kwargs, given.lent)

    def _deliver(self, begun: _Begun, entry: CallOutcome, result: Any, wrapped: Sequence[torch.Tensor]) -> Any:
        """The result as the program gets it, after hooks inside the module have been called."""
        call, given = begun.call, begun.given
        # The owner keeps the containers that its module made; other ranks build equal ones from the entry.
        # A container that comes again is the same again, and one that was given is the program's own.
        seen = SeenContainers(given.containers)
        if result is None:
            answer, records, writes = filled(entry.skeleton, wrapped, given.objects, fresh=True, seen=seen)
        else:
            following = iter(wrapped)

            def put(leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor):
                    return next(following)
                return seen.made[leaf.number] if type(leaf) is ContainerSlot else leaf

            answer, records, writes = transform(result, put, seen=seen)
        for number, key, value in writes:
            # Into the program's own containers: the call got fresh ones, in which real tensors stood for values.
            put_into(given.containers[number], key, value)
        if records and isinstance(call, PlacedModule):
            self.random.catch_up()  # hooks may draw, also on ranks that do not run the module
            if (changed := call.call_noted_hooks(records, answer, given.lent)) is not None:
                names = {each: name for name, each in begun.flow.stages.model.named_modules()}
                hooked = names.get(changed, type(changed).__name__)
                raise ModelError(
                    f"a forward hook on {hooked!r}, inside the placed module {call.name!r}, changes its output. Hooks "
                    "inside placed modules run after the whole module, on all ranks, and can only look. Put the change "
                    "into the module, or place its parts one by one"
                )
        return answer


def _begin(
    flow: MicrobatchFlow, call: StagedCall, stage: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Begun:
    """Count a call; stage: None for the latest among its inputs."""
    given = Arguments(flow, call, stage, args, kwargs)
    staged = given.staged
    if stage is None:
        # The latest: values go on to later stages anyway. The earliest would send them back, and stages that get
        # values back cannot run ahead of each other.
        stage = max([each.value.stage for _, each in staged])
    with DisableTorchFunctionSubclass():
        for _, each in staged:
            if each.grad_fn is not None:
                _refuse_function(each.grad_fn)
    flow.enter(call.name, stage, given.numbers)
    # On all ranks and before the look-up: each counts the transfer, and what crosses brings its real shape along.
    moved: dict[int, StageValue] = {}
    for at, each in staged:
        moved[at] = flow.to_stage(each, stage)
    return _Begun(flow, call, stage, given, moved)


def _refuse_function(node: object) -> NoReturn:
    """Raise ModelError: ops inside a custom autograd function run without a graph, and its backward would be lost."""
    name = type(node).__name__.removesuffix("Backward")
    raise ModelError(
        f"{user_site()}: the custom autograd function {name} is called on values of a stage, between placed "
        "modules. Call it inside a module, and place that module on a stage. For an activation checkpoint give "
        "use_reentrant=False"
    )


def _note_place(error: Exception, begun: _Begun) -> None:
    error.add_note(
        f"shardwise: in {begun.call.name!r} on stage {begun.stage} (rank {begun.flow.stages.rank} of the pipeline), "
        f"microbatch {begun.flow.number}"
    )


def _end(error: Exception, begun: _Begun) -> None:
    """What is executed here has raised, and no other rank knows."""
    begun.flow.ended = error
    _note_place(error, begun)


def _note_opaque(begun: _Begun, result: Any) -> None:
    """Remember objects that were made here: on other ranks an `Opaque` without contents stands for them."""
    known = {id(each) for each in begun.given.objects}

    def note(leaf: Any) -> Any:
        is_other = isinstance(leaf, torch.Tensor | ContainerSlot) or is_plain(leaf)
        if not is_other and id(leaf) not in known:
            # With the object itself, which keeps it alive: its id must not become that of another object in this
            # forward.
            begun.flow.opaque[id(leaf)] = leaf
        return leaf

    transform(result[0], note)


def _tensors_here(begun: _Begun) -> list[torch.Tensor]:
    """The tensors that a call takes where it is executed."""
    tensors = begun.given.tensors.copy()
    for at, value in begun.moved.items():
        assert value.local is not None
        tensors[at] = value.local
    return tensors


def _nothing() -> Any:
    raise AssertionError("only the owner of a stage has news of it")


_HAS_KNOWN_SHAPE = attrgetter("has_known_shape")
"""Asked at each call: as few calls of Python as can be."""


def _all_known(entry: CallOutcome, begun: _Begun) -> bool:
    return entry.has_known_shapes and all(map(_HAS_KNOWN_SHAPE, begun.moved.values()))


def _check(begun: _Begun, entry: CallOutcome, here: _Here) -> None:
    """Check that outputs and writes are as all other ranks assume. A write that is left out does no harm."""
    flow, call, used, made = begun.flow, begun.call, here.used, here.made
    is_example = not _all_known(entry, begun)
    if any(each.is_meta for each in made):
        raise ModelError(OF_ANOTHER_STAGE.format(name=call.name, site=user_site()))
    fits = len(entry.outputs) == len(made) and all(
        want.spec.dtype == got.dtype
        and want.spec.requires_grad == got.requires_grad
        and len(want.spec.shape) == got.dim()
        and (is_example or want.spec.shape == got.shape)
        for want, got in zip(entry.outputs, made, strict=True)
    )
    if not fits:
        expected, actual = [output.spec for output in entry.outputs], [Spec.of(each) for each in made]
        raise ModelError(
            f"{call.name!r} gave {_described(actual)} in microbatch {flow.number}, and before, for inputs of the same "
            f"shapes, {_described(expected)}. Other stages rely on the number of outputs, their dtypes and dims, and "
            f"which of them require a gradient ({user_site()})"
        )
    # What an operation gives in the place of its input has the elements of the input (`contiguous`).
    if call.is_user_code and any(
        output.same_as is not None and tensor is not used[output.same_as]
        for output, tensor in zip(entry.outputs, made, strict=True)
    ):
        raise ModelError(
            f"{call.name!r} gave an input that it wrote to before, and gives another tensor in microbatch "
            f"{flow.number}. Other stages rely on that ({user_site()}); return new tensors in both cases"
        )
    memories = {storage_of(used[at]) for at in here.written}
    if not memories <= {storage_of(used[at]) for at, _ in entry.written}:
        raise ModelError(
            f"{call.name!r} writes in place to an argument ({user_site()}), and before, for inputs of the same "
            "shapes, it did not. Other stages rely on that; return the new values instead"
        )


def _described(specs: Sequence[Spec]) -> str:
    each = [
        f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}{' with gradient' if spec.requires_grad else ''}"
        for spec in specs
    ]
    return ", ".join(each) or "no tensors"


def _wrap(
    begun: _Begun, entry: CallOutcome, made: Sequence[torch.Tensor] | None, *, are_known: bool
) -> list[torch.Tensor]:
    """The outputs as values of the stage. are_known: their shapes."""
    flow, call, stage, arguments, moved = begun
    given = arguments.tensors
    lineages = [moved[at].lineage if at in moved else 0 for at in range(len(given))]
    module = call.name if call.is_user_code else _module_of(begun)
    wrapped: list[torch.Tensor] = []
    for at, output in enumerate(entry.outputs):
        local = None if made is None else made[at]
        if output.same_as is not None:
            wrapped.append(_same(flow, given[output.same_as], moved.get(output.same_as), output.spec))
            continue
        if output.view_of is not None and output.view_of in moved:
            memory = moved[output.view_of].memory
        elif output.shares_with is not None and isinstance(earlier_output := wrapped[output.shares_with], StageTensor):
            memory = earlier_output.value.memory
        else:
            memory = ViewMemory(plain=None if output.view_of is None else given[output.view_of])
        value = StageValue(
            stage,
            output.spec,
            local,
            call.name,
            memory=memory,
            has_known_shape=are_known or not output.spec.shape,
            lineage=flow.lineage_of(call.name, at, lineages),
            module=module,
        )
        wrapped.append(StageTensor(flow, value))
    return wrapped


def _module_of(begun: _Begun) -> str:
    """The placed module from which the result of an operation comes: that of its first input on the stage."""
    values = [each.value for _, each in begun.given.staged]
    return next((each.module for each in values if each.stage == begun.stage), values[0].module)


def _same(flow: MicrobatchFlow, tensor: torch.Tensor, value: StageValue | None, spec: Spec) -> torch.Tensor:
    """An output that is one of the inputs."""
    if not isinstance(tensor, StageTensor) or value is None:
        return flow.adopted(tensor)
    if tensor.value is not value:
        # A parameter stays where it is: this use of it got a copy, and the next call may be on its own stage again.
        if tensor.value.is_kept:
            return StageTensor(
                flow, value, tensor.family if value in tensor.family.copies.values() else ValueCopies(value)
            )
        tensor.value = value  # the same object for the program, which goes on from where it has come to
    value.spec = spec  # requires_grad_(), unsqueeze_()
    return tensor


def _account_for_writes(begun: _Begun, entry: CallOutcome) -> None:
    """Account for writes in place to inputs, and to the parameters and buffers of a module."""
    flow, call, moved = begun.flow, begun.call, begun.moved
    if entry.writes_kept and isinstance(call, PlacedModule):
        flow.touch(call.name, begun.stage)
    for at, spec in entry.written:
        tensor = begun.given.tensors[at]
        if not isinstance(tensor, StageTensor):
            _write_to_plain(begun, tensor, spec)
            continue
        value = moved[at]
        if value.memory.doubt:
            raise ModelError(
                f"{user_site()}: {call.name!r} writes in place to what {value.memory.doubt}, and other ranks cannot "
                "know which of these tensors share their memory. Write to a copy (clone), or write inside a module "
                "that is placed on a stage"
            )
        _refuse_views_left_behind(call, value, moved)
        if tensor.value is not value and tensor.value.is_kept:
            raise ModelError(
                f"{user_site()}: {call.name} writes values of stage {value.stage} to {tensor.value.maker!r}, which is "
                f"on stage {tensor.value.stage}; place both on one stage"
            )
        if value.memory.plain is not None:
            flow.shade(value.memory.plain)
        origin = value.memory.origin
        while origin is not None:  # views stayed behind
            # The write went to the copy. What the origin's stage has in memory is not what one process would have,
            # and views of it are other objects, which no rank can find: so the memory itself is marked.
            origin.stale = (
                f"a view of a tensor that {value.maker!r} made on another stage is used, after {call.name!r} wrote "
                f"values of stage {value.stage} to that tensor. Write to a copy (clone) instead"
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
                f"{call.name!r} writes in place to a tensor that {value.maker!r} made, and gets another view of it "
                f"({user_site()}), which does not change on stage {value.stage}. Write to a copy (clone) instead"
            )


def _write_to_plain(begun: _Begun, tensor: torch.Tensor, spec: Spec) -> None:
    """A tensor that all ranks have was written to on one: from now on it stands for a value of that stage."""
    flow, call, moved = begun.flow, begun.call, begun.moved
    if flow.stages.is_buffer_of_all(tensor):
        raise ModelError(
            f"{user_site()}: {call.name} writes values of a stage to a buffer of a module of all ranks; place that "
            "module on a stage"
        )
    if isinstance(call, PlacedModule) or not moved:
        raise ModelError(
            f"{call.name!r} writes in place to an argument that all ranks have, but runs on one rank only "
            f"({user_site()}); return the new values instead"
        )
    stage = max(value.stage for value in moved.values())
    local = tensor if any(value.local is not None for value in moved.values()) else None
    flow.hold(tensor, StageValue(stage, spec, local, call.name))
    flow.shade(tensor)


def _note_doubts(begun: _Begun, entry: CallOutcome, here: _Here, wrapped: Sequence[torch.Tensor]) -> None:
    """Note where a result shares memory otherwise than all ranks assume.

    Strides, which decide it, depend on kernels that fake tensors may not know, and on shapes that only the owner knows.
    Reading is right all the same; only a write in place would be seen elsewhere than in one process.
    """
    call, moved = begun.call, begun.moved
    for at, shares in enumerate(_shared_otherwise(entry, here.used, here.made)):
        output, value = entry.outputs[at], wrapped[at]
        # Memory of its own where others assume a view: after a write they take the input for written too, and get what
        # it still has.
        is_safe = output.same_as is None and shares == (None, None)
        if shares is None or is_safe or not isinstance(value, StageTensor):
            continue
        if output.same_as is not None:
            value.value.local = here.made[at]
        memories = [value.value.memory]
        memories += [moved[each].memory for each in (shares[0], output.view_of) if each is not None and each in moved]
        for memory in memories:
            # The reading of a tensor is right on all ranks, since its elements are. A write through it is not:
            # another rank would not know which further value shows the write. So only a write is refused, if one
            # ever comes.
            memory.doubt = f"{call.name!r} gave or was given on stage {value.value.stage}"


def _shared_otherwise(
    entry: CallOutcome, used: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> list[tuple[int | None, int | None] | None]:
    """Of each output, the input and the earlier output whose memory it shares; None: as the entry says."""
    memories, made_memories = list(map(storage_of, used)), list(map(storage_of, made))
    found: list[tuple[int | None, int | None] | None] = []
    for at, (output, memory) in enumerate(zip(entry.outputs, made_memories, strict=True)):
        earlier = made_memories.index(memory)
        shares = memories.index(memory) if memory in memories else None, None if earlier == at else earlier
        if output.view_of is not None:
            is_right = memories[output.view_of] == memory
        elif output.shares_with is not None:
            is_right = made_memories[output.shares_with] == memory
        else:
            is_right = shares == (None, None)
        found.append(None if is_right else shares)
    return found


def _plain_outputs(entry: CallOutcome, result: Any, used: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The outputs in a result of tensors in tuples, where they are as all other ranks assume; else None."""
    made: list[torch.Tensor] = []
    if not _takes_apart(entry.skeleton[0], result, made):
        return None
    for output, tensor in zip(entry.outputs, made, strict=True):
        spec = output.spec
        if (
            tensor.shape != spec.shape
            or tensor.dtype != spec.dtype
            or tensor.requires_grad != spec.requires_grad
            or tensor.is_meta
            or (output.same_as is not None and tensor is not used[output.same_as])
        ):
            return None
    return None if any(_shared_otherwise(entry, used, made)) else made


def _takes_apart(template: Any, result: Any, made: list[torch.Tensor]) -> bool:
    """Take the tensors out of a result; whether it is built like the template."""
    if type(template) is TensorSlot:
        made.append(result)
        return type(result) is torch.Tensor
    if template is None:
        return result is None
    return (
        type(result) is tuple
        and len(result) == len(template)
        and all(_takes_apart(part, each, made) for part, each in zip(template, result, strict=True))
    )
