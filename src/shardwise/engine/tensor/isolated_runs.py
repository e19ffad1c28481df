"""A module run in isolation from the training, and how far two such runs differ.

`run_apart` runs a module on copies of its inputs, with other parameters, and leaves no trace. There are no gradients,
no writes to buffers, attributes, lists or dicts, and no draws from the program's random streams. The training that goes
on around a proof has the same bits with and without it.

`differ` measures two runs against each other, `rounded` what rounding alone makes of one. A change of one last digit in
every input and parameter shows how a module amplifies an error. Right plans differ by a few such roundings:

    float32    one last digit 1.2e-7    its effect on an output 1.7e-7    allowed 64 x 1.7e-7 = 1.1e-5    wrong: > 1e-3
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from shardwise.comm.accelerators import random_numbers_kept, random_states, rounds_convolutions
from shardwise.comm.nested_values import is_plain, tensors_in, transform
from shardwise.engine.forward.aside import kept_attributes
from shardwise.engine.forward.kept_objects import held_tensors, own_generators
from shardwise.engine.forward.layers import APART, Forward, package_of, run_eagerly, strip
from shardwise.engine.forward.packed_tensors import is_packed
from shardwise.engine.forward.precision import stop_following
from shardwise.engine.forward.randomness import StreamSplit
from shardwise.engine.tensor.styles import forget_heads
from shardwise.engine.tensor.tp_collectives import widened
from shardwise.engine.torch_private import TorchDispatchMode, forward_hooks, forward_pre_hooks

Parameters = Mapping[nn.Parameter, torch.Tensor]
"""What a module runs with in the place of its parameters."""

_TF32 = 2.0**-10
"""The precision of float32 products of 10 bits."""


@dataclass(frozen=True, slots=True)
class CopiedInputs:
    """Copies of the arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_state: bool
    """Whether tensors are inside of objects (a cache of keys and values): how they are cut is unknown."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "CopiedInputs":
        """Raises what an object raises that cannot be copied."""
        known: dict[int, Any] = {}
        hidden: list[torch.Tensor] = []

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                # Subclasses and sparse tensors may not be what `clone` and arithmetic take them for.
                if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout != torch.strided:
                    raise TypeError(f"a {type(leaf).__name__} of layout {leaf.layout}")
                return leaf.detach().clone()
            if is_plain(leaf) or callable(leaf) or isinstance(leaf, nn.Module):
                return leaf
            found = held_tensors(leaf)
            hidden.extend(found)
            # deepcopy refuses tensors with a graph. It finds these copies in its memo and takes them.
            known.update({id(each): each.detach().clone() for each in found})
            return copy.deepcopy(leaf, known)

        args, kwargs = transform((args, kwargs), copied, fresh=True)
        return cls(args, kwargs, bool(hidden))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """In the order of the walk."""
        return tensors_in((self.args, self.kwargs))

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "CopiedInputs":
        """The same call with other tensors."""
        following = iter(tensors)
        args, kwargs = transform(
            (self.args, self.kwargs), lambda leaf: next(following) if isinstance(leaf, torch.Tensor) else leaf
        )
        return CopiedInputs(args, kwargs, self.has_state)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "CopiedInputs":
        """A copy whose tensors, hidden ones too, are what `change` gives."""
        fresh = CopiedInputs.of(self.args, self.kwargs)

        def put(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return change(leaf)
            for each in held_tensors(leaf):
                # The tensors of an object are changed where the object holds them: `fresh` is a copy.
                each.data = change(each)
            return leaf

        args, kwargs = transform((fresh.args, fresh.kwargs), put)
        return CopiedInputs(args, kwargs, self.has_state)


class Way(NamedTuple):
    """How a module runs."""

    is_cut: bool
    """As the plan has it; else the module, and all inside, runs with its own forward."""
    is_wide: bool
    """Half precision is replaced by float32."""
    trains: bool
    """In training mode, where dropout gives what it takes; else in evaluation mode."""


class ModuleRun(NamedTuple):
    """What a module gave."""

    tensors: list[torch.Tensor]
    eps: float
    """The coarsest precision of all that it computed."""
    drew: bool
    """Whether it drew random numbers."""


def run_apart(module: nn.Module, forward: Forward, inputs: CopiedInputs, parameters: Parameters, way: Way) -> ModuleRun:
    """What the module gives; raises what it raises. Each run begins with the random state of now."""
    device = next((each.device for each in parameters.values()), torch.device("cpu"))
    own = own_generators(module)
    precision = _PrecisionWatch()
    given = inputs.changed(widened if way.is_wide else _same)
    with (
        ExitStack() as stack,
        torch.no_grad(),
        # The streams go on after a proof as before it. And since all ranks along tp draw from one stream, whole and cut
        # runs begin with the same numbers on every rank: what is drawn for a whole value is alike in both.
        random_numbers_kept(device, own=own),
        # Under autocast a wide run would be rounded to half precision again.
        torch.autocast(device.type, enabled=False),
        NoDropout(),
        precision,
    ):
        # A forward may write into the modules, their lists and dicts.
        stack.callback(kept_attributes(module.modules(), contents=(list, dict, set)))
        # What module.compile() made of it would be compiled anew for these parameters.
        stack.enter_context(run_eagerly(module))
        _prepare(module, parameters, way)
        if not way.is_cut:
            # A model that computes its loss inside would take whole logits for a part of a cut head.
            forget_heads(module)
            forward = strip(module, forward)
        before = random_states(device, own)
        output = forward(*given.args, **given.kwargs)
        tensors = [each.detach() for each in tensors_in(output)]
        return ModuleRun(tensors, precision.eps, drew=has_drawn(before, device, own))


def has_drawn(before: Mapping[str, torch.Tensor], device: torch.device, own: Sequence[torch.Generator]) -> bool:
    """Whether random numbers were drawn since `random_states` gave `before`."""
    now = random_states(device, own)
    return not all(torch.equal(state, now[kind]) for kind, state in before.items())


class NoDropout(TorchFunctionMode):
    """Dropout gives what it takes, so that what a module computes in training mode can be compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Whole and cut would drop other places of the same value: each rank draws for its part.
        if func in _dropouts():
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward and "training" in kwargs:
            kwargs = {**kwargs, "training": False}  # which is about dropout alone
        return func(*args, **kwargs)


