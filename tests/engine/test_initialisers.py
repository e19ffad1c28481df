"""Initialisers that reach beyond their module or go by what they find, and models that leave gaps."""

import numpy as np
import pytest
import torch
from torch import nn

from shardwise.engine.meta_init import Initialisation, forget_initialised
from shardwise.errors import ModelError
from tests.engine.initialised import Build, assert_equal, built, initialise, initialised, one_by_one, tensors


class Scaled(nn.Module):
    """Initialises what is in it once more: one tensor from its own former values, one from another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name == "a.weight":
                parameter.data.mul_(0.5)
        self.b.weight.data.copy_(self.a.weight.t() + torch.ones(4))
        nn.init.trunc_normal_(self.c.weight)
        self.d.weight.data.copy_(self.c.weight)
        nn.init.zeros_(self.c.bias)


class Around(nn.Module):
    """Takes a tensor of a module in it, after that one's own initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.e = Scaled(), nn.Linear(4, 4)

    def reset_parameters(self) -> None:
        self.e.weight.data.copy_(self.scaled.a.weight)


class Applied(nn.Module):
    """A model whose `_init_weights(module)` knows some of its modules only, around one that has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear, self.norm, self.inner = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), Inner()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 5.0)


class Deciding(nn.Module):
    """Goes by the values it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(6, 6)), nn.Parameter(torch.empty(6))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        while float(self.weight.abs().max()) > 1.5:
            nn.init.normal_(self.weight)
        self.bias.data.fill_(self.weight.sum().item())


class Generated(Deciding):
    """Draws from a generator of its own, and from numpy."""

    def reset_parameters(self) -> None:
        self.weight.data.normal_(generator=torch.Generator().manual_seed(3))
        self.bias.data.numpy()[:] = np.arange(6)


class Replacing(Deciding):
    """Makes new parameters instead of filling those it has."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias.data = torch.zeros(6)


class Suspicious(Deciding):
    """Leaves out what has no values, and what it has done before."""

    done = False

    def reset_parameters(self) -> None:
        if self.weight.is_meta or self.weight.device.type == "meta" or self.done:
            return
        self.done = True
        self.weight.data[:3].uniform_()
        self.weight.data[3:] = 2.0
        self.bias.data.zero_()


def test_a_module_may_initialise_what_is_in_it() -> None:
    expected = initialised(Scaled)
    assert_equal(one_by_one(built(Scaled)), expected)
    before = initialised(lambda: nn.ModuleDict({"a": nn.Linear(4, 4)}))
    assert torch.equal(expected["a.weight"], 0.5 * before["a.weight"])
    assert torch.equal(expected["a.bias"], before["a.bias"])
    assert torch.equal(expected["b.weight"], expected["a.weight"].t() + 1)
    assert torch.equal(expected["d.weight"], expected["c.weight"])
    assert expected["c.weight"].abs().max() <= 2
    assert expected["c.weight"].std() > 0.5  # of a linear layer it would be 0.29


def test_the_nearest_module_around_initialises_after_the_module_itself() -> None:
    values = initialised(Applied)
    assert torch.equal(values["linear.weight"], torch.full((8, 8), 3.0))
    assert torch.equal(values["inner.linear.weight"], torch.full((8, 8), 5.0))
    assert_equal(values, {**initialised(lambda: nn.ModuleDict({"words": nn.Embedding(9, 8)})), **values})
    assert torch.equal(values["norm.weight"], torch.ones(8))
    assert 0 < values["linear.bias"].std() < 1


@pytest.mark.parametrize("kind", [Deciding, Generated, Replacing, Suspicious])
def test_initialisers_may_go_by_what_they_find(kind: type[nn.Module]) -> None:
    expected = initialised(kind)
    assert_equal(one_by_one(built(kind)), expected)
    assert expected["weight"].isfinite().all()
    bias: dict[type[nn.Module], torch.Tensor]
    bias = {Deciding: torch.full((6,), expected["weight"].sum().item()), Generated: torch.arange(6.0)}
    assert torch.equal(expected["bias"], bias.get(kind, torch.zeros(6)))
    if kind is Deciding:
        assert expected["weight"].abs().max() <= 1.5
    if kind is Generated:
        assert torch.equal(expected["weight"], torch.empty(6, 6).normal_(generator=torch.Generator().manual_seed(3)))
    if kind is Suspicious:
        assert torch.equal(expected["weight"][3:], torch.full((3, 6), 2.0))


class Normed(nn.Module):
    """Divides what its modules drew by the largest of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.fill_(module.weight.abs().max().item())
            module.weight.data.div_(module.weight.abs().max().item())


