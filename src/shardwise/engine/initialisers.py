"""Who initialises what: the calls that would give a model its first values, in the order in which it would make them.

Building `Model(Block(Linear))`, whose Model has `_init_weights(module)`, initialises like this:

    1 linear.reset_parameters()          a module, when it has been built: children first
    2 block.reset_parameters()
    3 model.reset_parameters()
    4 model._init_weights(linear)        then the model, which applies its own initialiser to all in it: children first
    5 model._init_weights(block)
    6 model._init_weights(model)

A module in it that has such an initialiser too comes in the place of 3 to 6, and keeps what it has initialised.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

OWN = ("reset_parameters", "_reset_parameters", "_init_weights")
"""What modules call the method, without arguments, that initialises themselves; the first one that fits is called."""
OF_ALL_WITHIN = "_init_weights"
"""What models call the method that initialises whatever module in them it is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Initialiser:
    """One call."""

    module: nn.Module
    """What it initialises."""
    key: str
    """The name of the module and of the method: what its random numbers depend on, beside the seed."""
    words: str
    """For messages."""
    call: Callable[[], object]

    @contextmanager
    def module_kept(self) -> Iterator[None]:
        """The module has the attributes afterwards that it has now: a method may note that it need not run again."""
        before = dict(vars(self.module))
        try:
            yield
        finally:
            vars(self.module).clear()
            vars(self.module).update(before)


def initialisers_of(names: dict[nn.Module, str], root: nn.Module) -> tuple[Initialiser, ...]:
    """The calls for `root` and all in it, in order. `names`: of the modules."""
    return tuple(_of_module(root, names, set(), set()))


def _of_module(
    module: nn.Module, names: dict[nn.Module, str], visited: set[nn.Module], done: set[nn.Module]
) -> Iterator[Initialiser]:
    if module in visited:
        return
    visited.add(module)
    for child in module.children():
        yield from _of_module(child, names, visited, done)
    for method in OWN:
        if (own := _method(module, method, num_arguments=0)) is not None:
            words = f"{method}() of {names[module] or 'the model'!r}"
            yield Initialiser(module=module, key=f"{names[module]} {method}", words=words, call=own)
            break
    if (of_all := _method(module, OF_ALL_WITHIN, num_arguments=1)) is not None:
        for each in _children_first(module, done):
            yield Initialiser(
                module=each,
                key=f"{names[each]} {OF_ALL_WITHIN} of its model",
                words=f"{OF_ALL_WITHIN}(module) of a {type(module).__name__} for {names[each] or 'the model'!r}",
                call=_Given(of_all, each),
            )


@dataclass(frozen=True, slots=True)
class _Given:
    """A call with its argument."""

    method: Callable[..., object]
    module: nn.Module

    def __call__(self) -> None:
        self.method(self.module)


def _children_first(module: nn.Module, done: set[nn.Module]) -> Iterator[nn.Module]:
    if module in done:
        return
    done.add(module)
    for child in module.children():
        yield from _children_first(child, done)
    yield module


def _method(module: nn.Module, name: str, *, num_arguments: int) -> Callable[..., object] | None:
    """The method of this name, if it must be given that many arguments."""
    method = getattr(module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # of a compiled function
        return None
    needed = [each for each in parameters if each.default is each.empty]
    positional = [each for each in needed if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_only_positional = all(each.kind is not each.KEYWORD_ONLY for each in needed)
    return method if takes_only_positional and len(positional) == num_arguments else None