@functools.cache
def _dropouts() -> frozenset[Any]:
    names = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    more = ("feature_dropout", *(f"{name}_" for name in ("dropout", "alpha_dropout", "feature_dropout")))
    return frozenset(getattr(each, name) for each in (F, torch) for name in (*names, *more) if hasattr(each, name))


def _prepare(module: nn.Module, parameters: Parameters, way: Way) -> None:
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    modules = list(module.modules())
    # In training mode each module keeps its own mode (frozen norms are in evaluation mode). A model that is called in
    # evaluation mode as a whole says nothing of modes, so all train.
    is_in_training = any(each.training for each in modules)
    for each in modules:
        packed = [name for name, held in each._parameters.items() if held is not None and is_packed(held)]
        if not packed:  # kernels may pack codes in another way in evaluation mode
            each.training = way.trains and (each.training or not is_in_training)
        vars(each)[APART] = True
        for hooks in (forward_pre_hooks(each), forward_hooks(each)):
            for number in [number for number, hook in hooks.items() if not _is_kept(hook, way)]:
                del hooks[number]
        for name, held in each._parameters.items():
            if held is not None and name not in packed:
                each._parameters[name] = nn.Parameter(parameters[held], requires_grad=False)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                fresh = widened(buffer).clone() if way.is_wide else buffer.clone()
                # A buffer that two modules share stays one: what one writes the other reads.
                each._buffers[name] = buffers.setdefault(buffer, fresh)
    if way.is_wide:
        # The casts of inputs to the dtype of parameters would undo the widening.
        stop_following(module)


class _PrecisionWatch(TorchDispatchMode):
    """Notes the coarsest precision of all that is computed inside: what a forward casts itself, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # Every operation counts, not only the output: a forward may cast to bfloat16 inside and back again.
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()):
                self.eps = max(self.eps, torch.finfo(each.dtype).eps, _eps_inside(str(func), each))
        return made


def _eps_inside(operation: str, made: torch.Tensor) -> float:
    """The precision of products that torch may take in fewer digits than those of their dtype (TF32)."""
    if made.dtype != torch.float32:
        return 0.0
    if "convolution" in operation:
        return _TF32 if rounds_convolutions(made.device) else 0.0
    if any(word in operation for word in ("mm", "matmul", "linear", "addmv", "dot", "attention")):
        return {"highest": 0.0, "high": _TF32}.get(
            torch.get_float32_matmul_precision(), torch.finfo(torch.bfloat16).eps
        )
    return 0.0


def _is_kept(hook: Any, way: Way) -> bool:
    """Hooks of torch (normed weights) and ours belong to the module. Those of others look at the calls of a program.

    In training mode nothing is drawn to split streams: it would look as if the module had drawn.
    """
    # A split draws one number from the stream around (see `engine.randomness`).
    if way.trains and isinstance(getattr(hook, "__self__", hook), StreamSplit):
        return False
    return package_of(hook) in ("torch", "shardwise")


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


_FACTOR, _COARSE_FACTOR = 64.0, 8.0
"""A plan is refused where outputs differ more than this times what rounding makes of them.

