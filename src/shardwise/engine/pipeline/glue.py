"""The code between placed modules: it runs on every rank, and its operations on the ranks of their operands.

An operation on values of stages is executed on the latest stage among them, to which the others are sent. Elsewhere
only shape and dtype of its result are inferred. Operations on plain tensors (ids, masks, position tables), which all
ranks have, are executed by all. What reads elements is executed on one rank, which announces the answer: the others
wait for it there, and all go on with the same number.

    torch.add(h, g)    h on stage 0, g on stage 1     executed on stage 1; h crosses; inferred elsewhere
    h.shape[0]         any stage                      answered on all ranks from the description
    x[:, :1] > 0       x in the batch                 executed on all ranks
    h.item()           any stage                      executed there, and announced to all ranks
    h.data_ptr()       any stage                      refused on all ranks
    block(h)           a placed module                executed on its stage; operations inside it do not come here
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from shardwise.comm.local_tensors import is_dense
from shardwise.comm.nested_values import named_leaves, tensors_in, transform
from shardwise.engine.forward.batches import Microbatch, MicrobatchLoss, See
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.forward.transforms import INSIDE_A_MODULE, functions_seen, refusal_of_transformed
from shardwise.engine.pipeline.calls import Executor, Inside
from shardwise.engine.pipeline.infer import Inference
from shardwise.engine.pipeline.nested import outermost_method, user_site
from shardwise.engine.pipeline.stage_tensor import Spec, StageTensor, StageValue
from shardwise.engine.pipeline.staged_calls import ForeignParameters, PlacedModule, StagedOperation
from shardwise.engine.pipeline.stages import Stages
from shardwise.engine.pipeline.transfers import MicrobatchFlow
from shardwise.engine.torch_private import (
    CALL_METHODS,
    VERSION,
    function_mode_at,
    function_modes,
    is_transformed,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
)
from shardwise.errors import BatchError, ModelError

LossOf = Callable[..., MicrobatchLoss]
"""f(microbatch, see), see `LossOfModel.measured`."""
_Result = TypeVar("_Result")
_Tensor = torch.Tensor


# A torch function mode gets properties as the bound `__get__` of their descriptor. Each access makes a new object of
# it: sets and `==` compare these by what they are bound to, `is` would never hold.
def _getters(*names: str) -> set[Any]:
    """Properties and methods of tensors by name, as far as this torch has them, and functions of the same name."""
    found: set[Any] = set()
    for name in names:
        attribute = getattr(_Tensor, name, None)
        if attribute is not None:
            found.add(attribute.__get__ if not callable(attribute) else attribute)
        if callable(function := getattr(torch, name, None)):
            found.add(function)
    return found


_STRIDES = _getters("stride", "is_contiguous", "dim_order")
_SHAPES = _STRIDES | _getters("shape", "size", "numel", "nelement", "__len__", "nbytes")
_KINDS = _getters(
    *("dtype", "ndim", "dim", "ndimension", "layout", "is_floating_point", "is_complex", "is_signed", "element_size"),
    *("itemsize", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_conj", "is_neg", "is_inference"),
    *("is_mkldnn", "names", "has_names"),
)
_DEVICES = _getters("device", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_mtia", "is_xla", "get_device")
_REQUIRES_GRAD: Any = _Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD: Any = _Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_IS_LEAF: Any = _Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_ITERATION: Any = _Tensor.__iter__
_DESCRIPTIONS = _SHAPES | _KINDS | _DEVICES | {_REQUIRES_GRAD, _IS_LEAF}
_ARRAYS = _getters("numpy", "__array__")
_READS = _ARRAYS | _getters(
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "__contains__"),
    *("__repr__", "__format__", "equal", "allclose"),
)
"""Give numbers and texts of the elements, which all ranks can have."""
_MEMORIES = _getters(
    *("data_ptr", "untyped_storage", "storage", "__reduce_ex__", "__deepcopy__", "__dlpack__", "share_memory_")
)
_BY_SHAPE = _getters(
    *("unbind", "chunk", "split", "unsafe_chunk", "unsafe_split", "tensor_split", "hsplit", "vsplit", "dsplit"),
    *("squeeze", "squeeze_", "squeeze_copy", "unbind_copy"),
)
"""Give as many tensors, or dims, as the shape of their input says."""
_GRAPH = _getters(
    "backward", "register_hook", "retain_grad", "register_post_accumulate_grad_hook", "grad", "grad_fn", VERSION
) | {torch.autograd.grad, torch.autograd.backward}
_ANSWERS: dict[Any, Callable[[Spec], Any]] = {
    function: answer
    for name, answer in (
        ("shape", lambda spec: torch.Size(spec.shape)),
        ("size", lambda spec: torch.Size(spec.shape)),
        ("numel", lambda spec: math.prod(spec.shape)),
        ("dim", lambda spec: len(spec.shape)),
        ("ndim", lambda spec: len(spec.shape)),
        ("dtype", lambda spec: spec.dtype),
    )
    for function in _getters(name)
}
"""What programs ask most often, without arguments."""
_RANDOM = _getters(
    *("bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_", "random_", "exponential_"),
    *("geometric_", "log_normal_", "cauchy_", "rand_like", "randn_like", "randint_like", "poisson", "dropout"),
    *("alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu", "rrelu_"),
) | {
    getattr(functional, name)
    for name in dir(functional)
    if "dropout" in name or name in ("rrelu", "gumbel_softmax", "scaled_dot_product_attention")
}


_WORDS = {"__reduce_ex__": "pickle", "__deepcopy__": "copy.deepcopy", "__dlpack__": "dlpack"}
"""The words of a program that call these methods."""


def _refuse_layouts(part: Microbatch) -> None:
    """Raise BatchError for what has no strides: every stage describes tensors by them."""
    for name, leaf in named_leaves(part):
        if isinstance(leaf, _Tensor) and not is_dense(leaf) and leaf.layout not in (torch.sparse_coo, torch.jagged):
            raise BatchError(
                f"the batch's entry {name!r} is a {'nested' if leaf.is_nested else leaf.layout} tensor, which pipeline "
                f"stages cannot describe to each other. Give a {'jagged' if leaf.is_nested else 'sparse_coo'} one "
                f"({'layout=torch.jagged' if leaf.is_nested else 'to_sparse_coo()'}), or its parts as dense tensors"
            )


# A mode, and not only `StageTensor.__torch_function__`: parameters of placed modules and plain tensors that took
# values of a stage are of no class of ours, and an operation on them alone concerns a stage too.
class Glue(TorchFunctionMode):
    """Sees every torch function that is called between placed modules."""

    def __init__(self, stages: Stages, inference: Inference, random: KeyedRandom) -> None:
        super().__init__()
        self.flow: MicrobatchFlow | None = None
        """The microbatch that this rank works on."""
        self.inside: Inside | None = None
        """A call is executed on this rank, or tried: its tensors are plain ones."""
        self.executor = Executor(
            inference=inference, random=random, foreign=ForeignParameters(stages.model), aside=self.aside
        )
        self._stages = stages

    @contextmanager
    def current(self, flow: MicrobatchFlow) -> Iterator[None]:
        """This rank works on a microbatch, and draws from its stream."""
        outer, self.flow = self.flow, flow
        try:
            with flow.stream or nullcontext():  # in backward too: activations may be recomputed
                yield
        finally:
            self.flow = outer

    def run(self, compute: Callable[..., _Result], part: Microbatch, *more: Any) -> _Result:
        """The result of the user's program for a microbatch; it calls the model's forward."""
        _refuse_layouts(part)
        with self, functions_seen(self):
            result = compute(part, *more)
        self._refuse_kept_values()
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the thread is in its other modes only."""
        stack = function_modes()
        if self not in stack:
            yield
            return
        _only(each for each in stack if each is not self)
        try:
            yield
        finally:
            push_function_mode(self)

    def showing(self, see: See) -> See:
        """For the program, which runs on all ranks: shows an output on the rank that has the values in it."""

        def show(output: Any, part: Microbatch) -> None:
            flow = self.flow
            assert flow is not None
            adopted = transform(output, lambda leaf: flow.adopted(leaf) if isinstance(leaf, _Tensor) else leaf)
            staged = [each for each in tensors_in(adopted) if isinstance(each, StageTensor)]
            # An output without such values is the same on all ranks. Of several stages, the latest gets all of it.
            stage = max((each.value.stage for each in staged), default=0)
            with self.off():
                moved = iter([flow.to_stage(each, stage) for each in staged])
            if self._stages.is_local(stage):
                with self.aside(Inside(stage)):
                    see(transform(adopted, lambda leaf: next(moved).local if type(leaf) is StageTensor else leaf), part)

        return show

    def _refuse_kept_values(self) -> None:
        """Values of a stage must not outlive their forward as buffers of modules that all ranks have."""
        for name, module, key in self._stages.buffers_of_all:
            if isinstance(buffer := module._buffers.get(key), StageTensor):
                value = buffer.value
                raise ModelError(
                    f"the forward put a tensor that {value.maker!r} made on stage {value.stage} into the buffer "
                    f"{key!r} of {name}. That module runs on all ranks; place it on a stage"
                )

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.on_call(func, args, kwargs or {})

    def off(self) -> AbstractContextManager[None]:
        """Operations of shardwise itself do not go through here."""
        return _Off(self, self.inside)

    def aside(self, inside: Inside) -> AbstractContextManager[None]:
        """A placed module runs: nothing stands between it and torch."""
        return _Off(self, inside)

    @property
    def is_inside(self) -> bool:
        """Whether a call is executed on this rank, or tried."""
        return self.inside is not None

    def on_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call: plain, or values of the stage that it is executed on."""
        flow = self.flow
        # Inside a placed module all tensors are real, for its arguments were exchanged for them. A value that is
        # still found there came in inside an object of an unknown class.
        if flow is None or self.inside is not None:
            if _holds_stage_tensor(args) or (kwargs and _holds_stage_tensor(kwargs)):
                self._refuse_inside(func)
            return func(*args, **kwargs)
        if not self._concerns(args) and not (kwargs and self._concerns(kwargs)):
            return func(*args, **kwargs)
        if is_transformed():
            raise refusal_of_transformed(
                f"{getattr(func, '__name__', func)!r} takes a value of a stage", INSIDE_A_MODULE
            )
        # Descriptions are answered here, without a call that all ranks count: programs ask for shapes and dtypes
        # everywhere, and the answer is the same on all ranks.
        first = flow.adopted(args[0]) if args and isinstance(args[0], _Tensor) else None
        if isinstance(first, StageTensor):
            if func in _DESCRIPTIONS:
                return self._describe(func, first, args[1:], kwargs)
            if func == _ITERATION:
                # As a call it would give an iterator, an object that other ranks cannot look into.
                return iter(self.on_call(_Tensor.unbind, (first, 0), {}))
            if func in _BY_SHAPE:
                flow.shape_known(first)  # all ranks rely on these numbers
            func = _Tensor.requires_grad_ if func == _SET_REQUIRES_GRAD else func
        if func in _READS:
            return self._read(flow, func, args, kwargs)
        if func in _MEMORIES or func in _GRAPH:
            self._refuse_access(func, args, kwargs)
        return self.executor.execute(flow, StagedOperation(func, draws=func in _RANDOM), None, args, kwargs)

    def on_module(self, unit: PlacedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a placed module that is called between the others, or inside of one of its stage."""
        flow = self.flow
        if flow is None:
            advice = advice_on_loops(self._stages.model) or "call the model through these"
            raise ModelError(
                f"{unit.name!r} is called outside of engine.step, evaluate, predict and generate, and its stage "
                f"{unit.stage} may be on another rank; {advice}"
            )
        if self.inside is not None:
            # The stage decides, not the rank that has it: all ranks try the call, and have to see the same.
            if unit.stage == self.inside.stage or unit.module in self.inside.lent:
                return unit.run_inside(self.inside.fakes, args, kwargs, self.inside.lent)
            raise ModelError(
                f"{unit.name!r}, on stage {unit.stage}, is called inside a module of another stage, after "
                f"{flow.last!r}; place both on one stage"
            )
        if is_transformed():
            raise refusal_of_transformed(f"{unit.name!r}, on stage {unit.stage}, is called", INSIDE_A_MODULE)
        with self.off():
            return self.executor.execute(flow, unit, unit.stage, args, kwargs)

    def on_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a custom autograd function that is called between placed modules."""
        # As torch calls a mode: without it on the stack.
        with self.off():
            return self.on_call(func, args, kwargs)

    def _describe(
        self, func: Callable[..., Any], tensor: StageTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The answer to a question about a value that all ranks can give."""
        flow = tensor.flow
        spec = flow.shape_known(tensor) if func in _SHAPES else tensor.value.spec
        if not args and not kwargs and (answer := _ANSWERS.get(func)) is not None:
            return answer(spec)
        if func == _REQUIRES_GRAD:
            return spec.requires_grad
        if func == _IS_LEAF:
            return spec.is_leaf
        # A tensor of the meta device, as below, would give "meta". Values of a stage have the device of all real
        # tensors.
        if func in _DEVICES:
            return func(torch.empty(0, dtype=spec.dtype, device=flow.device), *args, **kwargs)
        local = tensor.value.local
        # The fake kernel laid the value out otherwise than the real one did. The owner would decide by its own
        # strides and the other ranks by the description: two programs. It alone knows, and raises for all.
        if func in _STRIDES and local is not None and not spec.has_strides_of(Spec.of(local)):
            raise ModelError(
                f"{user_site()}: this asks for the strides of a value {_provenance(tensor.value)} on stage "
                f"{tensor.value.stage}. They are {local.stride()}, but {spec.stride} on other stages; do it inside a "
                "module that is placed on a stage"
            )
        # A meta tensor of the same description answers every other question as torch would, without a list of
        # answers here.
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        return func(spec.flagged(made), *args, **kwargs)

    def _concerns(self, nested: Any) -> bool:
        flow = self.flow
        assert flow is not None
        for each in nested.values() if type(nested) is dict else nested:
            if isinstance(each, _Tensor):
                if flow.stands_for_value(each):
                    return True
            elif type(each) in (tuple, list, dict) and self._concerns(each):
                return True
        return False

    def _read(
        self, flow: MicrobatchFlow, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The answer to a question about elements, which all ranks get from the rank that has them."""
        if flow.is_forward:  # where activations are computed again, other ranks do not count
            flow.num_reads += 1
            flow.first_read = flow.first_read or user_site()
        if func not in _ARRAYS:
            return self.executor.answer(flow, StagedOperation(func, draws=False), args, kwargs)
        # As bytes, which make an array that cannot be written to: the value would not show it on any other rank.
        kind, shape, content = self.executor.answer(flow, StagedOperation(_parts_of(func), draws=False), args, kwargs)
        return np.frombuffer(content, np.dtype(kind)).reshape(shape)

    def _refuse_access(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flow = self.flow
        assert flow is not None
        value = next(
            each.value for each in map(flow.adopted, _tensors((args, kwargs))) if isinstance(each, StageTensor)
        )
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if func in _GRAPH:
            what = f"asks for the graph of a value ({name})"
            advice = (
                "Backward is run by step(). Put hooks that look at gradients on modules inside a placed one, and "
                "torch.autograd.grad into the forward of one, around all that it goes through"
            )
        else:
            what = f"asks for the memory of a value ({_WORDS.get(name, name)})"
            advice = "Do it inside a module that is placed on a stage. Numbers may be read: item(), tolist(), numpy()"
        raise ModelError(
            f"{user_site()}: this {what} {_provenance(value)} on stage {value.stage}. Only the rank of that stage has "
            f"it, and all ranks run this line. {advice}"
        )

    def _refuse_inside(self, func: Callable[..., Any]) -> None:
        name = getattr(func, "__name__", str(func))
        if self.flow is None:
            raise ModelError(
                f"{user_site()}: {name} on a value of a stage after its forward has ended; compute it in the model or "
                "in the loss function"
            )
        raise ModelError(
            f"{user_site()}: {name}, in {self.flow.last!r}, got a value of a stage that did not come into that placed "
            "module by its arguments: it is in an object, a container that a module keeps, or a closure. Pass it to "
            "the module's call, in a tuple, list, dict or dataclass; or place one module around what makes it and this"
        )


# A class, not a generator: it is entered twice for each call of a module.
class _Off:
    """The glue sees no operations in the body."""

    __slots__ = ("_glue", "_inside", "_is_on_top", "_was_inside")

    def __init__(self, glue: Glue, inside: Inside | None) -> None:
        self._glue = glue
        self._inside = inside

    def __enter__(self) -> None:
        # Modes are a stack, and a mode of the user's may stand above the glue, which then cannot be taken out.
        # Operations still come to it in that case, and `inside` lets them pass.
        glue = self._glue
        count = num_function_modes()
        self._is_on_top = count > 0 and function_mode_at(count - 1) is glue
        if self._is_on_top:
            pop_function_mode()
        self._was_inside, glue.inside = glue.inside, self._inside

    def __exit__(self, *_: object) -> None:
        self._glue.inside = self._was_inside
        if self._is_on_top:
            push_function_mode(self._glue)


def advice_on_loops(model: nn.Module) -> str:
    """Advice where another method of the model than its forward is running (generate, say); else empty."""
    method = outermost_method(model)
    if method in ("", "forward", *CALL_METHODS, "__call__"):
        return ""
    if method == "generate":
        return (
            "generate() decides by values between its calls of the model; engine.generate(inputs) runs it over stages"
        )
    return (
        f"{method}() decides by values, and cannot run over stages. Write its loop around engine.predict, which gives "
        "every rank the tensors of each turn. Or call it inside `with engine.whole():`, where the model has no stages"
    )


def _only(modes: Iterable[TorchFunctionMode]) -> None:
    """Let the thread be in these modes."""
    kept = list(modes)
    for _ in function_modes():
        pop_function_mode()
    for each in kept:
        push_function_mode(each)


def _parts_of(func: Callable[..., Any]) -> Callable[..., tuple[str, tuple[int, ...], bytes]]:
    """What the array is made of that a function gives."""

    @wraps(func)  # ranks compare the names of calls
    def parts(*args: Any, **kwargs: Any) -> tuple[str, tuple[int, ...], bytes]:
        array = func(*args, **kwargs)
        return array.dtype.str, array.shape, array.tobytes()

    return parts


def _provenance(value: StageValue) -> str:
    if value.maker == value.module:
        return f"that {value.module!r} made"
    return f"that {value.maker!r} made of {value.module!r}"


def _holds_stage_tensor(nested: Any) -> bool:
    return any(type(each) is StageTensor for each in _tensors(nested))


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    for each in nested.values() if isinstance(nested, dict) else nested:
        if isinstance(each, _Tensor):
            yield each
        elif isinstance(each, tuple | list | dict):
            yield from _tensors(each)
