"""Calls on tensors some of which have no values: which values flow where, and random numbers that do not depend on it.

A storage is hollow when its values are not there: it is on the meta device, or was computed from what is. An operation
on hollow tensors yields hollow ones, and is as good as skipped; one on real tensors is carried out. Every operation
that draws starts from a seed of its own, made of the seed, the call, and the number of the draw in the call. A call on
some real tensors therefore leaves in them what a call on nothing but real ones leaves there, as long as all from which
their values are computed are real too; and what these are a call on nothing but hollow ones tells.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_OVERWRITING = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    }
)
"""Operations that give every element of what they write a value that does not depend on the one before."""

_READING = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "nonzero"})
"""Operations by which values reach the program: which way it goes then depends on them."""

_GETTERS: Mapping[Any, object] = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: torch.device("cpu"),
}
"""What tensors answer: an initialiser that asks whether there are values would leave out what it would do with them."""

_TO_PYTHON = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr})

Region = tuple[int, torch.Size, tuple[int, ...]]
"""Offset, sizes and strides of a view, in elements."""


class ValuesNeededError(RuntimeError):
    """A call goes on according to values that are not there."""


@dataclass(eq=False, slots=True)
class _Content:
    """What is known of the values of one storage."""

    origins: frozenset[int]
    """The places whose values, as they were when the call began, they are computed from."""
    met: frozenset[int]
    """The places that must be real for them to be."""
    is_hollow: bool
    is_written: bool = False
    is_whole: bool = False
    """Whether all of it has been overwritten."""
    regions: list[Region] = field(default_factory=list)
    """Parts of it that have been overwritten."""


class Watch(TorchDispatchMode):
    """Follows one call. `places`: the number of the place whose values a storage holds; `key`: of its random numbers.

    strays: storages that the call must not reach. takes_all: the call may use a generator of its own, because
    everything that it touches is real. Raises ValuesNeededError where the call needs values that are hollow.
    """

    def __init__(
        self, places: Mapping[int, int], *, seed: int, key: str, strays: frozenset[int], takes_all: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places, self._seed, self._key, self._strays = places, seed, key, strays
        self._takes_all = takes_all
        self._num_draws = 0
        self._in_draw = False
        self._contents: dict[int, _Content] = {}
        self._alive: list[StorageWeakRef] = []
        """Keeps the addresses of storages from being given to others, not their memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # tensors tell what they are, not what they look like
            return self._follow(func, args, kwargs or {})

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._begin_draw(args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        written = _written(func, args, kwargs)
        inputs = [each for each in tensors if not any(each is other for other in written)]
        name, is_out = func._opname, "out" in func._overloadname
        overwrites = name in _OVERWRITING or is_out
        sources = inputs if overwrites else tensors
        is_hollow = any(self.content(each).is_hollow for each in sources)
        if is_hollow and name in _READING:
            raise ValuesNeededError(f"{name} of a tensor without values")
        result = self._carry_out(func, args, kwargs, tensors, written, overwrites and not is_out)
        origins = frozenset[int]().union(*(self.content(each).origins for each in sources))
        met = frozenset[int]().union(*(self.content(each).met for each in tensors))
        for each in written:
            self._note_write(each, origins, met, is_hollow=is_hollow, overwrites=overwrites)
        known = {_storage(each) for each in tensors}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _storage(each) not in known:
                self._take_up(each, _Content(origins, met, is_hollow or each.is_meta))
        return result

    @contextlib.contextmanager
    def one_draw(self) -> Iterator[None]:
        """What is drawn in the body counts as one draw, however much it is."""
        self._begin_draw((), {})
        before, self._in_draw = self._in_draw, True
        try:
            yield
        finally:
            self._in_draw = before

    def written(self) -> list[int]:
        """The storages that the call wrote to."""
        return [storage for storage, content in self._contents.items() if content.is_written]

    def start(self) -> None:
        """Whatever draws unseen does so from a seed of the call."""
        self._seed_with("start")

    def content(self, tensor: torch.Tensor) -> _Content:
        """What is known of the storage of `tensor`."""
        storage = _storage(tensor)
        if storage not in self._contents:
            if storage in self._strays and tensor.is_meta:
                raise ValuesNeededError("it reaches tensors of the model by another way than through its modules")
            place = self._places.get(storage)
            of_place = frozenset[int]() if place is None else frozenset({place})
            self._take_up(tensor, _Content(of_place, of_place, tensor.is_meta))
        return self._contents[storage]

    def _take_up(self, tensor: torch.Tensor, content: _Content) -> None:
        storage = tensor.untyped_storage()
        self._contents[storage._cdata] = content
        self._alive.append(StorageWeakRef(storage))

    def _carry_out(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        is_inplace: bool,
    ) -> Any:
        num_meta = sum(each.is_meta for each in tensors)
        if not num_meta:
            return func(*args, **kwargs)
        if is_inplace and written[0].is_meta:
            return written[0]
        if num_meta == len(tensors):
            return func(*args, **kwargs)
        if any(not each.is_meta for each in written):  # they become hollow
            return written[0] if len(written) == 1 else tuple(written)
        args, kwargs = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)

    def _note_write(
        self, tensor: torch.Tensor, origins: frozenset[int], met: frozenset[int], *, is_hollow: bool, overwrites: bool
    ) -> None:
        if _storage(tensor) in self._strays:
            raise ValuesNeededError("it writes to tensors of the model by another way than through its modules")
        content = self.content(tensor)
        content.is_written = True
        content.met |= met
        size = tensor.untyped_storage().nbytes()
        is_all = overwrites and tensor.numel() * tensor.element_size() == size
        content.origins = origins if is_all else content.origins | origins
        content.is_hollow = tensor.is_meta or is_hollow or (content.is_hollow and not is_all)
        if is_all:
            content.is_whole = True
        elif overwrites:
            content.regions.append((int(tensor.storage_offset()), tensor.shape, tensor.stride()))

    def _begin_draw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._in_draw:
            return
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            if not self._takes_all:
                raise ValuesNeededError("it draws from a generator of its own")
            return
        self._seed_with(self._num_draws)
        self._num_draws += 1

    def _seed_with(self, draw: int | str) -> None:
        digest = xxhash.xxh3_64_intdigest(f"{self._seed} {self._key} {draw}".encode())
        torch.default_generator.manual_seed(digest)