Rounding is measured: every input and parameter is changed by up to one last digit. A sum over ranks takes another order
of the same additions, and changes no result by more than a few such roundings. Wrong plans change a thousandth or more.
So the factor is large where digits are fine (float64, and float32, also for half precision), and small where a forward
insists on coarse ones.
"""

PERTURBATION = 0.1
"""How much parameters are changed before outputs are compared: zeros and ones would hide faults."""

_CHANGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes in which torch calculates; values of others are taken as they are."""

Leaf = Literal["alike", "part", "unlike"]
"""A tensor of the cut module: of the whole one's shape, the part of this rank, or something else."""


def differ(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest relative difference (2-norms) between floating tensors and those of the same place. Inf where one of
    them is not finite and the other is."""
    return max((_difference(*pair) for pair in zip(tensors, others, strict=True)), default=0.0)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if not (one.is_floating_point() or one.is_complex()) or one.numel() == 0:
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    # In float64, so that the difference of two close tensors is not itself a rounding.
    one, other = one.to(wide), other.to(wide)
    finite = one.isfinite()
    # Masks of -inf in both are alike; an inf in one only is a difference that no norm would show (inf - x is inf).
    if not torch.equal(finite, other.isfinite()):
        return torch.inf
    one, other = one[finite], other[finite]
    apart, size = float((one - other).abs().norm()), float(other.abs().norm())
    return apart / size if size else apart


def factor_of(eps: float) -> float:
    """How many times the rounding is allowed, where the coarsest value has this precision."""
    return _FACTOR if eps <= torch.finfo(torch.float32).eps else _COARSE_FACTOR


def finest_eps(tensors: Sequence[torch.Tensor]) -> float:
    """The precision of the finest dtype among what a module gives."""
    floats = [each.dtype for each in tensors if each.is_floating_point() or each.is_complex()]
    return min((torch.finfo(dtype).eps for dtype in floats), default=torch.finfo(torch.float32).eps)


def leaf_of(
    cut: torch.Tensor, whole: torch.Tensor, sizes: Sequence[tuple[int, ...]], rank: int
) -> tuple[Leaf, torch.Tensor]:
    """What a tensor of the cut module is, and what it is compared with; `sizes`: its shapes on all ranks."""
    if len({*sizes, tuple(whole.shape)}) == 1:
        return "alike", whole
    dims = [dim for dim, size in enumerate(whole.shape) if cut.dim() == whole.dim() and cut.shape[dim] != size]
    if len(dims) == 1 and all(len(each) == whole.dim() for each in sizes):
        (dim,) = dims
        along = [each[dim] for each in sizes]
        if sum(along) == whole.shape[dim]:
            return "part", whole.narrow(dim, sum(along[:rank]), along[rank])
    return "unlike", cut


def perturbed(value: torch.Tensor, name: str, attempt: int) -> torch.Tensor:
    """Other values of the same kind: signs stay, and what is zero everywhere is not any more."""
    if value.dtype not in _CHANGED or value.numel() == 0:
        return value
    noise = _uniform(value, f"{name} {attempt}")
    # In proportion: a scale stays a scale, and a small weight is not drowned. Zeros need something to be seen at all.
    if bool(value.any()):
        return value * (1 + PERTURBATION * noise)
    return PERTURBATION * noise


def rounded(
    inputs: CopiedInputs, parameters: Parameters, eps: float
) -> tuple[CopiedInputs, dict[nn.Parameter, torch.Tensor]]:
    """Inputs and parameters, each changed by up to one last digit of this precision."""
    numbers = iter(range(1 << 30))

    def change(value: torch.Tensor) -> torch.Tensor:
        if value.dtype not in _CHANGED:
            return value
        return value * (1 + eps * _uniform(value, f"rounding {next(numbers)}"))

    return inputs.changed(change), {each: change(value) for each, value in parameters.items()}


def _uniform(like: torch.Tensor, key: str) -> torch.Tensor:
    """Numbers between -1 and 1, the same on every rank: the key decides, and no state of a generator."""
    generator = torch.Generator(like.device).manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)
    noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return noise.uniform_(-1, 1, generator=generator).to(like.dtype)
