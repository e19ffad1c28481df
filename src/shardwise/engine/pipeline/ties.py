"""Parameters of several stages: one rank owns each, the others compute with replicas.

One update of an embedding (stage 0) that is also the head (stage 3):

    rank of stage 3   backward .. backward --[1]--> sum over its microbatches --[2]-->           replica <--[4]--+
    rank of stage 0   backward .. backward --[1]--> sum over its microbatches <--[2]-- + --[3]--> owner -> update +

[1] as every gradient is (see `zero/reduce.py`)
[2] to the owner, which adds from the last stage to the first
[3] reduction, norm, optimizer and checkpoint know the owner's only
[4] the updated working copy to the replicas

With a single microbatch the sum goes down within the backward instead (`Chain`), as one process adds the uses:

    rank of stage 3   backward: its uses a  ---- a ---->|
    rank of stage 1   backward begins with the root:  takes a, adds its uses b  ---- a + b ---->|
    rank of stage 0   backward begins with the root:               takes a + b, adds its uses: (a + b) + c, reduced
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import nn

from shardwise.comm import Channel, Work
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.forward.trained_parameters import ALL, TrainedSet
from shardwise.engine.pipeline.stages import StageParameters
from shardwise.plan import Ownership, Parameter, Plan, plan_ownership
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.memory import gradient_dtype, plan_arena


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bundle:
    """Parameters of one dtype that one message carries from their owner to one other rank."""

    owner: int
    user: int
    trainable: bool
    dtype: torch.dtype
    specs: tuple[Parameter, ...]

    @property
    def num_elements(self) -> int:
        return sum(spec.num_elements for spec in self.specs)

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters' places in a flat tensor, in their own shapes."""
        for spec, part in zip(self.specs, flat.split([spec.num_elements for spec in self.specs]), strict=True):
            yield spec.name, part.view(spec.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A trained parameter of several ranks, whose gradient can go down from stage to stage to its owner."""

    name: str
    stages: tuple[int, ...]
    """Of each rank the stage that uses it, from the last to the first, which is the owner's."""


def chains_of(specs: Sequence[Parameter], parameters: StageParameters) -> tuple[Chain, ...]:
    """The chains of a model, alike on all ranks. `specs`: of the whole model."""
    chains = []
    for spec in specs:
        users = parameters.users(spec.name)
        # The owner has to be the last link: the sum ends there. Where it is not, sums travel after the last
        # backward.
        stages = tuple(sorted(users.values(), reverse=True))
        if spec.trainable and len(stages) > 1 and stages[-1] == users.get(parameters.owner(spec.name)):
            chains.append(Chain(name=spec.name, stages=stages))
    return tuple(chains)


class KeptGradients(Protocol):
    """The sums of the gradients of some parameters over the microbatches of a step."""

    @property
    def touched(self) -> frozenset[str]:
        """The parameters that have one."""

    def begin(self, num_microbatches: int, trained: TrainedSet = ALL) -> None:
        """Forget those of the last step."""

    def view(self, name: str) -> torch.Tensor:
        """The gradient of a parameter, in its shape."""

    def place(self, name: str, gradient: torch.Tensor) -> None:
        """Let a parameter have this gradient."""

    def stop(self) -> None:
        """No more gradients come."""


class StageTies:
    """The parameters of several ranks of one pipeline, as one of these ranks sees them."""

    def __init__(
        self,
        inventory: Inventory,
        parameters: StageParameters,
        plan: Plan,
        *,
        pipeline: Channel,
        keep_gradients: Callable[[Mapping[str, nn.Parameter], Ownership, Channel], KeptGradients],
        waiting: Collection[str] = (),
    ) -> None:
        """`inventory`: of the parameters that this rank computes with; replicas move to separate memory.

        keep_gradients: given parameters, their layout and a channel of this rank alone, keeps their sums.
        waiting: parameters whose values come later, by `write` or by a load.
        """
        self._channel = pipeline
        self._stages = parameters
        self._trained = ALL
        self._precision = plan.precision
        bundles = list(_bundles(inventory.specs, parameters))
        self._parameters = {spec.name: inventory.parameters[spec.name] for each in bundles for spec in each.specs}
        self._owned = [bundle for bundle in bundles if bundle.owner == pipeline.rank]
        self._replicas = [bundle for bundle in bundles if bundle.user == pipeline.rank]
        self._names = [spec.name for bundle in self._replicas for spec in bundle.specs]
        self.held = inventory.restricted(self._names)
        """The replicas."""
        # Replicas of one bundle move to one flat buffer, so that the owner's message is received straight into them.
        self._working = [self._take_in(bundle, waiting) for bundle in self._replicas]
        self._placed = {name: self._parameters[name].data_ptr() for name in self._names}
        # The sums of replicas are kept like gradients of any parameter, with this rank as the only owner: nothing is
        # reduced here. `over` is called by members only, so ranks without replicas may skip it.
        alone = pipeline.over([pipeline.rank]) if self._replicas else pipeline
        self._gradients: dict[int, KeptGradients] = {}
        """By owner: the gradients that this rank has for parameters of that rank."""
        self._handed_down: set[str] = set()
        self._layouts: dict[int, Ownership] = {}
        for owner in sorted({bundle.owner for bundle in self._replicas if bundle.trainable}):
            specs = [spec for each in self._replicas if each.trainable and each.owner == owner for spec in each.specs]
            self._layouts[owner] = plan_ownership(specs, plan.sharding, num_owners=1, num_replicas=1)
            own = {spec.name: self._parameters[spec.name] for spec in specs}
            self._gradients[owner] = keep_gradients(own, self._layouts[owner], alone)

    def moved(self) -> list[str]:
        """Names of replicas that somebody gave another storage."""
        return [name for name in self._names if self._parameters[name].data_ptr() != self._placed[name]]

    def begin(self, num_microbatches: int, trained: TrainedSet = ALL) -> None:
        """Forget the gradients of the last update. What is not `trained` travels in none of its messages."""
        self._handed_down.clear()
        self._trained = trained
        for gradients in self._gradients.values():
            gradients.begin(num_microbatches, trained)

    def _trains(self, bundle: _Bundle) -> bool:
        return bundle.trainable and self._trained.meets(spec.name for spec in bundle.specs)

    def parameter(self, name: str) -> nn.Parameter:
        """The object with which this rank computes."""
        return self._parameters[name]

    def hand_down(self, name: str) -> torch.Tensor | None:
        """The gradient of a replica, to which nothing is added any more; `collect` leaves it out."""
        self._handed_down.add(name)
        gradients = self._gradients[self._stages.owner(name)]
        return gradients.view(name) if name in gradients.touched else None

    @torch.no_grad()
    def collect(self, own: KeptGradients) -> None:
        """Bring the gradients of all ranks together in those of the owners, after the last backward.

        All ranks of the pipeline call it together, before `own.reduce`.
        """
        # Sends first, and they do not wait: two ranks may own parameters of each other.
        works = [work for owner, gradients in self._gradients.items() for work in self._give(owner, gradients)]
        others: dict[str, dict[int, torch.Tensor]] = {}
        for user in sorted({bundle.user for bundle in self._owned if self._trains(bundle)}):
            for name, gradient in self._take(user, own):
                others.setdefault(name, {})[user] = gradient
        touched = own.touched if others else ()
        for name, parts in others.items():
            if name in touched:
                parts[self._channel.rank] = own.view(name)
            last_stage = self._stages.users(name)
            # Autograd adds the last use first. Each rank's sum stands for all uses on its stages.
            ordered = [parts[rank] for rank in sorted(parts, key=last_stage.__getitem__, reverse=True)]
            total = ordered[0]
            for part in ordered[1:]:
                # Into the received part or the owner's own buffer: both are free to be written, and `place` puts the
                # sum back.
                total = total.add_(part)
            own.place(name, total)
        for work in works:
            work.wait()

    def publish(self, trained: TrainedSet = ALL) -> None:
        """Give the replicas the values of their owners, after an update of what is `trained`."""
        self._trained = trained
        self._publish(list(filter(self._trains, self._owned)), list(filter(self._trains, self._replicas)))

    def publish_restored(self) -> None:
        """Give the replicas the values of their owners, frozen ones too."""
        self._publish(self._owned, self._replicas)

    def replica_bytes(self) -> int:
        """Bytes of the replicas."""
        return sum(flat.numel() * flat.element_size() for flat in self._working)

    def gradient_bytes(self, num_microbatches: int) -> int:
        """Bytes that this rank's gradients of replicas take."""
        return sum(
            plan_arena(layout, 0, self._precision, num_microbatches=num_microbatches).num_bytes
            for layout in self._layouts.values()
        )

    def sent_gradient_bytes(self, num_microbatches: int) -> int:
        """Bytes of gradients that this rank sends to owners per update, where all its replicas have one."""
        buckets = [bucket for layout in self._layouts.values() for bucket in layout.buckets]
        return sum(
            slot.num_elements
            * itemsize_bytes(gradient_dtype(bucket, self._precision, num_microbatches=num_microbatches))
            for bucket in buckets
            for slot in bucket.slots
        )

    def sent_value_bytes(self) -> int:
        """Bytes of values that this rank sends to replicas per update."""
        return sum(each.num_elements * each.dtype.itemsize for each in self._owned if each.trainable)

    @torch.no_grad()
    def write(self, name: str, values: torch.Tensor) -> bool:
        """Take over the values of a replica, in its own shape; whether it is one here."""
        if name in self._placed:
            self._parameters[name].copy_(values)
        return name in self._placed

    @torch.no_grad()
    def _take_in(self, bundle: _Bundle, waiting: Collection[str]) -> torch.Tensor:
        flat = torch.empty(bundle.num_elements, dtype=bundle.dtype, device=self._channel.device)
        for name, part in bundle.parts(flat):
            parameter = self._parameters[name]
            if name not in waiting:
                part.copy_(parameter.detach())
            parameter.grad = None
            parameter.data = part
        return flat

    def _give(self, owner: int, gradients: KeptGradients) -> list[Work]:
        """Send which replicas of the parameters of `owner` have a gradient, and those that they have."""
        gradients.stop()
        held = [
            spec for bundle in self._replicas if bundle.owner == owner and self._trains(bundle) for spec in bundle.specs
        ]
        if not held:
            return []
        # Which have a gradient depends on the data of this update, and the owner cannot know it. A missing gradient
        # has to stay missing: zeros would make an optimizer update a parameter that nothing used.
        flags = [spec.name in gradients.touched and spec.name not in self._handed_down for spec in held]
        # Between the hosts, also where the ranks have devices: the owner would wait for its own to read them.
        works = [self._send(torch.tensor(flags, dtype=torch.uint8), owner, "which")]
        views = [gradients.view(spec.name) for spec, flag in zip(held, flags, strict=True) if flag]
        for _, alike in groupby(views, key=lambda view: view.dtype):
            works.append(self._send(_flat(list(alike)), owner, "gradients"))
        return works

    def _take(self, user: int, own: KeptGradients) -> Iterator[tuple[str, torch.Tensor]]:
        """Receive the gradients that the rank `user` has for this rank's parameters."""
        held = [spec for bundle in self._owned if bundle.user == user and self._trains(bundle) for spec in bundle.specs]
        flags = torch.empty(len(held), dtype=torch.uint8)
        self._receive(flags, user, "which")
        touched = [spec for spec, flag in zip(held, flags.tolist(), strict=True) if flag]
        for dtype, group in groupby(touched, key=lambda spec: own.view(spec.name).dtype):
            alike = list(group)
            lengths = [spec.num_elements for spec in alike]
            flat = torch.empty(sum(lengths), dtype=dtype, device=self._channel.device)
            self._receive(flat, user, "gradients")
            for spec, part in zip(alike, flat.split(lengths), strict=True):
                yield spec.name, part.view(spec.shape)

    def _publish(self, given: Sequence[_Bundle], taken: Sequence[_Bundle]) -> None:
        works = []
        for bundle in given:
            values = [self._parameters[spec.name].detach() for spec in bundle.specs]
            works.append(self._send(_flat(values), bundle.user, "values"))
        for bundle, working in zip(self._replicas, self._working, strict=True):
            if bundle in taken:
                self._receive(working, bundle.owner, "values")
        for work in works:
            work.wait()

    def _send(self, tensor: torch.Tensor, rank: int, what: str) -> Work:
        return self._channel.send(tensor, rank, purpose=f"{what} of parameters of several stages")

    def _receive(self, tensor: torch.Tensor, rank: int, what: str) -> None:
        self._channel.receive(tensor, rank, purpose=f"{what} of parameters of several stages").wait()


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in a row; of one tensor without a copy."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def _bundles(specs: Sequence[Parameter], parameters: StageParameters) -> Iterator[_Bundle]:
    """All bundles in which the specs are, in an order that all ranks have."""
    members: dict[tuple[int, int, bool, str], list[Parameter]] = {}
    for spec in specs:
        owner = parameters.owner(spec.name)
        for user in parameters.users(spec.name):
            if user != owner:
                members.setdefault((owner, user, spec.trainable, spec.working), []).append(spec)
    # Sorted, so that owner and user pack and unpack the same parameters in the same order without a word between
    # them.
    for (owner, user, trainable, dtype), alike in sorted(members.items(), key=lambda each: each[0]):
        yield _Bundle(owner=owner, user=user, trainable=trainable, dtype=torch_dtype(dtype), specs=tuple(alike))
