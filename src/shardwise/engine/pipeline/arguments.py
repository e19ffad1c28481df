"""The arguments of a call, taken apart in one walk: tensors and objects by number, and a key that all ranks have.

    block(h, mask, 0.5, more=(h,))    tensors     h, mask
                                      template    (slot 0, slot 1, 0.5), {"more": (slot 0,)}
                                      key         block, modes of torch, 3, 0, spec of h, 1, spec of mask, 0.5, ..

Calls of one key give outputs of one description, as far as shapes are known. The key says all that decides it:

    the call        function; of a module what decides shapes, its modes and hooks
    around it       grad mode, autocast and its dtype, inference mode, the default dtype
    the arguments   structure, keys and keywords; of each tensor shape, strides, dtype and gradient; of each plain value
                    its type and the value; of each module its modes and hooks
    sharing         which tensors, and which containers, are one object
"""

import functools
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import MethodType, NoneType
from typing import Any

import torch
from torch import nn

from shardwise.comm.nested_values import (
    ObjectSlot,
    SeenContainers,
    TensorSlot,
    contents_of,
    filled,
    is_container,
    is_plain,
    rebuilt,
)
from shardwise.engine.forward.aside import items_set
from shardwise.engine.pipeline.nested import Opaque, comparable, token_of
from shardwise.engine.pipeline.stage_tensor import Spec, StageTensor
from shardwise.engine.pipeline.staged_calls import PlacedModule, StagedCall, modes_of
from shardwise.engine.pipeline.transfers import MicrobatchFlow

_NUMBERS = frozenset({bool, int, float, complex})
_PLAIN = _NUMBERS | {NoneType, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...)}
_TENSORS = frozenset({torch.Tensor, nn.Parameter, StageTensor})
"""By exact type: a subclass may mean more by a tensor than its description says."""

_slot = functools.cache(TensorSlot)


