"""What is computed of parameters of which a rank has parts is that of whole ones, or refused with what gives them."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, OptimizerError
from tests.covering import pairwise
from tests.engine.tower import HAVE_ALL, PLANS, engine_on, masters, on_ranks, tower, trained


def after_two(channel: sw.Channel, name: str) -> sw.Engine:
    engine = engine_on(channel, name, lambda given: torch.optim.AdamW(given, lr=0.1))
    trained(engine)
    return engine


def in_turns(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of each parameter, as plain values."""
    return lambda model: [take(each) for each in model.parameters()]


@torch.no_grad()
def followed(model: Any) -> float:
    copies = copy.deepcopy(list(model.parameters()))
    for average, each in zip(copies, model.parameters(), strict=True):
        average.lerp_(each.detach() * 2, 0.5)
    return sum(float(each.norm()) for each in copies)


OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    "norm": in_turns(lambda each: each.norm().item()),
    "sum of squares": lambda model: float(sum(each.detach().pow(2).sum() for each in model.parameters())),
    "data": in_turns(lambda each: float(each.data.view(-1).abs().max())),
    "total norm": lambda model: float(nn.utils.get_total_norm(model.parameters())),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).tolist(),
    "tolist": in_turns(lambda each: each.view(-1).tolist()),
    "rows": in_turns(lambda each: each[0].sum().item()),
    "numpy": in_turns(lambda each: float((each.detach().numpy() ** 2).sum())),
    "numpy norm": in_turns(lambda each: float(np.linalg.norm(each.detach().numpy()))),
    "array": in_turns(lambda each: np.asarray(each.detach()).tolist()),
    "average": followed,
    "product": in_turns(lambda each: (each.view(-1) @ each.view(-1)).item()),
    "histogram": in_turns(lambda each: torch.histc(each.detach(), 4).tolist()),
}
LOOKS = OF_TENSORS | {
    "pickle": in_turns(lambda each: pickle.loads(pickle.dumps(each)).tolist()),
    "averaged model": lambda model: [each.tolist() for each in torch.optim.swa_utils.AveragedModel(model).parameters()],
    "copied model": lambda model: [each.tolist() for each in copy.deepcopy(model).parameters()],
    "state dict": lambda model: [each.tolist() for each in model.state_dict().values()],
}
OF_ONE = ("tolist", "array")
"""What gives the values of one parameter: a whole one has them all."""


def flat(values: Any) -> list[float]:
    return [inner for each in values for inner in flat(each)] if isinstance(values, list) else [values]


