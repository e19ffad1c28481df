"""Models built without values, and what initialisation gives them."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from shardwise.engine.meta_init import Initialisation

Build = Callable[[], nn.Module]


def built(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def initialise(model: nn.Module, seed: int) -> None:
    """Give a model that was built on the meta device the values of `Initialisation`, in place."""
    initialisation = Initialisation(model, seed)
    for name, values in initialisation.values(initialisation.names):
        initialisation.put(name, values)


def initialised(build: Build, seed: int = 0) -> dict[str, torch.Tensor]:
    model = built(build)
    initialise(model, seed)
    return tensors(model)


def one_by_one(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """All values, each asked for alone, the last ones first."""
    initialisation = Initialisation(model, seed)
    return dict(pair for name in reversed(initialisation.names) for pair in initialisation.values([name]))


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() <= expected.keys()
    for name, values in got.items():
        assert values.dtype == expected[name].dtype, name
        assert torch.equal(values, expected[name]), name
