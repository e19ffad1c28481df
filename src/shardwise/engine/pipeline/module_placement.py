"""Where the modules of a model go: their tree, their work, and the placement that all ranks agree on.

`outline_of` gives the tree of modules, `count_work` the work of each and the order of their first calls. The placement
itself is a pure function of these (`plan.stages.place`).
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardwise.comm import Channel
from shardwise.comm.accelerators import random_numbers_kept, synchronize
from shardwise.comm.agreement import a_pair, agreed, understood
from shardwise.engine.batches import Batch, LossOfModel, first_microbatch
from shardwise.engine.held_meanwhile import attributes_set
from shardwise.engine.kept_objects import own_generators
from shardwise.engine.packed_tensors import PackedPlaces
from shardwise.errors import ModelError, PlanError
from shardwise.plan import Outline, Placement, Plan
from shardwise.plan.stages import place

_NUM_TIMED_RUNS = 3


def outline_of(model: nn.Module, *, asks: str = "a pipeline") -> Outline:
    """The tree of the modules of `model`. A module that is reached by several names is listed where it is met first.

    A compiled module has no modules inside: it can be placed only whole. Raises ModelError where the model is one.
    `asks`: who looks at its modules, in that error.
    """
    if _is_closed(model):
        raise ModelError(
            f"the {type(model).__name__} given is compiled as a whole, and {asks} cannot look inside. Compile the "
            "modules in it (for layer in model.layers: layer.compile()), and leave the model itself as it is"
        )
    names: dict[nn.Module, list[str]] = {}
    for name, module in _named_modules(model):
        names.setdefault(module, []).append(name)
    return _outline(model, "", names, set())


def _named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module by every name."""
    yield name, module
    for key, child in () if _is_closed(module) else module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{name}.{key}" if name else key)


def _outline(module: nn.Module, name: str, names: dict[nn.Module, list[str]], listed: set[int]) -> Outline:
    """The outline of a module that is met first as `name`. `listed`: the parameters met so far, by id."""
    closed = _is_closed(module)
    own_parameters = []
    # A parameter of several modules counts where it is met first: it is one parameter, and one stage owns it.
    for key, parameter in module.named_parameters(name, recurse=closed, remove_duplicate=False):
        own_parameters.append((key, 0 if id(parameter) in listed else parameter.numel()))
        listed.add(id(parameter))
    children = []
    for key, child in () if closed else module._modules.items():
        child_name = f"{name}.{key}" if name else key
        if child is not None and names[child][0] == child_name:
            children.append(_outline(child, child_name, names, listed))
    return Outline(
        name=name,
        kind=type(module).__name__,
        is_container=type(module).forward is nn.Module.forward and "forward" not in vars(module),
        children=tuple(children),
        own_parameters=tuple(own_parameters),
        aliases=tuple(names[module][1:]),
        # torch's own modules with modules inside (MultiheadAttention, TransformerEncoderLayer) use the parameters of
        # these without calling them, or take a fused path: cut apart they would not run as one.
        is_indivisible=bool(module._modules)
        and type(module).__module__.startswith("torch.nn.modules")
        and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict),
    )


def _is_closed(module: nn.Module) -> bool:
    """Whether the modules inside are not called as modules, because they are compiled into one."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules  # module.compile, torch.compile


class _Flops(TorchDispatchMode):
    """Counts the floating-point operations of this thread; compiled modules run uncompiled meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch counts the others of its kind
            packet = torch.ops.aten._scaled_dot_product_flash_attention
        count = flop_registry.get(packet)
        if count is not None:
            try:
                self.total += count(*args, **kwargs, out_val=out)
            except Exception:  # torch 2.11 has none for attention with fewer heads of keys than of queries
                self.total += sum(each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor))
        return out


def count_work(
    model: nn.Module, call: Callable[[], object], *, kind: Literal["flops", "seconds"]
) -> tuple[dict[str, float], list[str]]:
    """The work of every module of `model` during `call()`, which runs it once, and the modules in order of first calls.

    `flops`: of one call. `seconds`: the median of three calls, after one to warm up. Both without gradients and in eval
    mode; random numbers and buffers are as before afterwards. A module's work holds that of all modules that it calls;
    one that is not called has 0.
    """
    named = dict(_named_modules(model))
    modules = {each.name: named[each.name] for each in outline_of(model).modules()}
    with torch.no_grad(), unchanged(model):
        # Dropout would draw numbers, and batch norm would write its statistics: the batch is for counting only.
        model.eval()
        if kind == "flops":
            with _Flops() as flops:
                runs = [_metered(modules, call, lambda: flops.total)]
        else:
            read = _clock(next((each.device for each in model.parameters()), torch.device("cpu")))
            # The first run pays for what happens once (compiling, choosing kernels, first allocations).
            runs = [_metered(modules, call, read) for _ in range(1 + _NUM_TIMED_RUNS)][1:]
    work = {name: median(run.get(name, 0) for run in runs) for name in modules}
    return work, list(runs[0])


