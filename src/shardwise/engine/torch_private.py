"""Private names of torch that the engine uses: what each one is for, and why no public name does it.

Any release of torch may change them; tests/engine/test_torch_private.py says what breaks then. What is asked in every
operation or call of a module is torch's own function, or a getter in C: no call of Python stands around it.

Three kinds stay where they are used. `_parameters`, `_modules` and `_buffers` of modules: every library around torch
reads them. `torch._foreach_*`: torch documents them. Names of operators of ATen: they are data, in tables of rules.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import attrgetter
from types import CodeType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch._functorch import eager_transforms, predispatch, pyfunctorch
from torch._subclasses import fake_tensor
from torch.autograd import function as autograd_function
from torch.nn.modules import batchnorm
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils, _python_dispatch, _pytree

# Values in nests: `torch.utils` has no public module for them.

tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only


def tensor_leaves(values: object) -> list[torch.Tensor]:
    """The tensors in a nest."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


# Modes: public are the classes of function modes, and to enter and leave them.

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees the operations of a thread; torch documents it under this private path."""
is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor is one around others: `__tensor_flatten__` alone does not say so of its class."""
FakeTensor = fake_tensor.FakeTensor
"""A tensor with a device and without values: a tensor on the meta device says that it is there."""
FakeTensorMode = fake_tensor.FakeTensorMode
DisableTorchFunction = torch._C.DisableTorchFunction
"""A context: neither modes nor classes of tensors answer for functions of torch."""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""A context: classes of tensors do not answer; modes do."""
# To push and pop is not to enter and leave: a mode of the user may begin to count anew when it is entered.
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
# In C: asked around each call of a placed module.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
push_dispatch_mode = _python_dispatch._push_mode
pop_dispatch_mode = _python_dispatch._pop_mode
without_dispatch_modes: Callable[[], AbstractContextManager[object]] = _python_dispatch._disable_current_modes
"""Inside, no mode of the thread sees operations."""

# Operators of ATen: `str(operator)` is public, and what it takes and writes is not.

Operator = torch._ops.OpOverload
"""The class of `torch.ops.aten.add.Tensor`."""
schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The arguments of an operator, and which of them it writes to."""


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(operator).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    return [args[at] if at < len(args) else kwargs.get(key) for at, key in _written_arguments(operator)]


# Tensors

VERSION = "_version"
version_of: Callable[[torch.Tensor], int] = attrgetter(VERSION)
"""How often torch has counted a write to a tensor, or to one that shares its memory."""
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Tells storages apart. Addresses of memory do not: they change with its size, and are 0 on the meta device."""


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share their memory."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    number: int = storage_id(tensor.untyped_storage())
    return number


BASE = "_base"
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter(BASE)
"""The tensor that one is a view of, for autograd."""
IS_VIEW = "_is_view"
BACKWARD_HOOKS = "_backward_hooks"
backward_hooks: Callable[[torch.Tensor], MutableMapping[int, Any] | None] = attrgetter(BACKWARD_HOOKS)
"""Those of `register_hook`, by number: torch shows nobody the hooks that a tensor has."""
GRADIENT_HOOKS = "_post_accumulate_grad_hooks"
gradient_hooks: Callable[[torch.Tensor], OrderedDict[int, Any] | None] = attrgetter(GRADIENT_HOOKS)
"""Those of `register_post_accumulate_grad_hook`."""
make_subclass = torch.Tensor._make_subclass
"""A tensor of a class with the memory of another; constructors of parameters' classes take what they like."""
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""A tensor of a class without memory, on any device."""


def flagged(tensor: torch.Tensor, *, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """The tensor, whose elements are read conjugated or negated, or not. `conj()` makes a view, which autograd sees."""
    torch._C._set_conj(tensor, is_conj)
    torch._C._set_neg(tensor, is_neg)
    return tensor


assert_on_device = torch._assert_async
"""Have the device stop where a number is false; the host does not wait for it."""
group_by_device_and_dtype = _foreach_utils._group_tensors_by_device_and_dtype
"""The groups, and their order, in which torch adds up norms of gradients."""


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Let `isinstance(tensor, nn.Parameter)` hold for one of another class: nn.Parameter(tensor) makes another one."""
    tensor._is_param = True


# Autograd

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, -1 outside of all: nothing public tells a recomputation."""
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Call a function at the end of the backward in this thread. A backward inside of another has its own end."""
AutogradFunction = autograd_function._SingleLevelFunction
"""What `torch.autograd.Function` inherits `apply` from: torch's compiler knows `Function.apply` itself."""
backward_class: Callable[[type[torch.autograd.Function]], type] = attrgetter("_backward_cls")
"""The class of the nodes that a function leaves in graphs; public are their names only."""
# The hooks around are asked for and called; public is only to put some on for a block.
top_saved_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost pair of hooks of saved tensors, or None. True: also while something is traced."""
push_saved_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def on_gradient(tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
    """Call `do` with the gradient of a tensor that an operation gave, as `tensor.register_hook` does."""
    if type(tensor) is not torch.Tensor:
        tensor.register_hook(do)
    elif (hooks := tensor._backward_hooks) is None:
        # What torch does there, but for a handle to take the hook off again: it costs twice as much as the hook.
        # Handles have small numbers as keys, and no addresses.
        tensor._backward_hooks = OrderedDict({id(do): do})
        tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    else:
        hooks[id(do)] = do


# torch.func: it says nowhere that a function is transformed, and lets nobody stand around its beginning.

# Asked at each operation and each call of a unit.
is_transformed: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
"""Whether what runs now is a function that torch.func transforms: tensors are wrapped, and have no memory."""
is_wrapped_by_transformation: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
transformations_left: Callable[[], AbstractContextManager[object]] = pyfunctorch.temporarily_clear_interpreter_stack
"""Inside, what runs is no part of a function that is transformed."""


def stand_around_transformations(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace, in this process, what takes a tensor into a derivative of torch.func, and into vmap."""
    eager_transforms._wrap_for_grad = around(eager_transforms._wrap_for_grad)  # type: ignore[attr-defined]
    predispatch._add_batch_dim_impl = around(predispatch._add_batch_dim_impl)  # type: ignore[attr-defined]


