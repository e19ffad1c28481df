"""What is read from a model: what its modules compute, the rules that it carries, its ties."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.plan.outlines import TensorModule
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.formed import formed
from tests.engine.tensor.nets import Projection, transposed
from tests.refusals import Refusals


def only(module: nn.Module) -> TensorModule:
    """The outline of a module in a model of its own."""
    return tensor_outline(nn.ModuleDict({"it": module})).modules[1]


def tripled(net: Any, input: torch.Tensor) -> torch.Tensor:
    return nn.Embedding.forward(net, input) * 3


def routed(net: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, net.weight).softmax(-1)


class Scaled(nn.Embedding):
    """An embedding that does more."""

    forward = tripled


class Stubborn(nn.Linear):
    """A linear map that has its number of outputs where nobody looks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).view(*input.shape[:-1], [6][0])


Router = formed(routed, weight=lambda: nn.Parameter(torch.zeros(4, 4)))


@pytest.mark.parametrize(
    ("module", "computes", "sizes"),
    [
        (nn.Linear(4, 6), "linear", ()),
        (Projection(4, 6), "linear", ()),
        (transposed(6, 4), "transposed linear", ("nf",)),
        (transposed(4, 4), "transposed linear", ("nf",)),
        (nn.Embedding(4, 6), "embedding", ()),
        (nn.LayerNorm(4), "other", ()),
        (Router(), "other", ()),
        (nn.Bilinear(4, 4, 4), "other", ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_module_computes_is_found_by_calling_it(
    module: nn.Module, computes: str, sizes: tuple[str, ...], device: str
) -> None:
    state = torch.get_rng_state()
    found = only(copy.deepcopy(module).to(device))
    assert (found.computes, found.output_sizes) == (computes, sizes)
    assert torch.equal(torch.get_rng_state(), state)


class Carrier(nn.Module):
    """A model that carries rules in an attribute of itself or of its configuration."""

    def __init__(self, *, in_config: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(2))
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.absent": "colwise"}
        if in_config:
            self.config: Any = SimpleNamespace(base_model_tp_plan=plan)
        else:
            self._tp_plan = plan


@pytest.mark.parametrize("in_config", [True, False])
def test_rules_that_a_model_carries_are_found_wherever_it_lies_and_the_outermost_count(in_config: bool) -> None:
    alone = tensor_outline(Carrier(in_config=in_config)).carried
    assert alone == {f"layers.{at}.{name}": f"{rule}wise" for at in (0, 1) for name, rule in CARRIED.items()}
    model = nn.ModuleDict({"inner": Carrier(in_config=in_config)})
    assert tensor_outline(model).carried == {f"inner.{name}": rule for name, rule in alone.items()}
    vars(model)["_tp_plan"] = {"inner.layers.1.up": "colwise_gather_output"}
    assert tensor_outline(model).carried == {"inner.layers.1.up": "colwise_gather_output"}


CARRIED = {"up": "col", "down": "row"}


def cut(module: nn.Module, rule: Any) -> Callable[[], object]:
    model = module if isinstance(module, Carrier) else nn.ModuleDict({"it": module})
    rules = rule if isinstance(module, Carrier) else {"it": rule}
    return lambda: plan_tensor(tensor_outline(model), rules, num_ranks=2)


def carrying(**rules: str) -> Carrier:
    model = Carrier()
    vars(model)["_tp_plan"] = {f"layers.*.{name}": rule for name, rule in rules.items()}
    return model


REFUSED = Refusals(
    "engine.outlines",
    {
        "outputs that are all needed": cut(Stubborn(4, 6), "column"),
        "max_norm": cut(nn.Embedding(4, 6, max_norm=1.0), "vocab"),
        "scale_grad_by_freq": cut(nn.Embedding(4, 6, scale_grad_by_freq=True), "embedding_colwise"),
        "more than to look up rows": cut(Scaled(4, 6), "embedding_colwise"),
        "no linear map": cut(Router(), "column"),
        "an unknown style": cut(carrying(up="diagonal"), "auto"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_a_configuration_that_refuses_an_attribute_is_no_obstacle() -> None:
    class Refusing:
        @property
        def num_heads(self) -> int:
            raise ValueError("another one for each layer")

    module = nn.Linear(4, 6)
    vars(module)["config"] = Refusing()
    assert only(module).configured == {}
