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
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, has_torch_function_unary

from shardwise.comm.nested_values import SeenContainers, is_plain, tensors_in, transform
from shardwise.engine.forward.kept_objects import held_tensors
from shardwise.engine.forward.layers import APART, Forward, is_compiled, package_of, run_eagerly, strip
from shardwise.engine.forward.observe import Observed, eps_of
from shardwise.engine.forward.precision import stop_following
from shardwise.engine.forward.randomness import StreamSplit
from shardwise.engine.forward.trial_runs import aside
from shardwise.engine.forward.writes import Content
from shardwise.engine.parameter_kinds import is_packed
from shardwise.engine.tensor.tp_collectives import widened
from shardwise.engine.torch_private import forward_hooks, forward_pre_hooks, version_of

Parameters = Mapping[nn.Parameter, torch.Tensor]
"""What a module runs with in the place of its parameters."""


@dataclass(frozen=True, slots=True)
class CopiedInputs:
    """Copies of the arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_state: bool = False
    """Whether tensors are inside of objects (a cache of keys and values): how they are cut is unknown."""

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
        """A copy whose tensors, hidden ones too, are what `change` gives. Raises for what cannot be copied."""
        known: dict[int, Any] = {}
        hidden: list[torch.Tensor] = []

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                # Subclasses and sparse tensors may not be what `clone` and arithmetic take them for.
                if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout != torch.strided:
                    raise TypeError(f"a {type(leaf).__name__} of layout {leaf.layout}")
                return change(leaf.detach())
            if is_plain(leaf) or callable(leaf) or isinstance(leaf, nn.Module):
                return leaf
            found = held_tensors(leaf)
            hidden.extend(found)
            # deepcopy refuses tensors with a graph. It finds these copies in its memo and takes them.
            known.update({id(each): change(each.detach()) for each in found if id(each) not in known})
            return copy.deepcopy(leaf, known)

        args, kwargs = transform((self.args, self.kwargs), copied, fresh=True, seen=SeenContainers())
        return CopiedInputs(args, kwargs, bool(hidden))


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
    """The coarsest precision of all that it computed: a forward may cast to bfloat16 inside and back again."""
    drew: bool
    """Whether it drew random numbers."""


def run_apart(module: nn.Module, forward: Forward, inputs: CopiedInputs, parameters: Parameters, way: Way) -> ModuleRun:
    """What the module gives; raises what it raises. Each run begins with the random state of now."""
    device = next((each.device for each in parameters.values()), torch.device("cpu"))
    given = inputs.changed(lambda value: (widened(value) if way.is_wide else value).clone())
    with (
        # The streams go on after a proof as before it. And since all ranks along tp draw from one stream, whole and cut
        # runs begin with the same numbers on every rank: what is drawn for a whole value is alike in both.
        aside(module) as has_drawn,
        # Under autocast a wide run would be rounded to half precision again.
        torch.autocast(device.type, enabled=False),
        NoDropout(),
        # What module.compile() made of it would be compiled anew for these parameters.
        run_eagerly(module),
        Observed(eps_of, max) as precision,
    ):
        _prepare(module, parameters, way)
        if not way.is_cut:
            forward = strip(module, forward)
        output = forward(*given.args, **given.kwargs)
        tensors = [each.detach() for each in tensors_in(output)]
        return ModuleRun(tensors, precision.value, has_drawn())


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
    wide: dict[torch.Tensor, torch.Tensor] = {}
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
        for name, buffer in each._buffers.items() if way.is_wide else ():
            if buffer is not None:
                each._buffers[name] = wide.setdefault(buffer, widened(buffer))
    if way.is_wide:
        # The casts of inputs to the dtype of parameters would undo the widening.
        stop_following(module)


class WatchedHook:
    """Stands for a hook of the program in one call of a model, and notes whether the hook changes a value."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.changes = False
        self.__module__ = package_of(hook)  # it is the program's for whoever asks

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        """What the hook gives."""
        before = tensors_in(given)
        # What another stage of a pipeline has is not there.
        seen = [(each, _num_writes(each), Content(each)) for each in before if not has_torch_function_unary(each)]
        try:
            answer = self.hook(module, *given)
        except Exception:
            self.changes = True  # does the whole module raise it too?
            raise
        after = tensors_in(given)
        is_as_before = len(after) == len(before) and all(map(operator.is_, after, before))
        is_given = answer is None or answer is given[-1]  # what it looked at, passed on
        is_written = any(_num_writes(each) != count or not content.holds_for(each) for each, count, content in seen)
        if is_written or not (is_given and is_as_before):
            self.changes = True
        return answer


@contextmanager
def hooks_watched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, hooks of the program on `modules` are `WatchedHook`; what `module.compile()` made has them compiled."""
    placed: list[tuple[MutableMapping[int, Any], int, WatchedHook]] = []
    modules = list(modules)
    for each in () if any(map(is_compiled, modules)) else modules:
        for hooks in (forward_pre_hooks(each), forward_hooks(each)):
            placed += [(hooks, number, WatchedHook(hook)) for number, hook in hooks.items() if _is_programs(hook)]
    for hooks, number, watched in placed:
        hooks[number] = watched
    try:
        yield
    finally:
        for hooks, number, watched in placed:
            if hooks.get(number) is watched:  # a hook may take itself off
                hooks[number] = watched.hook


def watched_hooks(module: nn.Module) -> list[WatchedHook]:
    """Those of one module."""
    every = (*forward_pre_hooks(module).values(), *forward_hooks(module).values())
    return [each for each in every if isinstance(each, WatchedHook)]


def _num_writes(tensor: torch.Tensor) -> int:
    """As far as torch counts them, which it does not in inference mode."""
    return 0 if tensor.is_inference() else version_of(tensor)


def _is_programs(hook: object) -> bool:
    return package_of(hook) not in ("torch", "shardwise")


def _is_kept(hook: Any, way: Way) -> bool:
    """Hooks of torch (normed weights) and ours belong to the module, and those of the program that change a value.

    Others look at the calls of a program. In training mode nothing is drawn to split streams: it would look as if the
    module had drawn.
    """
    if isinstance(hook, WatchedHook):
        return hook.changes
    # A split draws one number from the stream around (see `engine.randomness`).
    if way.trains and isinstance(getattr(hook, "__self__", hook), StreamSplit):
        return False
    return not _is_programs(hook)


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


def counterpart(
    cut: torch.Tensor, whole: torch.Tensor, sizes: Sequence[tuple[int, ...]], rank: int
) -> tuple[torch.Tensor | None, bool]:
    """What a tensor of the cut module is compared with, and whether that is a part of the whole one.

    sizes: its shapes on all ranks. None: it is neither of the whole one's shape, nor the part of this rank.
    """
    if len({*sizes, tuple(whole.shape)}) == 1:
        return whole, False
    dims = [dim for dim, size in enumerate(whole.shape) if cut.dim() == whole.dim() and cut.shape[dim] != size]
    if len(dims) == 1 and all(len(each) == whole.dim() for each in sizes):
        (dim,) = dims
        along = [each[dim] for each in sizes]
        if sum(along) == whole.shape[dim]:
            return whole.narrow(dim, sum(along[:rank]), along[rank]), True
    return None, False


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