def _metered(
    modules: Mapping[str, nn.Module], call: Callable[[], object], read: Callable[[], float]
) -> dict[str, float]:
    """By how much the reading advances in each module during `call()`; names in the order of first calls."""
    advanced: dict[str, float] = {}
    started: list[float] = []

    def start(name: str) -> None:
        advanced.setdefault(name, 0)
        started.append(read())

    def stop(name: str) -> None:
        advanced[name] += read() - started.pop()

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(calls_watched(module, partial(start, name), partial(stop, name)))
        call()
    return advanced


@contextmanager
def calls_watched(module: nn.Module, start: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call `start` before each call of the module and `stop` after it."""
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    if compiled is not None:  # hooks would be compiled too

        def timed(*args: Any, **kwargs: Any) -> Any:
            start()
            output = compiled(*args, **kwargs)
            stop()
            return output

        with attributes_set(module, {"_compiled_call_impl": timed}):
            yield
    else:
        before = module.register_forward_pre_hook(lambda *_: start())
        after = module.register_forward_hook(lambda *_: stop())
        try:
            yield
        finally:
            before.remove()
            after.remove()


def _clock(device: torch.device) -> Callable[[], float]:
    """Reads the time in seconds, when all that the device was given to do is done."""

    def read() -> float:
        # Kernels run on after they were issued: without this a module would cost its Python alone.
        synchronize(device)
        return time.perf_counter()

    return read


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undo the changes of a forward: modes, buffers, packed weights and the state of random generators."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, key, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
    ]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    packed = PackedPlaces(model)
    with random_numbers_kept(*devices, own=own_generators(model)):
        try:
            yield
        finally:
            packed.restore()
            for module, training in modes:
                module.training = training
            for module, key, buffer, values in buffers:
                # Versions do not tell: batch norm counts no write to its statistics.
                if buffer is not None and values is not None and not torch.equal(buffer, values):
                    buffer.copy_(values)
                module._buffers[key] = buffer


WHOLE = Placement(num_ranks=1, num_stages=1, modules={"": 0}, parameters={})
"""Of a model that is not cut."""


def agree_on_placement(
    model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch | None, channel: Channel
) -> Placement:
    """Place the modules of `model`, in the order in which `sample` runs through them where there is one.

    Where work decides, it is what rank 0 counts or measures on the sample.

    Raises PlanError, the same on all ranks.
    """
    if plan.mesh.pp * plan.pipeline.num_chunks == 1:
        return WHOLE
    purpose = "work of modules"
    with agreed(channel, purpose=purpose) as counted:
        measured: Any = [None, None]
        if plan.pipeline.stages is None:
            if sample is None and plan.pipeline.balance != "parameters":
                raise PlanError(
                    f"pipeline.balance: {plan.pipeline.balance!r} asked, which runs the model on a batch; give one: "
                    'parallelize(..., sample=batch), or balance by "parameters"'
                )
            if sample is not None and channel.rank == 0:
                measured = _measure(model, plan, loss, sample)
        counted.value = json.dumps(measured).encode()
    # Times differ from rank to rank: those of rank 0 hold.
    ((work, order),) = understood(counted.values[:1], a_pair, purpose=purpose)
    with agreed(channel, purpose="verdict on the placement"):
        return place(outline_of(model), plan.pipeline, num_ranks=plan.mesh.pp, work=work, order=order)


def _measure(
    model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch
) -> tuple[dict[str, float] | None, list[str]]:
    """Work and order of the modules, on one microbatch of the sample, on the device where the model was built."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    part = first_microbatch(sample, plan, device, loss.rows)
    balance = plan.pipeline.balance
    work, order = count_work(model, lambda: loss(part), kind="flops" if balance == "parameters" else balance)
    return None if balance == "parameters" else work, order
