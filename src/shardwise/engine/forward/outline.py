"""The tree of the modules of a model, and the module in whose code something was raised."""

from collections.abc import Iterator
from types import FrameType, TracebackType

from torch import nn

from shardwise.engine.forward.layers import has_own_forward, is_compiled
from shardwise.engine.torch_private import ORIGINAL_MODULE
from shardwise.errors import ModelError
from shardwise.plan import Outline


def outline_of(model: nn.Module, *, asks: str = "a pipeline") -> Outline:
    """The tree of the modules of `model`. A module that is reached by several names is listed where it is met first.

    A compiled module has no modules inside: it can be placed only whole. Raises ModelError where the model is one.
    `asks`: who looks at its modules, in that error.
    """
    if is_closed(model):
        raise ModelError(
            f"the {type(model).__name__} given is compiled as a whole, and {asks} cannot look inside. Compile the "
            "modules in it (for layer in model.layers: layer.compile()), and leave the model itself as it is"
        )
    names: dict[nn.Module, list[str]] = {}
    for name, module in named_modules(model):
        names.setdefault(module, []).append(name)
    return _outline(model, "", names, set())


def named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module by every name."""
    yield name, module
    for key, child in () if is_closed(module) else module._modules.items():
        if child is not None:
            yield from named_modules(child, f"{name}.{key}" if name else key)


def _outline(module: nn.Module, name: str, names: dict[nn.Module, list[str]], listed: set[int]) -> Outline:
    """The outline of a module that is met first as `name`. `listed`: the parameters met so far, by id."""
    closed = is_closed(module)
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
        is_container=type(module).forward is nn.Module.forward and not has_own_forward(module),
        children=tuple(children),
        own_parameters=tuple(own_parameters),
        aliases=tuple(names[module][1:]),
        # torch's own modules with modules inside (MultiheadAttention, TransformerEncoderLayer) use the parameters of
        # these without calling them, or take a fused path: cut apart they would not run as one.
        is_indivisible=bool(module._modules)
        and type(module).__module__.startswith("torch.nn.modules")
        and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict),
    )


def is_closed(module: nn.Module) -> bool:
    """Whether the modules inside are not called as modules, because they are compiled into one."""
    return is_compiled(module) or ORIGINAL_MODULE in module._modules  # module.compile, torch.compile


def innermost_module(model: nn.Module, traceback: TracebackType | None) -> tuple[str, nn.Module, FrameType] | None:
    """The module of `model` in whose code an error was raised, by name, with its frame."""
    # The traceback runs from the outside in, so the last frame whose `self` is a module of the model is the innermost.
    names = {module: name for name, module in model.named_modules()}
    innermost = None
    while traceback is not None:
        each = traceback.tb_frame.f_locals.get("self")
        if isinstance(each, nn.Module) and each in names:
            innermost = names[each], each, traceback.tb_frame
        traceback = traceback.tb_next
    return innermost