@pytest.mark.parametrize(
    ("look", "name"), pairwise(list(LOOKS), [each for each in PLANS if each not in ("one", "one bf16", "bf16")])
)
def test_what_is_computed_of_the_model_s_parameters_is_of_whole_ones_or_refused(look: str, name: str) -> None:
    def run(channel: sw.Channel, name: str) -> Any:
        engine = after_two(channel, name)
        found, said = None, ""
        try:
            found = LOOKS[look](engine.model)
        except ModelError as error:
            said = str(error)
        assert not said or ("engine.whole()" in said and "sw.full(engine)" in said)
        assert not said or name in ("stage 3", "tp", "pp", "pp tp")
        with engine.whole():
            whole = LOOKS[look](engine.model)
        trained(engine)
        return found, whole

    expected = torch.tensor(flat(on_ranks("one", partial(run, name="one"))[0][1]))
    for found, whole in on_ranks(name, partial(run, name=name)):
        assert torch.allclose(torch.tensor(flat(whole)), expected, atol=1e-5)
        assert found is None or torch.allclose(torch.tensor(flat(found)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("look", "name"), pairwise(list(OF_TENSORS), [each for each in PLANS if each not in ("one bf16", "merged")])
)
def test_what_is_computed_of_the_optimizer_s_parameters_is_of_all_or_refused(look: str, name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = after_two(channel, name)
        names = Namespace(parameters=lambda: masters(engine.optimizer))
        if name in HAVE_ALL:
            assert LOOKS[look](names) == LOOKS[look](engine.model)
        elif look in OF_ONE and name in ("pp", "whole"):
            LOOKS[look](names)
        else:
            with pytest.raises(OptimizerError, match=r"of the optimizer's parameters.* sw\.full\(engine\)"):
                LOOKS[look](names)
        trained(engine)

    on_ranks(name, run)


def in_a_file(values: Any) -> Any:
    """What a program that knows nothing of shardwise reads again."""
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ALONE: dict[str, Callable[[Any], Any]] = {
    "tolist": lambda each: each.tolist(),
    "an element": lambda each: each.view(-1)[0].item(),
    "an element of numpy": lambda each: float(each.detach().numpy().flat[0]),
    "finite": lambda each: float(torch.isfinite(each).all()),
    "equal": lambda each: float(torch.equal(each, each.clone())),
    "over its norm": lambda each: (each * 2 / each.norm()).tolist(),
    "pickle": lambda each: pickle.loads(pickle.dumps(each)).tolist(),
    "a file": lambda each: in_a_file(each).tolist(),
    "a file of values": lambda each: in_a_file({"a": [each.detach()]})["a"][0].tolist(),
    "a file in bfloat16": lambda each: in_a_file(each.detach().bfloat16()).float().tolist(),
    "a deep copy": lambda each: copy.deepcopy(each).tolist(),
    "a deep copy of values": lambda each: copy.deepcopy([each.detach()])[0].tolist(),
}


@pytest.mark.parametrize("name", ["pp", "whole"])
@pytest.mark.parametrize("look", ALONE)
def test_a_whole_parameter_of_the_optimizer_is_read_alone(look: str, name: str) -> None:
    def run(channel: sw.Channel, name: str) -> list[Any]:
        engine = after_two(channel, name)
        with torch.no_grad():
            return [ALONE[look](each) for each in masters(engine.optimizer) if each.numel()]

    expected = on_ranks("one", partial(run, name="one"))[0]
    found = [value for rank in on_ranks(name, partial(run, name=name)) for value in rank]
    rounding = 1e-2 if "bfloat16" in look else 1e-5
    assert sorted(flat(found)) == pytest.approx(sorted(flat(expected)), rel=rounding, abs=1e-6)


ELEMENT_BY_ELEMENT: dict[str, Callable[[Any], object]] = {
    "clamp_": lambda each: each.clamp_(-0.05, 0.05),
    "data": lambda each: each.data.mul_(0.5),
    "foreach": lambda each: torch._foreach_mul_([each], 0.5),
    "lerp_": lambda each: each.lerp_(torch.zeros_like(each), 0.5),
    "decayed": lambda each: each.add_(each.detach().clone().sign(), alpha=-0.01),
    "where": lambda each: each.copy_(torch.where(each > 0, each, torch.zeros_like(each))),
}


@pytest.mark.parametrize("name", ["one", "stage 1", "tp", "pp", "pp tp"])
@pytest.mark.parametrize("write", ELEMENT_BY_ELEMENT)
def test_what_goes_element_by_element_over_the_model_s_parameters_is_right_on_parts(write: str, name: str) -> None:
    @torch.no_grad()
    def written(model: nn.Module) -> nn.Module:
        for each in model.parameters():
            ELEMENT_BY_ELEMENT[write](each)
        return model

    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, name)
        written(engine.model)
        expected = written(tower()).state_dict()
        assert all(torch.equal(each, expected[key]) for key, each in sw.full(engine))

    on_ranks(name, run)


@pytest.mark.parametrize("name", PLANS)
def test_state_of_the_model_s_parameters_is_there_or_says_what_gives_it(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = after_two(channel, name)
        state = engine.optimizer.state
        for each in engine.model.parameters():
            if name in HAVE_ALL:
                assert each in state
                assert state[each]["exp_avg"].shape == each.shape
                assert state.get(each) is state[each]
            else:
                for ask in (state.__getitem__, state.get, state.__contains__):
                    with pytest.raises(OptimizerError, match=r"sw\.full_state_dict\(engine, optimizer=True\)"):
                        ask(each)
        assert state[torch.zeros(1)] == {}

    on_ranks(name, run)


def test_a_matrix_that_is_whole_during_an_update_only_says_so_between_two() -> None:
    def run(channel: sw.Channel) -> None:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        for each in model.parameters():
            nn.init.ones_(each)
        engine = engine_on(channel, "tp", lambda given: torch.optim.Muon(given, lr=0.1), model=model)
        trained(engine)
        for each in masters(engine.optimizer):
            assert each.dim() == 2
            for look in (torch.Tensor.norm, torch.Tensor.zero_, torch.Tensor.detach):
                with pytest.raises(OptimizerError, match="whole here during an update only"), torch.no_grad():
                    look(each)
        trained(engine)

    sw.simulate(2, run)