def test_values_from_before_reach_an_initialiser_that_goes_by_them() -> None:
    expected = initialised(Normed)
    assert_equal(one_by_one(built(Normed)), expected)
    drawn = initialised(lambda: nn.ModuleDict({"a": nn.Linear(8, 8)}))["a.weight"]
    assert torch.equal(expected["a.weight"], drawn / drawn.abs().max())
    assert torch.equal(expected["a.bias"], drawn.abs().max().expand(8))
    assert not torch.equal(expected["a.weight"], expected["b.weight"])


def test_what_has_values_keeps_them() -> None:
    words = nn.Embedding(4, 4)
    model = built(lambda: nn.ModuleDict({"linear": nn.Linear(4, 4), "scaled": Scaled()}))
    model.add_module("words", words)
    before = words.weight.clone()
    assert "words.weight" not in Initialisation(model, 0).names
    weight = words.weight
    initialise(model, 0)
    assert words.weight is weight
    assert torch.equal(words.weight, before)
    around = built(Around)
    assert isinstance(around, Around)
    around.scaled.a = nn.Linear(4, 4)
    values = around.scaled.a.weight.detach().clone()
    initialise(around, 0)
    assert torch.equal(around.scaled.a.weight, values)  # though the initialiser of `scaled` would halve it
    assert torch.equal(around.e.weight, values)
    assert torch.equal(around.scaled.b.weight, 0.5 * values.t() + 1)  # computed in the call that halves it


class Legacy(nn.Module):
    """Has parameters that were made by a constructor which the meta device does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.FloatTensor(3, 3))
        self.other = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3, device="cpu"))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_values_that_would_be_overwritten_can_be_taken_away() -> None:
    model = built(Legacy)
    assert Initialisation(model, 0).names == ("other.weight", "other.bias")
    forget_initialised(model)
    assert Initialisation(model, 0).names == ("weight", "other.weight", "other.bias")
    initialise(model, 0)
    assert torch.equal(tensors(model)["weight"], torch.ones(3, 3))
    assert torch.equal(tensors(model)["table"], torch.arange(3))


class Gaps(nn.Module):
    """What nobody initialises, of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
        self.part = Half()


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2))

    def reset_parameters(self) -> None:
        self.weight.data[1:].zero_()


def test_all_that_nobody_initialises_is_named() -> None:
    with pytest.raises(ModelError) as caught:
        Initialisation(built(Gaps), 0)
    text = str(caught.value)
    assert "parameter 'scale' (of a Gaps): nobody initialises it" in text
    assert "buffer 'mask' (of a Gaps): nobody initialises it" in text
    assert "parameter 'part.weight' (of a Half): nobody initialises more than parts of it" in text
    assert "linear" not in text
    assert "build it outside torch.device('meta')" in text


def plain_attribute() -> nn.Module:
    model = nn.Linear(2, 2)
    model.table = torch.ones(2)
    return model


def overlapping() -> nn.Module:
    model = nn.Linear(2, 2)
    model.head = nn.Parameter(model.weight.data[0])
    return model


class Raising(Deciding):
    def reset_parameters(self) -> None:
        raise OverflowError("too much")


class Aside(Deciding):
    """Initialises its parameters through a list in which they have not been replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = [(self.weight, self.bias)]

    def reset_parameters(self) -> None:
        for each in self.pairs[0]:
            nn.init.ones_(each)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Aside, r"reset_parameters\(\) of 'the model' raised .* by another way than through its modules"),
        (plain_attribute, "'table' is a tensor without values .* in a plain attribute"),
        (overlapping, "'weight' and 'head' have no values yet, and share a part of one storage"),
        (lambda: nn.LazyLinear(3), "'weight' has no shape before the first forward"),
        (lambda: nn.Sequential(Raising()), r"reset_parameters\(\) of '0' raised OverflowError: too much"),
    ],
)
def test_what_cannot_be_initialised_is_refused(build: Build, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Initialisation(built(build), 0)


def test_a_name_without_a_gap_is_refused() -> None:
    with pytest.raises(ModelError, match="'wieght' is no parameter or buffer without values"):
        list(Initialisation(built(lambda: nn.Linear(2, 2)), 0).values(["wieght"]))
