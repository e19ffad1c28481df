"""What forwards write to: parameters (`max_norm` of an embedding, clamped weights), buffers (running statistics).

    a forward wrote to                             then
    a parameter with a master held apart           refused: the next cast of the master would undo it
    a parameter gathered for that forward          refused: the memory is freed, and the values with it (stage 3)
    a parameter, other values on other ranks       refused: copies would go apart
    a parameter, alike on all ranks                kept
    a buffer                                       data rank 0's values hold for all, as in DistributedDataParallel;
                                                   in a pipeline those of the first stage that changed it

Both are found by the count of writes that torch keeps for each tensor, and by what it holds (`forward.writes`). On a
device running statistics count as changed while their layers train, and content is compared in the first steps.
"""

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import a_table, understood
from shardwise.comm.digests import digest_of_values
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.writes import Form, SeenTensor, form_of
from shardwise.engine.torch_private import NormWithStatistics, version_of
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.errors import ModelError
from shardwise.moving import Gathering
from shardwise.plan import Parameter
from shardwise.space import Mesh


class ForwardWrites:
    """Finds what forwards and backwards write, and refuses what would be lost or leave the ranks with other values.

    Copies that all data ranks wrote alike stay alike, and are kept.
    """

    def __init__(
        self, model: nn.Module, specs: Sequence[Parameter], mesh: Mesh, world: Channel, params: FlatParams
    ) -> None:
        """`specs`: of the whole model, the same on all ranks."""
        self._specs = specs
        self._params = params
        self._world = world
        self._tensor_ranks = [mesh.coordinates(rank)["tp"] for rank in range(world.size)]
        self._has_copies = mesh.size > mesh.pp
        here = dict(model.named_parameters())
        # By the parameter's number in the whole model: flags of all ranks are united by it.
        self._here = {at: here[spec.name] for at, spec in enumerate(specs) if spec.name in here}
        self._number_of = {spec.name: at for at, spec in enumerate(specs)}
        self._others = {at: each for at, each in self._here.items() if not params.holds(specs[at].name)}
        """What is in no bucket: replicas of parameters of other stages."""
        self._versions = self._now()

    def begin(self) -> None:
        """Forwards follow."""
        self._versions = self._now()

    def found(self, *, compares: bool = True) -> list[bool]:
        """For each parameter whether this rank wrote to it since `begin`. compares: see `FlatParams.found_written`."""
        found = [False] * len(self._specs)
        for at, one, other in zip(self._others, self._now(), self._versions, strict=True):
            found[at] = one != other
        for name in self._params.found_written(compares=compares):
            found[self._number_of[name]] = True
        return found

    def check(self, written: Collection[int]) -> None:
        """Raise ModelError, the same on all ranks, for what some rank wrote to in an update; all ranks call it."""
        if not written:
            return
        self._params.forget([self._specs[at].name for at in written])
        for at in written:
            spec = self._specs[at]
            # Decided by the plan alone, so that all ranks raise before any of them waits in the exchange below.
            if spec.trainable and spec.master != spec.working:
                raise ModelError(
                    _refusal(
                        spec.name,
                        "it is a cast of a master, the update reads the master, and the written values are lost",
                    )
                )
        # An exchange of its own, only in steps where something was written: digests of all parameters in each step
        # would cost a read of the model.
        digests = {at: self._digest(at) for at in written if at in self._here and not self._here[at].is_meta}
        purpose = "parameters that forwards wrote to"
        (texts,) = Gathering(purpose).gather(self._world, [json.dumps(digests).encode()])
        seen: dict[tuple[str, int], str] = {}
        # Ranks that gave the same bytes share one table. It is compared once for each place along tp.
        tables = understood(texts, cache(self._digests_of), purpose=purpose)
        places = {(id(table), at): table for at, table in zip(self._tensor_ranks, tables, strict=True)}
        for (_, place), table in places.items():
            for number, digest in table.items():
                name = self._specs[int(number)].name
                if not digest:
                    raise ModelError(
                        _refusal(name, "it is gathered for that forward only (stage 3), so that the values are lost")
                    )
                # Compared among ranks of one place along tp: the others hold other parts of a cut parameter.
                if seen.setdefault((number, place), digest) != digest:
                    raise ModelError(_refusal(name, "it has other values on other ranks now"))

    def _digests_of(self, answer: bytes) -> dict[str, str]:
        table = a_table(answer)
        if not all(0 <= int(at) < len(self._specs) and isinstance(digest, str) for at, digest in table.items()):
            raise ValueError("no digests")
        return table

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Evaluations and predictions: raise ModelError for what this rank wrote to, as far as torch shows it."""
        self.begin()
        before = self.found(compares=False) if self._has_copies else []
        yield
        # Raised on this rank alone, which stops the others: evaluations have no exchange in which ranks could
        # compare. Of what torch does not count the next step takes over what all ranks wrote alike.
        pairs = zip(self._specs, self.found(compares=False), before, strict=True) if self._has_copies else ()
        if (written := next((spec.name for spec, flag, was in pairs if flag > was), None)) is not None:
            raise ModelError(_refusal(written, "every rank has a copy, and the copies have to stay equal"))

    def _now(self) -> list[int]:
        return [version_of(each) for each in self._others.values()]

    def _digest(self, at: int) -> str:
        """Empty for what is at rest."""
        parameter = self._here[at]
        return "" if hasattr(type(parameter), "_is_sharded_param") else str(digest_of_values(parameter.detach()))


def _refusal(name: str, reason: str) -> str:
    return (
        f"a forward wrote to parameter {name!r}: {reason}. Let forwards write to buffers, and leave out options that "
        "write to parameters (max_norm)"
    )


class ModelBuffers:
    """The buffers of a model and the values that all ranks had last in common."""

    def __init__(self, model: nn.Module) -> None:
        at: dict[int, int] = {}
        self._places: list[list[tuple[nn.Module, str]]] = []
        """For each buffer every place that holds it."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # A buffer in several modules (shared positions) has one number, and is sent once.
                if at.setdefault(id(buffer), len(self._places)) == len(self._places):
                    self._places.append([])
                self._places[at[id(buffer)]].append((module, name))
        self._known: list[SeenTensor] = []
        self._is_held: list[bool] = []
        self._is_shared: list[bool] = []
        self._is_alone = False
        self._unseen: set[int] = set()
        """Buffers that somebody wrote to without a count, as values have shown."""
        self.are_reshaped = False
        """Whether a buffer has another shape than when the ranks last agreed, or came or went: on this rank after a
        look, on some rank once all have said so."""

    def settle(self, everyone: Channel, pipeline: Channel) -> None:
        """Take the present values for those of all ranks, and find out which buffers several stages have."""
        self._is_alone = everyone.size * pipeline.size == 1
        self._known = [self._know(at) for at in range(len(self._places))]
        self._is_held = [known.tensor is not None and not known.tensor.is_meta for known in self._known]
        answers, purpose = [tuple(self._is_held)], "buffers of stages"
        if pipeline.size > 1:
            of_stages = struct.Struct(f"{len(self._is_held)}?")
            given = pipeline.exchange(bytes(self._is_held), purpose=purpose)
            answers = understood(given, of_stages.unpack, purpose=purpose)
        self._is_shared = [sum(held) > 1 for held in zip(*answers, strict=True)]

    def changed(self, *, reads_device: bool = True) -> list[bool]:
        """For each buffer: whether it was written to, or replaced, since the ranks last agreed.

        reads_device: compare values also where they are on a device, which waits for them. Else those that may have
        changed count as changed: running statistics in training, and what such a comparison has found.
        """
        if self._is_alone:  # nobody is to get them
            return [False] * len(self._places)
        found = []
        self.are_reshaped = False
        for at, known in enumerate(self._known):
            buffer = self._buffer(at)
            is_changed = known.is_counted(buffer)
            if not is_changed and buffer is not None and (content := known.content) is not None:
                is_seen = content.is_whole and buffer.device.type == "cpu"
                if at in self._unseen and not is_seen:
                    is_changed = True
                elif reads_device or buffer.device.type == "cpu":
                    is_changed = not content.holds_for(buffer)
                    if is_changed:
                        self._unseen.add(at)
            if is_changed:
                self.are_reshaped |= form_of(buffer) != known.form
            found.append(is_changed or (self._is_statistic(at) and self._trains(at)))
        return found

    def _trains(self, at: int) -> bool:
        return any(module.training for module, _ in self._places[at])

    def _is_statistic(self, at: int) -> bool:
        """Whether a layer of torch's own writes it in training, on a device: the module says so, and no copy is kept
        for a comparison, which would be a kernel for each in each step."""
        buffer = self._known[at].tensor
        return buffer is not None and _is_statistic(buffer, self._places[at])

    def _know(self, at: int) -> SeenTensor:
        buffer = self._buffer(at)
        keeps = buffer is not None and not _is_statistic(buffer, self._places[at])
        return SeenTensor(buffer, content=keeps)

    def agreed_unless(self, pending: Sequence[bool]) -> None:
        """Take the present values for those of all ranks, but for buffers that were `pending` (changed) before."""
        for at, was_pending in enumerate(pending):
            if not was_pending and not self._is_alone:
                self._known[at] = self._know(at)

    def synchronise(self, everyone: Channel, pipeline: Channel, changed: Mapping[int, int], counters: Counters) -> None:
        """Give every rank the values that hold for all.

        changed: buffers that forwards wrote to -> the first rank along the pipeline where one did.
        """
        for channel, sources in (
            (everyone, {at: 0 for at in changed if self._is_held[at]}),
            (pipeline, {at: rank for at, rank in changed.items() if self._is_shared[at]}),
        ):
            if channel.size > 1 and sources and self.are_reshaped:
                self._take_forms(channel, sources)
            self._spread(channel, sources, counters)

    @torch.no_grad()
    def _take_forms(self, channel: Channel, sources: Mapping[int, int]) -> None:
        """Give buffers the shape that the rank has that sends them: {buffer: that rank}."""
        purpose = "shapes of buffers"
        forms = {at: form_of(self._buffer(at)) for at, source in sources.items() if source == channel.rank}
        mine = {at: None if form is None else [*form[0], dtype_name(form[1])] for at, form in forms.items()}
        answers = channel.exchange(json.dumps(mine).encode(), purpose=purpose)
        for at, form in (each for told in understood(answers, self._forms_in, purpose=purpose) for each in told):
            buffer = self._buffer(at)
            if form == form_of(buffer):
                continue
            device = channel.device if buffer is None else buffer.device
            new = None if form is None else torch.empty(form[0], dtype=form[1], device=device)
            if buffer is not None and new is not None and buffer.dtype == new.dtype:
                buffer.data = new  # the object stays, as other objects may hold it
                continue
            for module, name in self._places[at]:
                module._buffers[name] = new

    def _forms_in(self, answer: bytes) -> list[tuple[int, Form | None]]:
        found: list[tuple[int, Form | None]] = []
        for number, given in a_table(answer).items():
            if not 0 <= int(number) < len(self._places):
                raise ValueError(f"buffer {number} of {len(self._places)}")
            *sizes, name = given or (None,)
            dtype = getattr(torch, name, None) if isinstance(name, str) else None
            if given is not None and not (isinstance(dtype, torch.dtype) and all(type(each) is int for each in sizes)):
                raise ValueError(f"{given!r} is no shape")
            found.append((int(number), None if dtype is None else (torch.Size(sizes), dtype)))
        return found

    @torch.no_grad()
    def _spread(self, channel: Channel, sources: Mapping[int, int], counters: Counters) -> None:
        """Give every rank of `channel` the values that one of them has: {buffer: the rank that has them}."""
        if channel.size > 1 and sources:
            # Grouped by the rank that sends: one all-gather takes what each rank gives as one stretch.
            order = sorted(sources, key=lambda at: (sources[at], at))
            buffers = [(sources[at], buffer) for at in order if (buffer := self._buffer(at)) is not None]
            counts = [0] * channel.size
            for source, buffer in buffers:
                counts[source] += buffer.numel() * buffer.element_size()
            mine = [
                buffer.detach().reshape(-1).view(torch.uint8) for source, buffer in buffers if source == channel.rank
            ]
            nothing = torch.empty(0, dtype=torch.uint8, device=channel.device)  # for cat, where no buffer is left
            flat = torch.empty(sum(counts), dtype=torch.uint8, device=channel.device)
            counters.all_gathers += 1
            channel.all_gather(flat, torch.cat([nothing, *mine]), counts=counts, purpose="buffers of the model").wait()
            parts = flat.split([buffer.numel() * buffer.element_size() for _, buffer in buffers])
            for (source, buffer), part in zip(buffers, parts, strict=True):
                # In place, because other objects may hold the tensor. A clone, because a view in a wider dtype needs
                # an offset that its size divides, and bytes of several buffers stand one behind the other.
                if source != channel.rank and not buffer.is_meta:
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        # Also on the rank that sent them: what it wrote is agreed on now, and is not sent again.
        for at in sources:
            self._known[at] = self._know(at)

    def _buffer(self, at: int) -> torch.Tensor | None:
        """None where forward has taken a buffer away (caches come and go)."""
        # Where a stage dropped a module, its buffer is on the meta device: another place may have the values.
        held = [module._buffers.get(name) for module, name in self._places[at]]
        return next((buffer for buffer in held if buffer is not None and not buffer.is_meta), held[0])


def _is_statistic(buffer: torch.Tensor, places: Iterable[tuple[nn.Module, str]]) -> bool:
    is_on_device = buffer.device.type not in ("cpu", "meta")
    return (
        is_on_device
        and buffer.ndim == 1
        and buffer.is_floating_point()
        and any(isinstance(module, NormWithStatistics) for module, _ in places)
    )