class _Appearance(TorchFunctionMode):
    """Tensors without values look as if they were on the CPU."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _GETTERS and args[0].is_meta:
            return _GETTERS[func]
        if func in _TO_PYTHON and self._watch.content(args[0]).is_hollow:
            raise ValuesNeededError(f"{func.__name__} of a tensor without values")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """What the body calls is followed by `watch`; new tensors come to the CPU, and torch's generator is put back."""
    before = torch.default_generator.get_state()
    try:
        with _on_cpu(), torch.no_grad(), _truncated_at_once(watch), _Appearance(watch), watch:
            watch.start()
            yield
    finally:
        torch.default_generator.set_state(before)


def _on_cpu() -> contextlib.AbstractContextManager[object]:
    """New tensors come to the CPU. (Where they do anyway: torch.device refuses `out=` tensors of another device.)"""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextlib.contextmanager
def _truncated_at_once(watch: Watch) -> Iterator[None]:
    """`trunc_normal_` is one draw: torch's draws again until all values are within the bounds."""
    name = "_no_grad_trunc_normal_"
    original: Callable[..., torch.Tensor] | None = getattr(torch.nn.init, name, None)
    if original is None:
        yield
        return

    def truncated(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        generator = kwargs.get("generator", args[4] if len(args) > 4 else None)
        if generator is not None:
            return original(tensor, *args, **kwargs)
        with torch._C.DisableTorchFunction():  # what the tensor is, not what it looks like
            is_meta = tensor.is_meta
        if is_meta:
            return tensor.normal_()  # one draw as well, that overwrites all
        with watch.one_draw():
            return original(tensor, *args, **kwargs)

    setattr(torch.nn.init, name, truncated)
    try:
        yield
    finally:
        setattr(torch.nn.init, name, original)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found = [
        args[position] if position < len(args) else kwargs.get(name) for position, name in _written_arguments(func)
    ]
    return [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
