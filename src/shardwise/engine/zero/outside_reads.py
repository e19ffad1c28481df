"""Parameters that a forward reads outside of their unit: a tied head, a table of positions, a penalty (stage 3).

    forward    gather embed  run embed | ...  | gather embed  linear(x, embed.weight) | loss
    backward                                    gather embed  its gradients           | ...  reduce embed

Each such operation is a call of its own, as that of a module is: its unit is gathered for it, and for its backward. All
data ranks run one program, and so gather in one order. What the operation gives as a view of a parameter is a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.engine.wrapping import in_backward
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.unit_calls import GatheredUnit
from shardwise.engine.zero.unshard import RECOMPUTATION, Unshard
from shardwise.engine.zero.unshard_hooks import run_gathered
from shardwise.engine.zero.view_copies import refusal_of_write


class OutsideReads:
    """Gathers for the operations that take parameters at rest."""

    def __init__(self, gathering: Unshard, params: FlatParams) -> None:
        self._gathering = gathering
        self._unit_of = {id(each): unit for unit in gathering.units for each, _, _ in unit.parameters}
        params.read_by(self.read)

    def read(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], taken: Sequence[torch.Tensor]
    ) -> Any:
        """What the operation gives. `taken`: the parameters at rest among its arguments.

        NotImplemented outside of a step, an evaluation or a prediction: nobody else gathers then. Raises ModelError for
        operations that write to a parameter.
        """
        if not self._gathering.is_in_pass:
            return NotImplemented
        found = {self._unit_of[id(each)].number: self._unit_of[id(each)] for each in taken}
        units: list[GatheredUnit] = [found[number] for number in sorted(found)]
        if in_backward() and not torch.is_grad_enabled() and all(unit.num_uses for unit in units):
            with self._gathering.using(units, RECOMPUTATION):  # the backward of a function that saved the parameter
                return function(*args, **kwargs)
        if not torch.is_grad_enabled():  # perhaps the forward of such a function, or of a reentrant checkpoint
            self._gathering.reduce_at_end(units)

        def forward(*args: Any, **kwargs: Any) -> Any:
            versions = [each._version for each in taken]
            output = function(*args, **kwargs)
            for each, version in zip(taken, versions, strict=True):
                if each._version != version:
                    raise refusal_of_write(each._rests_in[0])  # type: ignore[attr-defined]
            return list(output) if isinstance(output, Iterator) else output

        output = run_gathered(self._gathering, units, forward, args, kwargs)
        return iter(output) if function is torch.Tensor.__iter__ else output
