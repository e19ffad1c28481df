"""First values for a model that was built without any, the same under every layout, a few tensors at a time.

The initialisers of the modules are called once on tensors without values, to see which tensors each of them writes and
from what (`hollow`). The values of some tensors are then had by calling again, on those tensors and no others, the
calls that write them:

    calls, in order           weight    bias
    1 reset_parameters          w         w            w: overwrites all of it
    2 _init_weights             w
      values of `weight`: call 2;  of `bias`: call 1, in which `weight` has no memory

Every number drawn comes from the seed, the name of the module and the number of the draw in the call.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.engine.hollow import Region, ValuesNeededError, Watch, watched
from shardwise.engine.initialisers import Initialiser, initialisers_of
from shardwise.engine.skeleton import Place, Skeleton, with_values
from shardwise.errors import ModelError, in_words

_UNSET = 0x5A
"""What every byte is before a call that cannot be followed: bytes that differ afterwards were written."""

_SMALL_BYTES = 1 << 20
"""Modules are initialised together until they take as much memory as the largest one does, or this much."""

_SHOWN_PROBLEMS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class _Write:
    """What one call does to one place."""

    origins: frozenset[int]
    """The places whose values, from before the call, the new ones are computed from."""
    met: frozenset[int]
    """The places that are real when the call is made for this one."""
    is_whole: bool
    regions: Sequence[Region]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effect:
    """What one call does: the writes by the number of their place."""

    initialiser: Initialiser
    writes: dict[int, _Write]
    takes_all: bool
    """Whether it cannot be made on less than all that was real when it was followed."""


@dataclass(kw_only=True, slots=True)
class _Program:
    """How to get the values of some places."""

    calls: dict[int, set[int]] = field(default_factory=dict)
    """The number of each call, and the places that it is made for."""
    real: set[int] = field(default_factory=set)
    """The places that have values meanwhile."""

    def take_in(self, other: "_Program") -> None:
        """Serve the places of the other too."""
        self.real |= other.real
        for number, places in other.calls.items():
            self.calls.setdefault(number, set()).update(places)


class Initialisation:
    """The initial values of a model that was built, in part or as a whole, on the meta device.

    A module is initialised by its own `reset_parameters()` (`_reset_parameters()`, `_init_weights()`), and then by
    `_init_weights(module)` of the nearest module around it that has one, as transformers' models do. Values depend on
    `seed`, on the name of the module in the model and on nothing else. They are what these methods give: what
    `__init__` of a module around it does to its children in passing is not known. Of tied parameters the first place
    decides. Methods run on the CPU, in the dtype of the tensor; what they draw from numpy or `random` is not keyed.

    The model itself is not changed, except by `put`. Raises ModelError, with the name of every parameter and buffer
    that nobody initialises.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._skeleton = Skeleton(model)
        originals = [each.original.untyped_storage() for each in self._skeleton.places if each.is_plain]
        self._strays = frozenset(storage._cdata for storage in originals)
        # Parameters with values get other memory before this is done: no other storage may come by their addresses.
        self._addresses = [StorageWeakRef(storage) for storage in originals]
        self._read: dict[int, torch.Tensor] = {}
        self._held: dict[int, int] = {}
        """The number of the place that holds a storage."""
        self._storages: dict[int, int] = {}
        self._empty(self._skeleton.places)
        self._effects = [
            effect
            for each in initialisers_of(self._skeleton.names, self._skeleton.root)
            if (effect := self._followed(each)).writes
        ]
        self._writers: dict[int, list[int]] = {}
        for number, effect in enumerate(self._effects):
            for written in effect.writes:
                self._writers.setdefault(written, []).append(number)
        self._keep_what_is_read()
        self._of_first: dict[Place, list[Place]] = {}
        for place in self._skeleton.places:
            self._of_first.setdefault(self._skeleton.first_of[place], []).append(place)
        self._firsts = {
            place.name: first for first, places in self._of_first.items() for place in places if first.lacks_values
        }
        self._refuse_gaps()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers without values, in the order of the modules; ties under their first name."""
        return tuple(first.name for first in self._of_first if first.lacks_values)

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and values of `wanted`, on the CPU, module by module.

        Beside what the caller keeps, memory is taken by the tensors wanted of one module and those that their values
        are computed from. A tie comes once, under its first name. Raises ModelError for a name that is not in `names`,
        and when an initialiser does other things on real tensors than on tensors without values.
        """
        foreign = sorted(set(wanted) - self._firsts.keys())
        if foreign:
            raise ModelError(f"{foreign[0]!r} is no parameter or buffer without values: nothing to initialise there")
        for places, program in self._units({self._firsts[name] for name in wanted}):
            made = self._made(places, program)
            while made:
                yield made.pop(0)

    def put(self, name: str, values: torch.Tensor) -> None:
        """Let the model hold `values` as the parameter or buffer `name`, on whatever device they are, ties included.

        Parameters become new objects of their class, with their attributes and `requires_grad`.
        """
        self._put(self._firsts[name], values)

    def forget(self) -> None:
        """Take the values away (to the meta device) that the initialisers would overwrite as a whole.

        For a model that was built on the meta device as a whole: `torch.FloatTensor(2, 3)` and its like give a tensor
        on the CPU all the same.
        """
        for first in self._of_first:
            if first.is_plain and not first.lacks_values and self._is_overwritten(first):
                self._put(first, torch.empty_like(first.original, device="meta"))

    def _put(self, first: Place, values: torch.Tensor) -> None:
        objects: dict[int, torch.Tensor] = {}
        for place in self._of_first[first]:
            original = place.original
            place.put(objects.setdefault(id(original), with_values(original, values)))

    def _followed(self, initialiser: Initialiser) -> _Effect:
        """What a call does, found out with as few values as it can do with."""
        within = self._skeleton.within(initialiser.module)
        own = self._skeleton.of_module.get(initialiser.module, [])
        attempts: list[list[Place]] = [[], own, within]
        error: Exception | None = None
        for number, real in enumerate(attempts):
            if number and real == attempts[number - 1]:
                continue
            try:
                writes = self._attempted(initialiser, real, within)
                return _Effect(initialiser=initialiser, writes=writes, takes_all=bool(real))
            except Exception as refusal:  # whatever a method raises that misses values
                error = refusal
            finally:
                self._empty(within)
        if not any(place.lacks_values for place in within):
            return _Effect(initialiser=initialiser, writes={}, takes_all=True)
        assert error is not None
        raise ModelError(
            f"{initialiser.words} raised {in_words(error)}; fix it, or build the module outside torch.device('meta')"
        ) from error

    def _attempted(self, initialiser: Initialiser, real: Sequence[Place], within: Sequence[Place]) -> dict[int, _Write]:
        for place in real:
            self._install(place, place.like(_unset_like(place.empty)))
        watch = self._watch(initialiser, takes_all=bool(real))
        before = {place: _storage_of(place.current()) for place in within}
        with initialiser.module_kept(), watched(watch):
            initialiser.call()
        found = {self._skeleton.places[self._held[storage]] for storage in watch.written() if storage in self._held}
        everything = {place.number for place in real}
        writes: dict[int, _Write] = {}
        for place in sorted(found.union(within), key=lambda each: each.number):
            if (now := place.current()) is None:
                raise ModelError(f"{initialiser.words} takes {place.name!r} away")
            content = watch.content(now)
            is_other = before.get(place, _storage_of(now)) != _storage_of(now)
            is_seen = content.is_written and not is_other
            if not (is_seen or is_other or (place.number in everything and _is_set(now))):
                continue
            if place.number in everything and content.is_hollow:
                raise ValuesNeededError(f"{place.name!r} gets its values from other modules")
            writes[place.number] = _Write(
                origins=content.origins,
                met=content.met | {place.number},
                is_whole=content.is_whole or not is_seen,
                regions=tuple(content.regions),
            )
        if not everything:
            return writes
        # What it does on less is not known: it is called on all of that, whatever is wanted of it.
        joined = frozenset(everything).union(*(each.met for each in writes.values()))
        return {number: replace(each, origins=joined, met=joined) for number, each in writes.items()}

    def _watch(self, initialiser: Initialiser, *, takes_all: bool) -> Watch:
        return Watch(self._held, seed=self._seed, key=initialiser.key, strays=self._strays, takes_all=takes_all)

    def _install(self, place: Place, tensor: torch.Tensor) -> None:
        self._held.pop(self._storages.get(place.number, -1), None)
        self._storages[place.number] = storage = _storage_of(tensor)
        self._held[storage] = place.number
        place.install(tensor)

    def _empty(self, places: Iterable[Place]) -> None:
        for place in places:
            self._install(place, place.empty)

    def _refuse_gaps(self) -> None:
        """Raise for all that is not overwritten as a whole, by one call or by several."""
        problems = []
        for place in self._of_first:
            if not place.lacks_values or self._is_overwritten(place):
                continue
            what = "parameter" if place.is_parameter else "buffer"
            done = "more than parts of it" if place.number in self._writers else "it"
            problems.append(f"{what} {place.name!r} (of a {type(place.module).__name__}): nobody initialises {done}")
        if not problems:
            return
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        raise ModelError(
            "the model was built without values (on the meta device), and neither reset_parameters() of their modules "
            "nor _init_weights(module) of a module around them gives some to:\n"
            + "\n".join(f"  - {each}" for each in shown)
            + "\nGive the module such a method, build it outside torch.device('meta'), or load values for all of the "
            "model (load_state_dict(..., assign=True))"
        )

    def _is_overwritten(self, place: Place) -> bool:
        """Whether all of it is, by one call or by several."""
        writes = [self._effects[number].writes[place.number] for number in self._writers.get(place.number, ())]
        regions = [region for each in writes for region in each.regions]
        return any(each.is_whole for each in writes) or _are_all(regions, place.empty)

    def _units(self, wanted: Iterable[Place]) -> Iterator[tuple[list[Place], _Program]]:
        """The places that are given values at one time, and how: those of one module, or of several small ones."""
        by_module: dict[nn.Module, list[Place]] = {}
        for place in sorted(wanted, key=lambda each: each.number):
            by_module.setdefault(place.module, []).append(place)
        units = [(places, self._program(place.number for place in places)) for places in by_module.values()]
        limit_bytes = max((self._num_bytes(program.real) for _, program in units), default=0)
        limit_bytes = max(limit_bytes, _SMALL_BYTES)
        together: list[Place] = []
        program, num_bytes = _Program(), 0
        for places, more in units:
            more_bytes = self._num_bytes(more.real - program.real)
            if together and num_bytes + more_bytes > limit_bytes:
                yield together, program
                together, program, num_bytes = [], _Program(), 0
                more_bytes = self._num_bytes(more.real)
            together += places
            program.take_in(more)
            num_bytes += more_bytes
        if together:
            yield together, program

    def _num_bytes(self, places: Iterable[int]) -> int:
        return sum(self._skeleton.places[number].num_bytes for number in places)

    def _made(self, group: Sequence[Place], program: _Program) -> list[tuple[str, torch.Tensor]]:
        """Names and values of these places."""
        places = self._skeleton.places
        touched = {*program.real, *(written for number in program.calls for written in self._effects[number].writes)}
        try:
            for number in sorted(program.real):
                self._fill(places[number])
            for number in sorted(program.calls):
                effect = self._effects[number]
                self._call(effect, program.calls[number])
                for written in program.real & effect.writes.keys():
                    if not places[written].lacks_values:  # it keeps those it has, also for the calls that follow
                        self._fill(places[written])
            return [(place.name, _plain(place)) for place in group]
        finally:
            self._empty(places[number] for number in touched)

    def _keep_what_is_read(self) -> None:
        """Hold the values from which others are computed, as they are now: the model may have been cut by then."""
        places = self._skeleton.places
        for effect in self._effects:
            for written, write in effect.writes.items():
                met = write.met if places[written].lacks_values else ()
                self._read |= {each: places[each].original.detach() for each in met if not places[each].lacks_values}

    def _fill(self, place: Place) -> None:
        """Let the skeleton hold memory there, and the values if the model had them."""
        values = torch.empty_like(place.empty, device="cpu")
        self._install(place, place.like(values if place.lacks_values else values.copy_(self._read[place.number])))

    def _program(self, wanted: Iterable[int]) -> _Program:
        program = _Program()
        pending = [(number, len(self._effects)) for number in wanted]
        seen = set(pending)
        while pending:
            place, end = pending.pop()
            program.real.add(place)
            earlier = [number for number in self._writers.get(place, ()) if number < end]
            if not earlier or not self._skeleton.places[place].lacks_values:
                continue
            write = self._effects[earlier[-1]].writes[place]
            program.calls.setdefault(earlier[-1], set()).add(place)
            program.real |= write.met
            for origin in write.origins:
                if (origin, earlier[-1]) not in seen:
                    seen.add((origin, earlier[-1]))
                    pending.append((origin, earlier[-1]))
        return program

    def _call(self, effect: _Effect, wanted: Collection[int]) -> None:
        """Make a call for the values of some places."""
        initialiser = effect.initialiser
        watch = self._watch(initialiser, takes_all=effect.takes_all)
        before = {number: _storage_of(self._skeleton.places[number].current()) for number in wanted}
        try:
            with initialiser.module_kept(), watched(watch):
                initialiser.call()
        except Exception as error:
            raise ModelError(f"{initialiser.words} raised {in_words(error)}") from error
        for number in wanted:
            place = self._skeleton.places[number]
            tensor = place.current()
            content = None if tensor is None else watch.content(tensor)
            is_done = content is not None and not content.is_hollow
            is_seen = content is not None and (content.is_written or before[number] != _storage_of(tensor))
            if not is_done or not (is_seen or effect.takes_all):
                raise ModelError(
                    f"{initialiser.words} gives {place.name!r} no values when it is called a second time; let it do "
                    "the same whenever it is called, or build the module outside torch.device('meta')"
                )


