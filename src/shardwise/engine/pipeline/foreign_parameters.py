"""Parameters of other stages, which have a description only, and refuse to be computed with."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwise.engine.forward.sharded_parameters import functions_of_metadata
from shardwise.engine.pipeline.nested import user_site
from shardwise.engine.torch_private import DisableTorchFunctionSubclass
from shardwise.errors import ModelError

OF_ANOTHER_STAGE = (
    "{name!r} computes with a parameter or a buffer of a module on another stage: an argument or an attribute "
    "({site}). Place both modules on one stage, or pass the tensor through forward"
)
"""Of a call by its name, and a place in the program."""


# One class for each name of a call: a class is made once, and modules are called in every microbatch.
@functools.cache
def _refusing_class(call: str) -> type:
    """The class of another stage's parameters while `call` is executed: they have a description only.

    A torch function mode would see reads as well, but some modules take other paths under one: torch's transformer
    layer leaves its fused kernel, which rounds differently.
    """

    def torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in functions_of_metadata():
            raise ModelError(OF_ANOTHER_STAGE.format(name=call, site=user_site()))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    kind: type = nn.Parameter
    return type(kind)("ForeignParameter", (kind,), {"__torch_function__": classmethod(torch_function)})


class ForeignParameters:
    """Those of a model on one rank."""

    def __init__(self, model: nn.Module) -> None:
        # On the meta device. Looked for once: a generation comes to `refusing` in each call, and the walk over all
        # modules takes ten times as long as the rest.
        self._known = [each for each in model.parameters() if type(each) is nn.Parameter and each.is_meta]

    @contextmanager
    def refusing(self, call: str) -> Iterator[None]:
        """Nothing that `call` computes may come from another stage's module, which has no values here."""
        # torch would compute with them and give a meta tensor, or fail with a message on devices: neither names the
        # module and the way out.
        refusing = _refusing_class(call)
        for each in self._known:
            each.__class__ = refusing
        try:
            yield
        finally:
            for each in self._known:
                each.__class__ = nn.Parameter
