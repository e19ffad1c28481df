"""Where an error comes from in a model that is cut along `tp`: the module, its rule, and what it works with."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.engine.wrapping import structures_of
from shardwise.errors import ShardwiseError
from shardwise.plan.tensor_plan import Style


@contextmanager
def module_noted(model: nn.Module) -> Iterator[None]:
    """Errors that come out of a module of `model` have a note about that module, where a plan cuts the model."""
    try:
        yield
    except ShardwiseError:
        raise  # its words name what they mean
    except Exception as error:
        if (note := note_on(model, error)) is not None:
            error.add_note(note)
        raise


def innermost_module(model: nn.Module, traceback: TracebackType | None) -> tuple[str, nn.Module, FrameType] | None:
    """The module of `model` in whose code an error was raised, by name, with its frame."""
    names = {module: name for name, module in model.named_modules()}
    innermost = None
    while traceback is not None:
        each = traceback.tb_frame.f_locals.get("self")
        if isinstance(each, nn.Module) and each in names:
            innermost = names[each], each, traceback.tb_frame
        traceback = traceback.tb_next
    return innermost


def note_on(model: nn.Module, error: Exception) -> str | None:
    """What is to be known of the module in which an error was raised; None where no rule cuts the model."""
    if not any(map(_rules, model.modules())):
        return None
    if (innermost := innermost_module(model, error.__traceback__)) is None:
        return None
    path, module, frame = innermost
    name = repr(path) if path else "the model itself"
    rules = _rules(module)
    said = f"with the style {' and '.join(map(repr, rules))}" if rules else "without a rule"
    given = [str(tuple(value.shape)) for value in _arguments(frame)]
    held = [f"{key} {tuple(each.shape)}" for key, each in module._parameters.items() if each is not None]
    return (
        f"shardwise: in {name} ({type(module).__name__}, {said} in tensor.rules), which was given "
        f"{', '.join(given) or 'no tensor'} and holds {', '.join(held) or 'no parameter'} on this rank along tp; a "
        "rule may be missing for it, or be wrong for it or for what comes before it"
    )


def _rules(module: nn.Module) -> list[str]:
    structures = tree_leaves(structures_of(vars(module).get("forward")))
    return [style.kind for style in structures if isinstance(style, Style)]


def _arguments(frame: FrameType) -> list[torch.Tensor]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