def forget_initialised(model: nn.Module) -> None:
    """Let a model that was built on the meta device have no values that its initialisers give it: see `forget`."""
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        Initialisation(model, 0).forget()


def initialise(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Give a model that was built on the meta device the values of `Initialisation`, in place, on `device`.

    Parameters and buffers that had values keep them, and move to `device`.
    """
    initialisation = Initialisation(model, seed)
    for name, values in initialisation.values(initialisation.names):
        initialisation.put(name, values.to(device))
    model.to(device)


def _plain(place: Place) -> torch.Tensor:
    """The values that the skeleton holds there, as a tensor of its own."""
    tensor = place.current()
    assert tensor is not None
    if tensor.shape != place.original.shape:
        raise ModelError(
            f"{place.name!r} is {list(place.original.shape)} in the model, and {list(tensor.shape)} once initialised"
        )
    values = torch.Tensor.detach(tensor).to(place.original.dtype)
    is_view = values.untyped_storage().nbytes() > values.numel() * values.element_size()
    return values.clone() if is_view else values


def _unset_like(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.empty_like(tensor, device="cpu")
    _bytes(values).fill_(_UNSET)
    return values


def _is_set(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or bool((_bytes(tensor) != _UNSET).any())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _storage_of(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else tensor.untyped_storage()._cdata


def _are_all(regions: Sequence[Region], tensor: torch.Tensor) -> bool:
    """Whether these parts of a tensor's storage are all of the tensor."""
    if tensor.numel() == 0:
        return True
    if not regions:
        return False
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    mask = torch.zeros(elements, dtype=torch.bool)
    for offset, shape, stride in regions:
        mask.as_strided(shape, stride, offset).fill_(True)
    return bool(mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).all())
