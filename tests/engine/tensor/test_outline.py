"""What is read from a model: what its modules compute, the rules that it carries, its ties."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwise.engine.tensor.cut_outline import tensor_outline
from shardwise.errors import PlanError
from shardwise.plan.outlines import TensorModule
from shardwise.plan.tensor_cuts import plan_tensor
from tests.engine.tensor.test_styles import Projection, transposed


def only(module: nn.Module) -> TensorModule:
    """The outline of a module in a model of its own."""
    outline = tensor_outline(nn.ModuleDict({"it": module}))
    return outline.modules[1]


class Scaled(nn.Embedding):
    """An embedding that does more."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3


class Router(nn.Module):
    """Looks like a linear map, and gives something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight).softmax(-1)


class Stubborn(nn.Linear):
    """A linear map that has its number of outputs where nobody looks."""

    def __init__(self) -> None:
        super().__init__(4, 6)
        self._sizes = [6]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).view(*input.shape[:-1], self._sizes[0])


@pytest.mark.parametrize(
    ("module", "computes"),
    [
        (nn.Linear(4, 6), "linear"),
        (Projection(4, 6), "linear"),
        (transposed(6, 4), "transposed linear"),
        (transposed(4, 4), "transposed linear"),
        (nn.Embedding(4, 6), "embedding"),
        (nn.LayerNorm(4), "other"),
        (Router(), "other"),
        (nn.Bilinear(4, 4, 4), "other"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_module_computes_is_found_by_calling_it(module: nn.Module, computes: str, device: str) -> None:
    state = torch.get_rng_state()
    assert only(copy.deepcopy(module).to(device)).computes == computes
    assert torch.equal(torch.get_rng_state(), state)


def test_the_attribute_that_says_how_many_outputs_there_are_is_found() -> None:
    assert only(transposed(6, 4)).output_sizes == ("nf",)
    assert only(transposed(4, 4)).output_sizes == ("nf",)
    assert only(nn.Linear(4, 6)).output_sizes == ()


@pytest.mark.parametrize(
    ("module", "rule", "said"),
    [
        (Stubborn(), "column", "works with all 6 outputs only"),
        (nn.Embedding(4, 6, max_norm=1.0), "vocab", "it has max_norm, which depend"),
        (nn.Embedding(4, 6, scale_grad_by_freq=True), "embedding_colwise", "it has scale_grad_by_freq"),
        (Scaled(4, 6), "embedding_colwise", "does more than to look up rows"),
        (Router(), "column", "it is not a linear map"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_cannot_be_cut_is_refused(module: nn.Module, rule: str, said: str) -> None:
    outline = tensor_outline(nn.ModuleDict({"it": module}))
    with pytest.raises(PlanError, match=said):
        plan_tensor(outline, {"it": rule}, num_ranks=2)


def test_inputs_and_rows_of_what_has_odd_outputs_can_be_cut() -> None:
    for module, rule in ((Stubborn(), "row"), (Scaled(4, 6), "vocab")):
        outline = tensor_outline(nn.ModuleDict({"it": module}))
        assert plan_tensor(outline, {"it": rule}, num_ranks=2).cuts


class Carrier(nn.Module):
    """A model that carries rules in an attribute of itself or of its configuration."""

    def __init__(self, *, in_config: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)}) for _ in range(2))
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.absent": "colwise"}
        if in_config:
            self.config: Any = SimpleNamespace(base_model_tp_plan=plan)
        else:
            self._tp_plan = plan


@pytest.mark.parametrize("in_config", [True, False])
def test_rules_that_a_model_carries_are_found_wherever_it_lies(in_config: bool) -> None:
    alone = tensor_outline(Carrier(in_config=in_config)).carried
    assert alone == {
        "layers.0.up": "colwise",
        "layers.0.down": "rowwise",
        "layers.1.up": "colwise",
        "layers.1.down": "rowwise",
    }
    inside = tensor_outline(nn.ModuleDict({"inner": Carrier(in_config=in_config)})).carried
    assert inside == {f"inner.{name}": rule for name, rule in alone.items()}


def test_the_outermost_plan_counts() -> None:
    model = nn.ModuleDict({"inner": Carrier(in_config=False)})
    vars(model)["_tp_plan"] = {"inner.layers.1.up": "colwise_gather_output"}
    assert tensor_outline(model).carried == {"inner.layers.1.up": "colwise_gather_output"}


def test_a_style_that_nobody_knows_is_named() -> None:
    model = Carrier(in_config=False)
    model._tp_plan["layers.*.up"] = "diagonal"
    with pytest.raises(PlanError, match=r"'layers.0.up', as the model carries it: the rule 'diagonal' is unknown"):
        plan_tensor(tensor_outline(model), "auto", num_ranks=2)


def test_a_configuration_that_refuses_an_attribute_is_no_obstacle() -> None:
    class Refusing:
        @property
        def num_heads(self) -> int:
            raise ValueError("another one for each layer")

    module = nn.Linear(4, 6)
    vars(module)["config"] = Refusing()
    assert only(module).configured == {}


def test_a_tie_is_one_parameter_under_its_first_name() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = nn.Parameter(embedding.weight.detach())
    outline = tensor_outline(nn.ModuleDict({"one": embedding, "two": head}))
    assert outline.shapes == {"one.weight": (5, 4)}
    assert [dict(module.parameters) for module in outline.modules[1:]] == [{"weight": "one.weight"}] * 2
