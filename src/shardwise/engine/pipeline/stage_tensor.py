"""Values that live on one stage: real tensors there, and only their descriptions everywhere else.

    StageTensor   what the user's forward holds; one per Python object
      value       where it lives, its description, on its own stage the tensor
        memory    shared by a tensor and its views: counts writes
      family      the copies of this value on other stages; the newest hands it on to the next

Life of one, made on stage 0, used on stages 1 and 2, then written to in place on stage 1:

                      rank of stage 0             rank of stage 1             rank of stage 2
    h = first(x)      value(0, local=tensor)      value(0, local=None)        value(0, local=None)
    a = second(h)     departs                     arrives: copy(1, tensor)    copy(1, None)
    b = third(h)                                  copy(1) departs             arrives: copy(2, tensor)
    h.add_(a)         runs on stage 1, writes to copy(1): the program's object h is a value of stage 1 from now on
    fourth(h_view)    refused on all ranks: a view of h that stayed on stage 0 does not show the write
    end of forward    the flow lets go of all values; autograd keeps what backward needs

Every rank makes the same objects in the same order and counts the same writes. So all of them decide alike what crosses
and what is refused, without a message.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.engine.torch_private import flagged, make_wrapper_subclass, version_of


# Strides too: they decide whether `.contiguous()` and `.reshape()` give a copy or a view, thus what a write in place
# changes; and kernels for matrices round differently by them. `is_leaf` decides whether autograd allows a write in
# place.
class Spec(NamedTuple):
    """The description of a tensor, without its elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_leaf: bool
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Spec":
        """The description of a tensor."""
        try:
            is_leaf = tensor.is_leaf
        except RuntimeError:  # a view that was made without gradients and written to since: torch follows it no more
            is_leaf = True
        described = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, is_leaf
        return cls(*described, tensor.is_conj(), tensor.is_neg())

    def has_strides_of(self, other: "Spec") -> bool:
        """Whether two tensors of one shape have one memory layout; dims of one element may have any stride."""
        steps = zip(self.shape, self.stride, other.stride, strict=True)
        return 0 in self.shape or all(one == two for size, one, two in steps if size > 1)

    def flagged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fresh tensor, marked as one whose elements are read conjugated or negated where this one's are."""
        if self.is_conj or self.is_neg:
            flagged(tensor, is_conj=self.is_conj, is_neg=self.is_neg)
        return tensor


class ViewMemory:
    """The memory that a tensor and its views share."""

    __slots__ = ("doubt", "num_writes", "origin", "origin_version", "plain", "stale")

    def __init__(self, *, plain: torch.Tensor | None = None, origin: "ViewMemory | None" = None) -> None:
        self.num_writes = 0
        """Writes in place through values of a stage; counted alike on all ranks."""
        self.plain = plain
        """The tensor of all ranks whose memory it is, where there is one."""
        self.origin = origin
        """Of a copy on another stage: the memory that it was copied from; in the program both are one."""
        self.origin_version = 0 if origin is None else origin.version
        self.stale = ""
        """Why these elements may not be read any more; empty: they may."""
        self.doubt = ""
        """Why a write in place is refused: this rank knows that the others assume another sharing of memory."""

    @property
    def version(self) -> int:
        """Another number after every write."""
        # Both counts: writes through values pass this file, writes of all ranks to a plain tensor count in torch.
        # `_version` is the same on all ranks only because all of them execute the latter.
        return self.num_writes if self.plain is None else self.num_writes + version_of(self.plain)

    @property
    def root(self) -> "ViewMemory":
        """The memory that the first copy was made from."""
        return self if self.origin is None else self.origin.root

    def refusal(self, maker: str) -> str:
        """Why an output of `maker` may not be read; empty: it may."""
        if self.stale or not self.is_behind:
            return self.stale
        return (
            f"{maker!r} returned a tensor that it got from another stage. The tensor was written to since, but not "
            "the returned one; write to a copy (clone) instead"
        )

    @property
    def is_behind(self) -> bool:
        """Whether its origin was written to since it was copied."""
        origin = self.origin
        return origin is not None and (origin.version != self.origin_version or origin.is_behind)