class Arguments:
    """The arguments of one call."""

    def __init__(
        self, flow: MicrobatchFlow, call: StagedCall, stage: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        """Values of stages and plain ones, each once: a module may ask whether two inputs are one, and a write in place
        to the one shows in the other."""
        self.staged: list[tuple[int, StageTensor]] = []
        """The values of stages among them, with their numbers."""
        self.objects: list[Any] = []
        self.numbers: list[float | complex] = []
        self.has_opaque = False
        """Whether an object among them is known on one rank only, so that no rank can try the call."""
        self.is_plain = True
        """Whether there are tensors and plain values in tuples alone: what is written to others has to be found."""
        self._flow, self._call = flow, call
        self._positions: dict[int, int] = {}
        self._seen: SeenContainers | None = None  # most calls have none
        self._modules: list[nn.Module] = []
        self.lent: list[nn.Module] = []
        """The modules among them, with all inside of those; not the called one, what is inside of it, or around it."""
        self._lent: list[tuple[dict[str, Any], str, int]] = []
        self._tokens: list[Any] = [call.key(), around_of(flow.device.type), len(args)]
        self._args, self._names = self._read(args), tuple(kwargs)
        self._tokens += kwargs
        self._values = self._read(kwargs.values()) if kwargs else []
        if call.is_user_code:
            self._lend(stage)
        self.key: tuple[Hashable, ...] = tuple(self._tokens)

    def _read(self, values: Iterable[Any]) -> list[Any]:
        """The values with slots in them; what decides the outcome comes into the key."""
        tokens, ignores = self._tokens, self._call.ignores_numbers
        template: list[Any] = []
        for leaf in values:
            kind = type(leaf)
            if kind in _TENSORS:
                template.append(self._take(leaf))
            elif kind in _PLAIN:
                # The type too: Python takes 1, 1.0 and True for equal.
                tokens.append(kind)
                # `h * 0.37` gives the shape of `h * 0.36`: a factor that changes in every step is no new key each time.
                if not (ignores and (kind is float or kind is complex)):
                    tokens.append(comparable(leaf))
                if kind in _NUMBERS:
                    self.numbers.append(leaf)
                template.append(leaf)
            elif kind is tuple or (kind is list and not self._call.is_user_code):
                tokens += (kind, len(leaf))
                template.append(kind(self._read(leaf)))
            else:
                template.append(self._read_other(leaf))
        return template

    def _take(self, leaf: torch.Tensor) -> TensorSlot:
        tensor = leaf if type(leaf) is StageTensor else self._flow.adopted(leaf)
        at = self._positions.setdefault(id(tensor), len(self.tensors))
        self._tokens.append(at)
        if at == len(self.tensors):
            self.tensors.append(tensor)
            if type(tensor) is StageTensor:
                self.staged.append((at, tensor))
                self._tokens.append(tensor.value.spec)
            else:
                self._tokens.append(Spec.of(tensor))
        return _slot(at)

    def _read_other(self, leaf: Any) -> Any:
        if type(leaf) is slice and {type(leaf.start), type(leaf.stop), type(leaf.step)} <= {int, NoneType}:
            self._tokens.append((slice, leaf.start, leaf.stop, leaf.step))
            return leaf
        self.is_plain = False
        if isinstance(leaf, torch.Tensor):
            return self._take(leaf)
        if is_container(leaf):
            return self._read_container(leaf)
        if isinstance(leaf, Opaque) or id(leaf) in self._flow.opaque:
            self.has_opaque = True
            self._tokens.append("opaque")
        else:
            if isinstance(leaf, int | float | complex):
                self.numbers.append(leaf)
            is_factor = isinstance(leaf, float | complex) and self._call.ignores_numbers
            self._tokens.append((type(leaf),) if is_factor else token_of(leaf))
            owner = leaf.__self__ if isinstance(leaf, MethodType) else leaf
            if isinstance(owner, nn.Module):
                self._modules.append(owner)
            if is_plain(leaf) or callable(leaf):
                return leaf
        self.objects.append(leaf)
        return ObjectSlot(len(self.objects) - 1)

    def _read_container(self, leaf: Any) -> Any:
        if self._seen is None:
            self._seen = SeenContainers(gives_slots=True)
        if (again := self._seen.again(leaf)) is not None:
            self._tokens.append(again)
            return again
        contents = contents_of(leaf)
        self._tokens += (type(leaf), len(contents), *([] if isinstance(leaf, tuple | list) else contents))
        template = rebuilt(leaf, self._read(contents.values()))
        if not isinstance(leaf, tuple):
            self._seen.note(leaf, leaf)
        return template

    def _lend(self, stage: int | None) -> None:
        """Let values come along that the program gives by other ways than arguments.

        `head(h, self.embed)` gives a module of another stage: its parameters and buffers cross like any other value.
        Hooks before a forward may set attributes.
        """
        assert isinstance(self._call, PlacedModule)
        values = self._call.values_set()
        if not (values or self._modules):
            return
        places = [(vars(module), key) for module, key in values]
        if self._modules:
            own = {self._call.module, *self._call.inner}
            # A given module may hold the called one, as the whole model does. It does not come along.
            given = [inner for each in self._modules if self._call.module not in (inner := list(each.modules()))]
            self.lent += dict.fromkeys(each for inner in given for each in inner if each not in own)
            self._tokens.append(modes_of(self.lent))
            of_stage = self._flow.stages.stage_in
            for each in self.lent:
                for of_kind in (each._parameters, each._buffers):
                    places += [
                        (of_kind, key) for key, held in of_kind.items() if of_stage(each, held) not in (None, stage)
                    ]
        for kept, key in places:
            self.is_plain = False
            self._lent.append((kept, key, self._take(kept[key]).number))

    def lending(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Modules of other stages have the tensors that came along with them."""
        return items_set([(held, key, tensors[at]) for held, key, at in self._lent])

    @property
    def containers(self) -> list[Any]:
        """Lists, dicts and the like that a module may write to, as the program has them, each once."""
        return [] if self._seen is None else self._seen.made

    def filled(
        self, tensors: Sequence[torch.Tensor], objects: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """The arguments with these tensors and objects, and a module's containers in the order of `containers`."""
        # A module gets containers of its own: real tensors stand in them for values.
        seen = SeenContainers() if self._call.is_user_code and self._seen is not None else None
        args = put_in(self._args, tensors, objects, seen=seen)
        named = {}
        if self._names:
            named = dict(zip(self._names, put_in(self._values, tensors, objects, seen=seen), strict=True))
        return tuple(args), named, [] if seen is None else seen.made


def put_in(
    templates: Iterable[Any],
    tensors: Sequence[torch.Tensor],
    objects: Sequence[Any] = (),
    *,
    seen: SeenContainers | None = None,
) -> list[Any]:
    """`filled` for each of several values: for tensors in tuples, which most are, with few calls of Python.

    seen: their containers are fresh ones then.
    """
    fresh = seen is not None
    values: list[Any] = []
    for leaf in templates:
        kind = type(leaf)
        if kind is TensorSlot:
            values.append(tensors[leaf.number])
        elif kind in _PLAIN:
            values.append(leaf)
        elif kind is tuple or (kind is list and not fresh):
            values.append(kind(put_in(leaf, tensors, objects, seen=seen)))
        else:
            values.append(filled(leaf, tensors, objects, fresh=fresh, seen=seen))
    return values


def spec_of(tensor: torch.Tensor) -> Spec:
    """The description of a tensor, or of the value that it stands for."""
    return tensor.value.spec if isinstance(tensor, StageTensor) else Spec.of(tensor)


def around_of(kind: str) -> Hashable:
    """What decides outcomes apart from the call, on a kind of device: settings of torch for this thread."""
    # Regions of autocast on the CPU count on every device: buffers of modules may be there.
    is_cast = torch.is_autocast_enabled(kind) or (kind != "cpu" and torch.is_autocast_enabled("cpu"))
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    if not is_cast:
        return modes
    kinds = dict.fromkeys((kind, "cpu"))
    return (*modes, *[torch.is_autocast_enabled(each) and torch.get_autocast_dtype(each) for each in kinds])
