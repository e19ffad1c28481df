"""What is computed of parameters of which a rank has parts is that of whole ones, or refused with what gives them."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, OptimizerError
from tests.engine.tower import HAVE_ALL, PLANS, engine_on, masters, on_ranks, plain, trained

FLOAT32 = [name for name in PLANS if "bf16" not in name]
IN_PARTS = ("stage 3", "tp", "pp", "pp tp")
"""Plans under which no rank has the whole model."""
adamw = partial(torch.optim.AdamW, lr=0.1)


def after_two(channel: sw.Channel, name: str) -> sw.Engine:
    engine = engine_on(channel, name, adamw)
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
OF_MODELS = OF_TENSORS | {
    "pickle": in_turns(lambda each: pickle.loads(pickle.dumps(each)).tolist()),
    "averaged model": lambda model: [each.tolist() for each in torch.optim.swa_utils.AveragedModel(model).parameters()],
    "copied model": lambda model: [each.tolist() for each in copy.deepcopy(model).parameters()],
    "state dict": lambda model: [each.tolist() for each in model.state_dict().values()],
}
OF_ONE = ("tolist", "array")
"""What gives the values of one parameter: a whole one has them all."""


def flat(values: Any) -> list[float]:
    return [inner for each in values for inner in flat(each)] if isinstance(values, list) else [values]


@cache
def in_one_process() -> dict[str, Any]:
    model, _ = plain(adamw)
    return {look: pytest.approx(flat(OF_MODELS[look](model)), abs=1e-5) for look in OF_MODELS}


@pytest.mark.parametrize("name", FLOAT32)
def test_parameters_are_read_whole_or_the_read_is_refused_with_what_gives_them(name: str) -> None:
    expected = in_one_process()

    def run(channel: sw.Channel) -> None:
        engine = after_two(channel, name)
        for look, read in OF_MODELS.items():
            found, refusal = None, ""
            try:
                found = flat(read(engine.model))
            except ModelError as error:
                refusal = str(error)
            if name not in IN_PARTS or not refusal:
                assert found == expected[look], look
            else:
                assert "engine.whole()" in refusal
                assert "sw.full(engine)" in refusal
        with engine.whole():
            for look, read in OF_MODELS.items():
                assert flat(read(engine.model)) == expected[look], look
        of_optimizer = Namespace(parameters=lambda: masters(engine.optimizer))
        for look, read in OF_TENSORS.items():
            if name in HAVE_ALL:
                assert flat(read(of_optimizer)) == expected[look], look
            elif look in OF_ONE and name in ("pp", "whole"):
                read(of_optimizer)
            else:
                with pytest.raises(OptimizerError, match=r"of the optimizer's parameters.* sw\.full\(engine\)"):
                    read(of_optimizer)
        trained(engine)

    on_ranks(name, run)


OF_GRADIENTS: dict[str, Callable[[list[Any]], object]] = {
    "clip_grad_norm_": lambda held: nn.utils.clip_grad_norm_(held, 1.0),
    "clip_grad_value_": lambda held: nn.utils.clip_grad_value_(held, 1.0),
    "norm": lambda held: held[0].grad.norm(),
    "add_": lambda held: held[0].add_(held[0].grad),
    "grad =": lambda held: setattr(held[0], "grad", torch.ones_like(held[0])),
    "foreach": lambda held: torch._foreach_norm([each.grad for each in held]),
    "tolist": lambda held: held[0].grad.tolist(),
}


@pytest.mark.parametrize("name", PLANS)
def test_between_steps_an_optimizer_has_no_gradients_and_state_by_its_own_parameters(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = after_two(channel, name)
        state = engine.optimizer.state
        for each in engine.model.parameters():
            if name in HAVE_ALL:
                assert each in state
                assert state[each]["exp_avg"].shape == each.shape
                assert state.get(each) is state[each]
                continue
            for ask in (state.__getitem__, state.get, state.__contains__):
                with pytest.raises(OptimizerError, match=r"sw\.full_state_dict\(engine, optimizer=True\)"):
                    ask(each)
        assert state[torch.zeros(1)] == {}
        engine.optimizer.zero_grad()
        engine.optimizer.zero_grad(set_to_none=False)
        for read in OF_GRADIENTS.values():
            with torch.no_grad(), pytest.raises(OptimizerError, match=r"outside of .* Call engine\.step\(batch\)"):
                read(masters(engine.optimizer))

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


@torch.no_grad()
def read_alone(parameters: list[Any]) -> dict[str, list[float]]:
    return {look: flat([read(each) for each in parameters if each.numel()]) for look, read in ALONE.items()}


@pytest.mark.parametrize("name", ["pp", "whole"])
def test_a_whole_parameter_of_the_optimizer_is_read_alone(name: str) -> None:
    found = on_ranks(name, lambda channel: read_alone(masters(after_two(channel, name).optimizer)))
    for look, expected in read_alone(list(plain(adamw)[0].parameters())).items():
        values = sorted(value for of_rank in found for value in of_rank[look])
        rounding = 1e-2 if "bfloat16" in look else 1e-5
        assert values == pytest.approx(sorted(expected), rel=rounding, abs=1e-6), look


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