# The compiler: `torch.compiler.disable` wraps a function, and loads the compiler, which takes seconds.

COMPILER = "torch._dynamo"
"""In `sys.modules` once something may be compiled."""


def skip_code(code: CodeType) -> None:
    """Keep the compiler, which is loaded, from a function by its code."""
    sys.modules[COMPILER].eval_frame.skip_code(code)


ORIGINAL_MODULE = "_orig_mod"
"""The name of the module inside of what torch.compile(module) gives; names of parameters have it, too."""
COMPILED_CALL = "_compiled_call_impl"
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = attrgetter(COMPILED_CALL)
"""What `module.compile()` made of the whole call; torch runs it in the place of the forward and the hooks."""

# Modules: torch takes hooks, and shows nobody those that it has.

CALL_METHODS = ("_wrapped_call_impl", "_call_impl")
"""The methods behind `module(...)`, in tracebacks and stacks."""
CALL_CODE = nn.Module._call_impl.__code__
"""That of every call of a module, on the stack."""
FORWARD_HOOKS = "_forward_hooks"
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
forward_hooks: Callable[[nn.Module], MutableMapping[int, Any]] = attrgetter(FORWARD_HOOKS)
forward_pre_hooks: Callable[[nn.Module], MutableMapping[int, Any]] = attrgetter(FORWARD_PRE_HOOKS)
hooks_with_keywords: Callable[[nn.Module], Mapping[int, bool]] = attrgetter("_forward_hooks_with_kwargs")
"""The numbers of the forward hooks that are given keywords."""
hooks_of_all_forwards: Mapping[int, Any] = modules._global_forward_hooks
hooks_before_all_forwards: Mapping[int, Any] = modules._global_forward_pre_hooks
HOOKS_OF_MODULES = frozenset(
    name for name, held in vars(nn.Module()).items() if name.endswith("_hooks") and held is not None
)
"""The attributes in which a module has its hooks."""
state_dict_pre_hooks: Callable[[nn.Module], MutableMapping[int, Any]] = attrgetter("_state_dict_pre_hooks")
load_state_dict_pre_hooks: Callable[[nn.Module], MutableMapping[int, Any]] = attrgetter("_load_state_dict_pre_hooks")
NOT_IN_FILES = "_non_persistent_buffers_set"
not_in_files: Callable[[nn.Module], set[str]] = attrgetter(NOT_IN_FILES)
"""The names of buffers that state dicts leave out: a state dict of the module would have to be made to see them."""
NormWithStatistics = batchnorm._NormBase
"""The class of torch's norms with running statistics, those of batches and of instances."""
TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
"""The function of `nn.init` that draws for `trunc_normal_`, which looks it up in each call."""


def check_input_of_norm(norm: nn.SyncBatchNorm, given: torch.Tensor) -> None:
    """Raise what the norm raises for an input of a wrong shape: its forward would compute, too."""
    norm._check_input_dim(given)


def change_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Do what `module.to` does with another change; some classes hold tensors that only they know."""
    module._apply(change)


def loads_as_torch_does(module: nn.Module) -> bool:
    """Whether its class leaves the loading of a state dict as it is."""
    return type(module)._load_from_state_dict is nn.Module._load_from_state_dict


def load_alone(module: nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Load a state into a module without those inside; the errors. `load_state_dict` would call hooks of the user."""
    errors: list[str] = []
    module._load_from_state_dict(state, "", {"version": module._version}, False, [], [], errors)
    return errors


@contextmanager
def parametrizations_uncached() -> Iterator[None]:
    """Inside, nothing is known of the weights that `parametrize.cached()` around has kept."""
    kept, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = kept


SetValues: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]


def stand_around_set(around: Callable[[SetValues], SetValues]) -> None:
    """Replace, in this process, what puts the values of a parametrization into the original parameter."""
    parametrize._maybe_set = around(parametrize._maybe_set)  # type: ignore[assignment]


# Optimizers

hooks_before_all_steps: Mapping[int, Any] = optimizers._global_optimizer_pre_hooks
hooks_after_all_steps: Mapping[int, Any] = optimizers._global_optimizer_post_hooks
TAKES_SCALE = "_step_supports_amp_scaling"
"""An attribute of optimizers: GradScaler calls their step without a look at gradients, and True: with the scale."""
OF_SCHEDULERS = "_wrapped_by_lr_sched"
"""An attribute of the function that a learning-rate scheduler puts around `step`."""
OPTIMIZER_HOOKS = "_optimizer_"
"""What the names of the attributes begin with in which an optimizer has its hooks."""

_Default = TypeVar("_Default")


def optimizer_hooks(
    optimizer: torch.optim.Optimizer, kind: str, default: _Default
) -> MutableMapping[Any, Callable[..., Any]] | _Default:
    """The hooks of `register_<kind>_hook`; the default in a class that left out Optimizer.__init__."""
    hooks: MutableMapping[Any, Callable[..., Any]] | _Default = getattr(
        optimizer, f"{OPTIMIZER_HOOKS}{kind}_hooks", default
    )
    return hooks