class StageValue:
    """A tensor on a stage."""

    __slots__ = ("has_known_shape", "is_kept", "lineage", "local", "maker", "memory", "module", "spec", "stage")

    def __init__(
        self,
        stage: int,
        spec: Spec,
        local: torch.Tensor | None,
        maker: str,
        *,
        memory: ViewMemory | None = None,
        has_known_shape: bool = True,
        lineage: int = 0,
        module: str = "",
    ) -> None:
        self.stage = stage
        self.spec = spec
        """Under every shape but a known one, `shape` and `stride` are an example."""
        self.local = local
        """The tensor, on the rank of its stage."""
        self.maker = maker
        """The module or operation that made it."""
        self.module = module or maker
        """The placed module, or the parameter, that it comes from."""
        self.memory = ViewMemory() if memory is None else memory
        self.has_known_shape = has_known_shape
        self.is_kept = False
        """Whether it is a parameter or a buffer of the model."""
        self.lineage = lineage
        """A checksum over how it was made; equal for one that is made again from the same."""


class ValueCopies:
    """The copies of one value, by stage."""

    __slots__ = ("copies", "last", "origin", "version")

    def __init__(self, origin: StageValue) -> None:
        self.origin = origin
        self.reset()

    def reset(self) -> None:
        """Forget the copies: the origin was written to."""
        self.version = self.origin.memory.version
        self.copies = {self.origin.stage: self.origin}
        self.last = self.origin

    def add(self, copy: StageValue) -> None:
        """Note a copy that was made from `last`."""
        self.copies[copy.stage] = copy
        # The next stage gets it from here, not from the origin: a relay 0 -> 1 -> 2. Then gradients come back as 2
        # -> 1 -> 0 and each stage adds its own on the way, which is the order in which autograd adds uses in one
        # process: last use first.
        self.last = copy


class ValueForward(Protocol):
    """The forward that a value belongs to (a `MicrobatchFlow`), as far as the value needs it."""

    device: torch.device
    on_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    """Gives the result of a torch function of values."""
    leaves: list[torch.Tensor]
    """Of graphs: those that the code between stages has met, and all ranks have."""

    def refuse_compiled_code(self, function: Any) -> Any:
        """Raise ModelError."""

    def shape_known(self, tensor: "StageTensor") -> Spec:
        """The description of a value with its real shape."""


class StageTensor(torch.Tensor):
    """A value of one stage in the hands of the user's forward. Every operation on it goes through its flow."""

    value: StageValue
    flow: ValueForward
    copies: ValueCopies | None = None
    """What `family` gives, once somebody has asked: few values cross."""

    @staticmethod
    def __new__(cls, flow: ValueForward, value: StageValue, family: ValueCopies | None = None) -> "StageTensor":
        """A tensor without elements that stands for `value`; `family` where it has copies already."""
        spec = value.spec
        made: StageTensor = make_wrapper_subclass(
            cls,
            spec.shape,
            strides=spec.stride,
            dtype=spec.dtype,
            device=flow.device,
            # Torch functions never see this flag: they are intercepted. A custom autograd function is not, and leaves a
            # `grad_fn` on what it gives only if an input requires a gradient: so it can be noticed and refused.
            requires_grad=spec.requires_grad,
        )
        made.flow = flow
        made.value = value
        if family is not None:
            made.copies = family
        return made

    @property
    def family(self) -> ValueCopies:
        """The copies of the value on other stages."""
        if self.copies is None:
            self.copies = ValueCopies(self.value)
        return self.copies

    def rebind(self, value: StageValue) -> None:
        """Be another value from now on: an operation in place has moved it to another stage."""
        self.value = value
        self.copies = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Outside of a forward (in a recomputation, say), where no mode stands before it."""
        return _flow_in((args, kwargs)).on_call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Reached from compiled code that knows nothing of `__torch_function__`."""
        return _flow_in((args, kwargs)).refuse_compiled_code(func)


def _flow_in(nested: Any) -> ValueForward:
    for each in nested.values() if isinstance(nested, dict) else nested:
        if type(each) is StageTensor:
            return each.flow
        if isinstance(each, tuple | list | dict) and (flow := _flow_in(each)) is not None:
            return flow
    return None  # type: ignore[return-value]
