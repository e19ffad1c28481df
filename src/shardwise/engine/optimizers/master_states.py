"""`optimizer.state[model.weight]`: a plain program asks with the model's parameter, and the optimizer has masters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.zero.flat_params import Owned
from shardwise.errors import OptimizerError


class MasterOf:
    """What the optimizers of this rank have for a parameter of the model."""

    def __init__(self, model: nn.Module, inventory: Inventory, updated: Sequence[Owned], *, owns_all: bool) -> None:
        """inventory: of the whole model. updated: what the optimizers have. owns_all: whether each rank has all."""
        self._model = model
        self._masters = [each.parameter for each in updated]
        self._numbers = frozenset(map(id, self._masters))
        # Else on no rank, also for what happens to be whole on one: ranks run one program.
        self._whole = {each.segment.name: each.parameter for each in updated} if owns_all else {}
        self._elsewhere = set() if owns_all else {spec.name for spec in inventory.specs if spec.trainable}

    def __call__(self, parameter: Any) -> nn.Parameter | None:
        """The master; None of what is no trained parameter. Raises OptimizerError where it is not whole here."""
        if id(parameter) in self._numbers:  # the first step asks with each master, and would go through the model
            return None
        # Asked anew: a rank keeps no parameters of other stages, and a reference, a weak one too, keeps torch from
        # swapping a parameter.
        named = self._model.named_parameters() if isinstance(parameter, torch.Tensor) else ()
        name = next((name for name, each in named if each is parameter), None)
        if name in self._elsewhere:
            raise OptimizerError(
                f"optimizer.state[p] of parameter {name!r}: a rank has the state of parts, or of some parameters. "
                "sw.full_state_dict(engine, optimizer=True) gives what the plain optimizer has; inside `with "
                "engine.whole():` it can be written"
            )
        return None if name is None else self._whole.get(name)


class StateOfMasters(defaultdict[Any, Any]):
    """The state of an optimizer that has masters, which gives for a parameter of the model what there is of its master.

    A step asks for masters, which are there, and meets nothing of this.
    """

    master_of: Callable[[Any], nn.Parameter | None] = staticmethod(lambda _: None)

    def __missing__(self, key: Any) -> Any:
        """The state of the master. Raises OptimizerError where it is a part."""
        master = self.master_of(key)
        return super().__missing__(key) if master is None else self[master]

    def __contains__(self, key: object) -> bool:
        """The same."""
        return super().__contains__(key) or super().__contains__(self.master_of(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """The same."""
        return self[key] if key in self else default  # noqa: SIM401

    def __reduce__(self) -> Any:
        """As torch's: the engine is no part of it."""
        return defaultdict, (dict,), None, None, iter(self.items())


def follow_states(optimizers: Sequence[torch.optim.Optimizer], master_of: Callable[[Any], nn.Parameter | None]) -> None:
    """Let the states of optimizers answer for parameters of the model from here on."""
    for optimizer in optimizers:
        state: Any = getattr(optimizer, "state", None)
        if type(state) is defaultdict:
            # Of an optimizer that wraps another one, which may have the same object, the state stays what it is.
            if any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values()):
                continue
            optimizer.state = state = StateOfMasters(dict, state)
        if isinstance(state, StateOfMasters):
            state.master_of = master_of
