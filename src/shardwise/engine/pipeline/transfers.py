"""One microbatch on its way through the stages, as one rank sees it.

The program of the forward is the same on all ranks. All ranks count alike: transfers by number, and all calls by a
checksum that travels with every value. So ranks with different programs notice.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from shardwise.engine.forward.randomness import Stream
from shardwise.engine.pipeline.crossings import (
    Arrival,
    BackwardTrace,
    Crossing,
    Departure,
    GradientLink,
    StageGraph,
    code_of,
    gradient_of,
)
from shardwise.engine.pipeline.mailbox import SAME_FORWARD, Key, Mailbox, MessageKind, ReceivedMessage
from shardwise.engine.pipeline.nested import packed, unpacked, user_site
from shardwise.engine.pipeline.span_recorder import SpanRecorder
from shardwise.engine.pipeline.stage_tensor import Spec, StageTensor, StageValue, ViewMemory
from shardwise.engine.pipeline.stages import Stages
from shardwise.engine.pipeline.ties import Chain, StageTies
from shardwise.engine.torch_private import storage_id, top_saved_hooks
from shardwise.errors import MismatchError, ModelError

Purpose = Literal["step", "evaluation", "prediction", "generation"]

Paths = tuple[tuple[tuple[int, int], ...], ...]
"""The transfers of forwards that took different paths."""


_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (ValueError, TypeError, IndexError, OverflowError, NotImplementedError)
}
"""What reads of elements raise, apart from RuntimeError."""


class MicrobatchFlow:
    """The forward of one microbatch, and the graphs for its backward."""

    ended: BaseException | None = None
    """What this rank's forward ended with, and no other rank's: an error of what it executed."""

    def __init__(
        self,
        stages: Stages,
        mailbox: Mailbox,
        recorder: SpanRecorder,
        on_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        *,
        purpose: Purpose,
        number: int,
        stream: Stream | None,
        known: tuple[Paths, bool] | None = None,
    ) -> None:
        """on_call: see `stage_tensor.ValueForward`. known: what the schedule of the step was made for.

        Of `known`: the transfers of other forwards, and whether ranks step back, or wait for announcements.
        """
        self.stages = stages
        self.device = stages.device
        """Where real tensors are."""
        self.on_call = on_call
        self.purpose: Purpose = purpose
        self.number = number
        self.stream = stream
        self.transfers: list[tuple[int, int]] = []
        """(source stage, target stage) of every value that crossed so far, in the order of the program."""
        self.progress = 0
        self.is_forward = True
        self.last = "the beginning of the forward"
        """The last call that the program made."""
        self.graphs: dict[int, StageGraph] = {}
        """By local stage."""
        self.park: Callable[[], None] = lambda: None
        """Called before this rank works on a local stage that no action has begun yet."""
        self.steps_back = False
        """Whether some rank worked on one of its stages after a later one: then its actions are not apart."""
        self.given_objects: dict[int, tuple[Any, dict[str, int]]] = {}
        """By id, those of unknown classes that modules were given, and how many reads came before by module."""
        self.has_news = False
        """Whether ranks waited in this forward for an announcement by the owner of a stage."""
        self.num_reads, self.first_read = 0, ""
        """Questions about elements of values that were answered for all ranks; the line that asked the first."""
        self.trace: BackwardTrace | None = None
        """Of the graphs whose backward runs; None where the kinds of gradients along `tp` are known."""
        self._mailbox = mailbox
        self._recorder = recorder
        self._begun = -1
        self._last_stage = stages.last_local
        self._followed, self._may_step_back = ((), True) if known is None else known
        """The known paths that this forward may be on, and whether that is known of it, too."""
        self._entered = [-1] * stages.num_ranks
        self._arrivals: list[Crossing] = []
        """Of the graphs whose backward runs."""
        self._num_alike: dict[int, int] = {}
        self._recomputable: dict[tuple[int, int], StageValue] = {}
        """Copies that a recomputation may ask for again, by (lineage, stage)."""
        self._num_news = 0
        self.opaque: dict[int, Any] = {}
        """Objects that placed modules gave on this rank; other ranks only know that they exist."""
        # By id, and with the tensor itself: while it is kept alive, no other tensor can get its id.
        self._held: dict[int, tuple[torch.Tensor, StageTensor]] = {}
        """Parameters and plain tensors that stand for values of a stage in this forward, by id."""
        self.leaves: list[torch.Tensor] = []
        self._shaded: dict[int, torch.UntypedStorage] = {}
        """Memories of plain tensors that values of a stage were written to, kept alive for the same reason."""
        # Taken at the beginning of each forward: a forward may put other tensors in the place of buffers.
        self._buffers = {id(buffer): (buffer, stage, name) for buffer, stage, name in stages.placed_buffers()}

    # The program ----------------------------------------------------------------------------------------------------

    def enter(self, name: str, stage: int, numbers: Sequence[float | complex]) -> None:
        """A call on a stage: every rank counts it, wherever it is executed. The rank of the stage may park before.

        numbers: the Python numbers among its inputs.
        """
        if self.ended is not None:
            self._refuse_to_go_on(self.ended)
        # Backward counts nothing: a recomputation runs on some ranks only, so its calls would make checksums differ.
        if not self.is_forward:
            return
        rank = self.stages.ranks_of_stages[stage]
        # The schedule has not come to this stage yet: another microbatch is due on this rank before.
        if rank == self.stages.rank and stage > self._begun:
            self.park()
        self.last = name
        # Numbers are part of it: a program that scales by another factor on each rank has equal shapes and calls,
        # and would else train to other weights without an error.
        self.progress = zlib.crc32(f"{name}@{stage}{numbers or ()}".encode(), self.progress)
        # Of every rank, not of this one alone: all of them have to choose the same schedule from it.
        if stage < self._entered[rank]:
            self._step_back()
        self._entered[rank] = max(self._entered[rank], stage)

    def _step_back(self) -> None:
        if not self.steps_back:
            self.steps_back = True
            self._leave_schedule(is_known=self._may_step_back)

    def _refuse_to_go_on(self, ended: BaseException) -> None:
        """Raise what the forward ended with again, for code that runs because of it (`finally`, `except`).

        Other ranks make no such call: this one would wait for them.
        """
        handled = sys.exception()
        # Nobody catches what is no `Exception`. Who has caught an error, and is done with it, may go on.
        while isinstance(ended, Exception) and handled is not ended:
            if handled is None:
                return
            handled = handled.__context__
        raise ended

    def _leave_schedule(self, *, is_known: bool) -> None:
        """What comes next in this forward may wait for other ranks where the schedule does not know of it.

        Those may come to it only after actions that this rank has yet to run. All ranks are here at the same point of
        the program, and let the forward rest until their last action of it: so none of those is held up by it.
        """
        while not is_known and self._begun < self._last_stage:
            self.park()

    def begin(self, stage: int) -> None:
        """An action for this local stage begins: the forward may go on up to the next one."""
        self._begun = max(self._begun, stage)

    def graph(self, stage: int) -> StageGraph:
        """The graph of a local stage."""
        return self.graphs.setdefault(stage, StageGraph())

    def take_graphs(self, stage: int) -> list[StageGraph]:
        """The graphs that the backward of a stage covers: its own, or all where they need each other on this rank."""
        self.is_forward = False
        # Where a rank worked on an earlier stage again after a later one, the backward of each may need gradients that
        # the other gives halfway. One call of autograd with the roots of both runs nodes in reverse order of creation.
        stages = sorted(self.graphs) if self.steps_back else [stage]
        graphs = [self.graphs.pop(each) for each in stages if each in self.graphs]
        # In the order of the program: `return_nothing` goes back through them as the other ranks wait for them.
        self._arrivals = sorted((each for graph in graphs for each in graph.arrivals), key=lambda each: each.number)
        return graphs

    # Values ---------------------------------------------------------------------------------------------------------

    def hold(self, tensor: torch.Tensor, value: StageValue) -> StageTensor:
        """Let a plain tensor stand for a value of a stage from now on."""
        made = StageTensor(self, value)
        self._held[id(tensor)] = (tensor, made)
        return made

    def adopted(self, leaf: torch.Tensor) -> torch.Tensor:
        """The value of a stage for which a tensor stands, or the tensor itself, which all ranks have."""
        # The order of these checks matters. A tensor may have become a value of a stage (`hold`) after it was a
        # plain one, and a parameter of another stage is on the meta device, which the last check would take for a
        # stray tensor.
        if type(leaf) is StageTensor:
            return leaf
        if (held := self._held.get(id(leaf))) is not None:
            return held[1]
        if (place := self._place_of(leaf)) is not None:
            # The lineage is made of the name, which is the same in a recomputation: the copy that crossed is found
            # again.
            stage, name = place
            local, lineage = leaf if self.stages.is_local(stage) else None, hash(name)
            value = StageValue(stage, Spec.of(leaf), local, name, lineage=lineage)
            value.is_kept = True
            return self.hold(leaf, value)
        if self._shaded and self._is_shaded(leaf):
            raise ModelError(
                f"{user_site()}: a tensor that all ranks have is used after values of a stage were written to its "
                "memory through another view. Write to the tensor itself (t[:, 0] = value, not t[:, "
                "0].copy_(value)), and take views afterwards"
            )
        # Its graph exists on one rank only. Taken for a plain tensor it would be used on all ranks with whatever
        # each happens to have in that attribute, and its gradient would end there.
        if leaf.requires_grad and leaf.is_leaf:
            self.leaves.append(leaf)
        elif leaf.requires_grad:
            raise ModelError(
                f"{user_site()}: a tensor with a gradient is used between placed modules, and its stage is not known. "
                "If a placed module left it in an attribute or a list, return it from that module, or collect it with "
                "a forward hook. If it comes of trainable parameters that are not the model's, put model and loss into "
                "one module, place the loss's part on a stage, and parallelize that with loss=None"
            )
        if leaf.is_meta:
            raise ModelError(
                "a tensor that belongs to a module of another stage is used outside of that module, after "
                f"{self.last} ({user_site()}). Make it a buffer or a parameter of the module, or an argument of "
                "forward"
            )
        return leaf

    def touch(self, name: str, stage: int) -> None:
        """A module may have written to what it keeps: copies on other stages are out of date.

        It may also have written to buffers of other modules of its stage, which it was given or knows by itself.
        """
        prefix = f"{name}."
        for tensor, made in self._held.values():
            value = made.value
            may_be_written = value.maker.startswith(prefix) or not isinstance(tensor, nn.Parameter)
            if value.is_kept and value.stage == stage and may_be_written:
                value.memory.num_writes += 1

    def stands_for_value(self, leaf: torch.Tensor) -> bool:
        """Whether `adopted` gives a value of a stage."""
        if type(leaf) is StageTensor or id(leaf) in self._held or leaf.is_meta:
            return True
        return self._place_of(leaf) is not None or (bool(self._shaded) and self._is_shaded(leaf))

    def shade(self, tensor: torch.Tensor) -> None:
        """Values of a stage were written to a plain tensor: on other ranks, views of its memory have old elements."""
        storage = tensor.untyped_storage()
        self._shaded[storage_id(storage)] = storage

    def _is_shaded(self, leaf: torch.Tensor) -> bool:
        if leaf.layout is not torch.strided:
            return False
        # Memories, not tensors: a view that was taken before the write is another object with the same storage.
        return storage_id(leaf.untyped_storage()) in self._shaded

    def to_stage(self, tensor: StageTensor, stage: int) -> StageValue:
        """The value on a stage; it crosses when it is first used there."""
        value = tensor.value
        memory = value.memory
        # Most values were made on the stage that uses them, and nothing can be wrong with these.
        if value.stage == stage and memory.origin is None and not memory.stale:
            return value
        if memory.is_behind:
            tensor.rebind(tensor.family.origin)  # it has been written to where it came from
        value = tensor.value
        if refusal := value.memory.refusal(value.maker):
            raise ModelError(f"{refusal} ({user_site()})")
        if value.stage == stage:
            return value
        family = tensor.family
        # Copies show what the origin was when it crossed. After a write to the origin it crosses anew, and autograd
        # sees two departures of two versions, as it would see two versions of the tensor in one process.
        if family.version != family.origin.memory.version:
            family.reset()
        if (copy := family.copies.get(stage)) is None:
            copy = self._cross(family.last, stage)
            family.add(copy)
        return copy

    def _cross(self, value: StageValue, stage: int) -> StageValue:
        if not self.is_forward:
            return self._copy_of_forward(value, stage)
        # Counted on all ranks, also on those that neither send nor receive: the number names the message.
        crossing = Crossing(
            number=len(self.transfers),
            source=value.stage,
            target=stage,
            # Also under no_grad: a later use may be outside of it, and takes the same copy.
            needs_gradient=value.spec.requires_grad and self.purpose == "step",
        )
        transfer, number = (value.stage, stage), crossing.number
        self._followed = tuple(path for path in self._followed if path[number : number + 1] == (transfer,))
        self.transfers.append(transfer)
        # A parameter of a later stage of the same rank: the backward of that stage waits for the one of this stage.
        if stage < value.stage and self.stages.rank_of(stage) == self.stages.rank_of(value.stage):
            self._step_back()
        self._leave_schedule(is_known=self._may_step_back or stage > value.stage or bool(self._followed))
        # A rank may have both stages: then both happen here, and the mailbox hands a copy over without a channel.
        local = None
        if self.stages.is_local(value.stage):
            self._depart(value, crossing)
        if self.stages.is_local(stage):
            local = self._arrive(value, crossing)
        copy = StageValue(
            stage,
            value.spec,
            local,
            value.maker,
            memory=ViewMemory(origin=value.memory),
            has_known_shape=value.has_known_shape,
            lineage=value.lineage,
            module=value.module,
        )
        # A checkpoint that is not reentrant keeps no activations: it installs hooks for saved tensors, and computes
        # the region again in backward. Other ranks do not compute it then and send nothing, so the copy is kept for
        # that moment. Kept only here: everywhere else it would keep an activation alive to the end of the
        # microbatch.
        if top_saved_hooks(True) is not None:  # inside an activation checkpoint
            self._recomputable[value.lineage, stage] = copy
        return copy

    def link(self, ties: StageTies, chain: Chain) -> None:
        """Let the gradient of a parameter of several stages go down from the last one, before each adds its own.

        The forward makes the root last, so that backward begins with it: later stages come first, as in one process.
        Not where values go back to earlier stages, which would wait for each other.
        """
        if any(target < source for source, target in self.transfers):
            return
        for target, source in pairwise(chain.stages):
            crossing = Crossing(number=len(self.transfers), source=source, target=target, needs_gradient=True)
            self.transfers.append((source, target))
            if self.stages.is_local(source):
                # Made of the parameter itself: backward begins with this root, so the gradient of the later stage is
                # added to the parameter first, and the uses on this stage after it.
                with torch.enable_grad():
                    root = Departure.apply(ties.parameter(chain.name), self, crossing)  # type: ignore[no-untyped-call]
                self.graph(source).roots.append(root)
            if self.stages.is_local(target):
                self.graph(target).links.append(GradientLink(name=chain.name, crossing=crossing))

    def lineage_of(self, name: str, output: int, inputs: Sequence[int]) -> int:
        """A number for how a value is made: equal when a recomputation makes it again, on this rank."""
        lineage = hash((name, output, *inputs))
        if self.is_forward:
            self._num_alike[lineage] = self._num_alike.get(lineage, 0) + 1
        return lineage

    def _copy_of_forward(self, value: StageValue, stage: int) -> StageValue:
        """The copy that crossed in forward, when activations are recomputed."""
        # A lineage that occurred twice in the forward fits two copies, and nothing says which one is meant.
        copy = self._recomputable.get((value.lineage, stage))
        if copy is None or self._num_alike.get(value.lineage, 0) > 1:
            raise ModelError(
                f"{value.maker!r} on stage {value.stage} is needed on stage {stage} while activations are recomputed "
                "in backward. Several tensors that crossed in forward could be it. An activation checkpoint spans "
                "several stages: checkpoint each placed module alone, or place all of the checkpoint on one stage"
            )
        return copy

    def _depart(self, value: StageValue, crossing: Crossing) -> None:
        assert value.local is not None
        if crossing.needs_gradient:
            # Also where the program is under no_grad at the moment: the value itself was made with a graph.
            with torch.enable_grad():
                root = Departure.apply(value.local, self, crossing)  # type: ignore[no-untyped-call]
            self.graph(value.stage).roots.append(root)
        self._mailbox.send(
            self.stages.rank_of(crossing.target),
            Key(MessageKind.VALUE, self.number, crossing.number),
            value.local,
            stages=(crossing.source, crossing.target),
            progress=self.progress,
            maker=value.maker,
        )

    def _arrive(self, value: StageValue, crossing: Crossing) -> torch.Tensor:
        # The graph of the sender ends at its departure. Here a new one begins: `anchor` is an empty leaf whose only
        # task is to make autograd call `Arrival.backward`, which sends the gradient back.
        message = self._take(MessageKind.VALUE, crossing.number, crossing.source, crossing.target)
        content = message.content
        assert content is not None
        self._compare(
            message,
            f"for transfer {crossing.number} stage {crossing.target} expects {value.maker!r} {list(value.spec.shape)} "
            f"of stage {crossing.source}, and got {message.maker!r} {list(content.shape)} of stage "
            f"{message.stages[0]}",
            fits=message.stages == (crossing.source, crossing.target)
            and content.dtype == value.spec.dtype
            and (not value.has_known_shape or tuple(content.shape) == value.spec.shape),
        )
        if not crossing.needs_gradient:
            return content
        self.graph(crossing.target).arrivals.append(crossing)
        crossing.anchor = anchor = torch.empty(0, device=self.device, requires_grad=True)
        with torch.enable_grad():
            arrived: torch.Tensor = Arrival.apply(anchor, [content], self, crossing)  # type: ignore[no-untyped-call]
        return arrived

    def _place_of(self, leaf: torch.Tensor) -> tuple[int, str] | None:
        """Stage and name of a parameter, or of a buffer of a placed module."""
        if (place := self.stages.place_of(leaf)) is not None and isinstance(leaf, nn.Parameter):
            return place
        held = self._buffers.get(id(leaf))
        return None if held is None else held[1:]

    # What only the owner knows ------------------------------------------------------------------------------------

    def announce(self, stage: int, news: Callable[[], Any]) -> Any:
        """Let all ranks have the news of the rank of `stage`; `news` is called there.

        Where activations are recomputed, the others do not listen: each recomputes for itself.
        """
        if not self.is_forward:
            if self.stages.is_local(stage):
                return news()
            raise ModelError(
                f"the output of {self.last!r} on stage {stage} has to be announced while activations are recomputed "
                "in backward. An activation checkpoint spans several stages: checkpoint each placed module alone"
            )
        if not self.stages.is_local(stage):
            return unpacked(self._spread(stage, None))
        known = news()
        self._spread(stage, packed(known))
        return known

    def answer(self, stage: int, read: Callable[[], Any]) -> Any:
        """What the rank of `stage` reads. Raises its error on all ranks: a program may catch it, and go on."""
        raised: list[Exception] = []

        def news() -> tuple[str | None, Any]:
            try:
                return None, read()
            except Exception as error:
                raised.append(error)
                return type(error).__name__, str(error)

        kind, found = self.announce(stage, news)
        if kind is None:
            return found
        raise raised[0] if raised else _ERRORS.get(kind, RuntimeError)(found)

    def give(self, name: str, objects: Sequence[Any]) -> None:
        """A placed module is given objects of unknown classes: each rank has what its own stages did to them."""
        if not self.is_forward:  # activations are computed again, by what the forward gave
            return
        for each in objects:
            _, given = self.given_objects.setdefault(id(each), (each, {}))
            if given.setdefault(name, self.num_reads) < self.num_reads:
                raise ModelError(
                    f"{user_site()}: {name!r} is given a {type(each).__name__} again, in a loop that reads values of "
                    "a stage. Each rank has its own part of that object only. engine.generate(inputs) runs loops with "
                    "a cache over stages; elsewhere go without one (use_cache=False)"
                )

    def shape_known(self, tensor: StageTensor) -> Spec:
        """The description of a value with its real shape, which its owner announces where the others cannot know it."""
        value = tensor.value
        if not value.has_known_shape:
            value.spec = self.announce(value.stage, lambda: Spec.of(value.local))  # type: ignore[arg-type]
            value.has_known_shape = True
        return value.spec

    def give_all(self, tensor: StageTensor) -> torch.Tensor:
        """The elements of a value, on every rank."""
        return self._spread(tensor.value.stage, tensor.value.local)

    def _spread(self, stage: int, content: torch.Tensor | None) -> torch.Tensor:
        """Give all ranks the content that only the rank of `stage` has."""
        # The number is counted on all ranks, so that sender and receivers mean the same announcement.
        number, self._num_news = self._num_news, self._num_news + 1
        if not self.has_news:
            self.has_news = True
            self._leave_schedule(is_known=self._may_step_back)
        if content is None:
            message = self._take(MessageKind.NEWS, number, stage, stage)
            self._compare(message, f"{self.last!r} of stage {stage} was announced as {message.maker!r}")
            assert message.content is not None
            return message.content
        key = Key(MessageKind.NEWS, self.number, number)
        # To each rank by itself: a broadcast would need all ranks at the same point, and they come here at different
        # times.
        for rank in range(self.stages.num_ranks):
            if rank != self.stages.rank:
                self._mailbox.send(rank, key, content, stages=(stage, stage), progress=self.progress, maker=self.last)
        return content

    def _take(self, kind: MessageKind, number: int, source: int, target: int) -> ReceivedMessage:
        """Wait for a message from the rank of a stage."""
        key = Key(kind, self.number, number)
        with self._recorder.noting("wait", self.number, target):
            return self._mailbox.take(self.stages.rank_of(source), key, stages=(source, target))

    def _compare(self, message: ReceivedMessage, difference: str, *, fits: bool = True) -> None:
        """Raise MismatchError unless the sender's program had made the same calls."""
        # The shape alone would not do: two layers of one model give equal shapes, and a value taken for that of
        # another layer would train to wrong weights in silence.
        if message.progress != self.progress or not fits:
            raise MismatchError(
                f"the forward of microbatch {self.number} differs between ranks: {difference}, after other calls; "
                f"{SAME_FORWARD}"
            )

    # Backward -------------------------------------------------------------------------------------------------------

    def return_gradient(self, crossing: Crossing, gradient: torch.Tensor | None) -> None:
        """Send the gradient of a value that arrived here; None: it has none."""
        crossing.has_returned = True
        kind = None if self.trace is None or gradient is None else self.trace.going_back(crossing)
        self._mailbox.send(
            self.stages.rank_of(crossing.source),
            Key(MessageKind.GRADIENT, self.number, crossing.number),
            gradient,
            stages=(crossing.target, crossing.source),
            note=code_of(kind),
        )

    def return_nothing(self, *, since: int = 0) -> None:
        """Tell that there is no gradient for values that arrived since that crossing, and got none."""
        for crossing in reversed(self._arrivals):
            if crossing.number >= since and not crossing.has_returned:
                self.return_gradient(crossing, None)

    def take_gradient(self, crossing: Crossing) -> torch.Tensor | None:
        """Wait for the gradient of a value that left from here."""
        message = self._take(MessageKind.GRADIENT, crossing.number, crossing.target, crossing.source)
        if self.trace is not None:
            self.trace.came[crossing.number] = gradient_of(message.note)
        return message.content

    def close(self) -> None:
        """Let go of everything: values of a forward refer to it, and it to them."""
        self._held.clear()
        self.opaque.clear()
        self.given_objects.clear()
        self._recomputable.clear()
        self._shaded.clear()
        self.ended = None
        for graph in self.graphs.values():
            graph.clear()
        self.graphs.clear()

    def refuse_compiled_code(self, function: Any) -> Any:
        """Compiled or scripted code got a value of a stage."""
        raise ModelError(
            f"{function} was called with a value of a stage from code outside of Python (a scripted or compiled "
            f"function, an extension), after {self.last} ({user_site()}). Call it inside a module, and place that "
            "module on a stage"
        )
