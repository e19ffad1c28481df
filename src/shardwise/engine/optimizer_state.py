"""The optimizers of an engine as a checkpoint sees them: by names, in the forms that can be kept."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import Inventory
from shardwise.errors import OptimizerError
from shardwise.plan.optimizer_entries import NEVER_ALONG, python_type, python_types, values_of
from shardwise.plan.saved_settings import PYTHON_DTYPES, NamedOptimizer, OptimizerGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownOptimizer:
    """An optimizer and what was known of it before it got this rank's masters."""

    optimizer: torch.optim.Optimizer
    parameters: tuple[tuple[str, ...], ...]
    """For each group the names of all that it trains, on whichever rank their owner is; frozen parameters are not."""
    whole_keys: frozenset[str]
    """Keys of state that is not cut along with a parameter, whatever its shape."""

    def named(self) -> NamedOptimizer:
        """Its kind, its groups and their settings."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.parameters):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has {len(groups)} groups, and had {len(self.parameters)} in "
                "parallelize; add groups before parallelize, which decides who owns what"
            )
        return NamedOptimizer(
            kind=type(self.optimizer).__name__,
            groups=tuple(
                OptimizerGroup(parameters=names, settings=group)
                for names, group in zip(self.parameters, groups, strict=True)
            ),
        )

    def named_with_state(self, name_of: Mapping[torch.Tensor, str]) -> NamedOptimizer:
        """Also which of its state here is no tensor."""
        python = [each for each in self._values(name_of) if not isinstance(each[2], torch.Tensor)]
        return replace(
            self.named(),
            plain=python_types(each for each in python if each[2] is not None),
            none=frozenset(key for _, key, value in python if value is None),
        )

    def entries(self, name_of: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Its state here as (name of the parameter, key, tensor); Python values as 0-d tensors, without None.

        Raises OptimizerError for other values.
        """
        for name, key, value in self._values(name_of):
            if isinstance(value, torch.Tensor):
                yield name, key, value.detach()
            elif value is not None:
                yield name, key, torch.tensor(value, dtype=torch_dtype(PYTHON_DTYPES[python_type(name, key, value)]))

    def _values(self, name_of: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, Any]]:
        return values_of(type(self.optimizer).__name__, self.optimizer.state, name_of)


def know(
    optimizers: Sequence[torch.optim.Optimizer], inventory: Inventory, whole_keys: Sequence[frozenset[str]]
) -> tuple[KnownOptimizer, ...]:
    """Note the names of all parameters, before `swap` leaves each rank with its own."""
    trainable = {spec.name for spec in inventory.specs if spec.trainable}
    return tuple(
        KnownOptimizer(
            optimizer=optimizer,
            parameters=tuple(
                tuple(
                    name
                    for name in dict.fromkeys(map(inventory.name_of.__getitem__, group["params"]))
                    if name in trainable
                )
                for group in optimizer.param_groups
            ),
            whole_keys=keys | NEVER_ALONG,
        )
        for optimizer, keys in zip(optimizers, whole_keys, strict=True)
    )
