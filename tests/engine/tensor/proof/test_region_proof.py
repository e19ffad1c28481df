"""Plans of tensor parallelism are proved by the first forward: wrong ones are refused, right ones leave no trace."""

import gc
import math
import re
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.recorded import Recorded
from shardwise.errors import ModelError
from tests.engine.formed import formed
from tests.engine.tensor.planted_faults import (
    CUT,
    FAULTS,
    RIGHT,
    WIDE,
    WIDTH,
    between,
    plan_of,
    softmax,
    train,
)

ON_TWO = sw.Pipeline(stages={"embedding": 0, "norm": 0, "block": 1, "head": 1})
WORDS = {"words": torch.ones(8, 6, dtype=torch.int64)}


def each_once(cases: Mapping[str, Any], dtypes: tuple[str, ...]) -> list[Any]:
    """Every case in one dtype, and in all others for the long runs."""
    return [
        pytest.param(case, dtype, marks=[] if (at + number) % len(dtypes) == 0 else pytest.mark.stress)
        for at, case in enumerate(cases)
        for number, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize(("fault", "dtype"), each_once(FAULTS, ("float32", "float64", "bfloat16", "float16")))
def test_a_planted_fault_is_found_in_every_dtype(fault: str, dtype: str) -> None:
    make, rules = FAULTS[fault]
    plan = plan_of(rules, compute=dtype if dtype in ("bfloat16", "float16") else None)
    with pytest.raises(ModelError, match=r"'block.*' .* gives other numbers when it is cut") as caught:
        sw.simulate(2, lambda channel: train(channel, make, plan, double=dtype == "float64"))
    numbers = re.search(r"differs by (\S+) .* rounding gives (\S+)\. The rules in it", str(caught.value))
    assert numbers is not None
    # Half precision is computed as float32: rounding does not hide a fault.
    assert float(numbers[2]) < 1e-5 < 100 * float(numbers[2]) + 1e-2 < 1e-1 + float(numbers[1])


@pytest.mark.parametrize(("case", "dtype"), each_once(RIGHT, ("float32", "float64", "bfloat16")))
def test_a_right_plan_is_proved_and_no_bit_is_changed(case: str, dtype: str) -> None:
    make, rules = RIGHT[case]
    proved, unproved = (
        sw.simulate(
            2,
            partial(
                train,
                make=make,
                plan=plan_of(rules, compute="bfloat16" if dtype == "bfloat16" else None, prove=prove),
                double=dtype == "float64",
            ),
        )
        for prove in (True, False)
    )
    assert proved == unproved


class Busy(nn.Module):
    """Everything that a second forward could disturb: dropout, statistics, counters, lists, caches, checkpoints."""

    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = between(torch.tanh)()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.seen: list[int] = []
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        cache = Cache()
        first, second = self.pass_on(x, cache), self.pass_on(x, cache)
        assert len(cache.values) == 2
        with torch.no_grad():
            self.last = self.last + first.mean((0, 1))
            first = first + torch.rand(()) * self.inner(x)
        out: torch.Tensor = checkpoint(self.inner, first + second, use_reentrant=False)
        normed: torch.Tensor = self.norm(out.transpose(1, 2)).transpose(1, 2)
        return normed

    def pass_on(self, x: torch.Tensor, cache: "Cache") -> torch.Tensor:
        out: torch.Tensor = self.dropout(self.inner(x))
        cache.values.append(out)
        return out


class Cache:
    """An object of the model's own."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ("tp=3", {"merge": sw.Merge(microbatches=3)}),
        ("pp=2,tp=2", {"pipeline": ON_TWO}),
        ("dp_shard=2,tp=2", {"sharding": sw.Sharding(stage=2)}),
        ("dp_shard=2,tp=2", {"sharding": sw.Sharding(stage=3, units=("block.inner.*", "."))}),
        (
            "pp=2,dp_shard=2,tp=2",
            {"sharding": sw.Sharding(stage=3), "pipeline": ON_TWO, "merge": sw.Merge(microbatches=2)},
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_the_proof_leaves_no_trace(mesh: str, others: Mapping[str, Any]) -> None:
    rules = {"block.inner.up": "column", "block.inner.down": "row", "embedding": "vocab", "head": "vocab"}

    def run(channel: sw.Channel, prove: bool) -> tuple[Any, ...]:
        engines: list[sw.Engine] = []
        losses = train(channel, Busy, plan_of(rules, mesh, prove=prove, **others), act=engines.append)
        model: Any = engines[0].model
        state = {name: tensor.tolist() for name, tensor in model.named_buffers() if not tensor.is_meta}
        return losses, state, model.block.seen, engines[0].counters, torch.rand(2).tolist()

    size = math.prod(int(each.split("=")[1]) for each in mesh.split(","))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        proved = sw.simulate(size, lambda channel: run(channel, True))
    assert proved == sw.simulate(size, lambda channel: run(channel, False))
    assert not [each for each in told if "not compared" in str(each.message)]


def test_after_the_first_step_nothing_is_left_of_the_proof() -> None:
    def run(channel: sw.Channel) -> None:
        recorded = Recorded(channel)
        engines: list[sw.Engine] = []
        make, rules = RIGHT["bare parts"]
        train(recorded, make, plan_of(rules), steps=1, act=engines.append)
        before = len(recorded.calls)
        engines[0].step(WORDS)
        asked = ["proof of tensor.rules" in call.purpose for call in recorded.calls]
        assert any(asked[:before])
        assert not any(asked[before:])
        kept = weakref.ref(engines.pop().model)
        gc.collect()
        assert kept() is None, "the proof keeps no model alive"

    sw.simulate(2, run)


def test_what_is_first_called_later_is_proved_then() -> None:
    sometimes = formed(lambda net, x: net.inner(x) if net.runs else x, inner=between(softmax), runs=lambda: False)

    def run(channel: sw.Channel) -> None:
        engines: list[sw.Engine] = []
        rules = {"block.inner.up": "column", "block.inner.down": "row"}
        train(channel, sometimes, plan_of(rules, "dp_shard=2,tp=2"), act=engines.append)
        engines[0].model.block.runs = True  # type: ignore[union-attr]
        engines[0].evaluate(WORDS)

    with pytest.raises(ModelError, match=r"'block.inner' \(Between\) gives other numbers"):
        sw.simulate(4, run)


@pytest.mark.parametrize("stage", [1, 3])
def test_data_ranks_that_skip_microbatches_prove_in_step(stage: int) -> None:
    """The first data rank skips the first microbatch: under stage 3 it gathers what the other one gathers."""

    def run(channel: sw.Channel, cases: Any, case: str) -> None:
        make, rules = cases[case]
        plan = plan_of(rules, "dp_shard=2,tp=2", sharding=sw.Sharding(stage=stage), merge=sw.Merge(microbatches=2))
        engines: list[sw.Engine] = []
        weigh: Any = {"loss_weight": lambda batch: float(batch["weight"].sum())}
        train(channel, make, plan, steps=0, act=engines.append, **weigh)
        weight = torch.tensor([0.0, 0.0, 1.0, 1.0]) if channel.rank < 2 else torch.ones(4)
        for _ in range(2):
            engines[0].step({"words": torch.arange(24).view(4, 6) % 11, "weight": weight})

    sw.simulate(4, lambda channel: run(channel, RIGHT, "bare parts"))
    with pytest.raises(ModelError, match="gives other numbers"):
        sw.simulate(4, lambda channel: run(channel, FAULTS, "order of bare parts"))


@pytest.mark.parametrize("way", ["step", "evaluate", "predict"])
def test_all_ranks_refuse_before_anything_is_updated(way: str) -> None:
    make, rules = FAULTS["softmax"]
    mesh = "tp=2" if way == "predict" else "dp_shard=2,tp=2"  # data ranks predict each for itself

    def run(channel: sw.Channel) -> str:
        engines: list[sw.Engine] = []
        train(channel, make, plan_of(rules, mesh), steps=0, act=engines.append)
        (engine,) = engines
        before = {piece: tensor.clone() for piece, tensor in engine.state().items()}
        more = [lambda inputs: engine.model(inputs["words"])] if way == "predict" else []
        with pytest.raises(ModelError, match="gives other numbers") as caught:
            getattr(engine, way)(WORDS, *more)
        assert all(torch.equal(tensor, before[piece]) for piece, tensor in engine.state().items())
        return str(caught.value)

    assert len(set(sw.simulate(2 if way == "predict" else 4, run))) == 1


def test_a_fault_behind_an_error_is_what_is_refused_and_an_error_of_the_batch_stays_what_it_is() -> None:
    """A norm of all outputs: torch's words of sizes do not name the rule."""
    norm = between(type("Norm", (nn.LayerNorm,), {"__init__": lambda self: nn.LayerNorm.__init__(self, WIDE)}))
    with pytest.raises(ModelError, match=r"'block' \(Between\) fails when it is cut, and runs with whole") as caught:
        sw.simulate(2, lambda channel: train(channel, norm, plan_of(CUT)))
    said = "in 'block.change' (Norm, without a rule in tensor.rules), which was given (8, 6, 12)"
    assert said in str(caught.value)

    def run(channel: sw.Channel) -> None:
        train(
            channel, between(torch.tanh), plan_of(CUT), act=lambda engine: engine.step({"words": WORDS["words"] * 99})
        )

    with pytest.raises(IndexError):
        sw.simulate(2, run)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_region_that_is_placed_on_a_stage_is_proved_there(stage: int) -> None:
    make, rules = FAULTS["softmax"]
    stages = sw.Pipeline(stages={"embedding": 0, "norm": 0, "block": stage, "head": 1})
    with pytest.raises(ModelError, match=r"'block' \(Between\) gives other numbers"):
        sw.simulate(4, lambda channel: train(channel, make, plan_of(rules, "pp=2,tp=2", pipeline=stages)))


def by_a_weight(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    weight = module.get_parameter("down.weight" if "down" in module._modules else "weight")
    out: torch.Tensor = value * weight.detach().norm()
    return out


def by_the_size_of_a_weight(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """Alike on all ranks."""
    return value * (module.get_parameter("down.weight" if "down" in module._modules else "weight").numel() / 50)


def multiplied_past_the_count(module: nn.Module, value: torch.Tensor) -> None:
    value.data.mul_(by_the_size_of_a_weight(module, torch.ones(())))


def doubled_in_place(_module: nn.Module, value: torch.Tensor) -> None:
    with torch.no_grad():
        value.mul_(2)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["block.up", "block.down", "block"])
def test_hooks_of_the_program_that_change_values_are_proved(name: str, before: bool) -> None:
    def put(engine: sw.Engine, hook: Any) -> None:
        module = engine.model.get_submodule(name)
        if before:
            module.register_forward_pre_hook(lambda module, args: hook(module, args[0]))
        else:
            module.register_forward_hook(lambda module, args, output: hook(module, output))

    def losses(plan: sw.Plan, hook: Any) -> list[float]:
        act = partial(put, hook=hook)
        return sw.simulate(
            plan.mesh.size,
            lambda channel: train(channel, between(torch.neg), plan, double=True, act=act),
        )[0]

    changes = rf"gives other numbers when it is cut.* A hook of the program changes values of '{name}'"
    for hook in (by_a_weight, by_the_size_of_a_weight, multiplied_past_the_count):
        with pytest.raises(ModelError, match=changes):
            losses(plan_of(CUT), hook)
    assert losses(plan_of(CUT), doubled_in_place) == pytest.approx(
        losses(plan_of(None, ""), doubled_in_place), rel=1e-10
    )


@pytest.mark.parametrize(("mesh", "passes_on"), [("tp=2", False), ("tp=2", True), ("pp=2,tp=2", False)])
def test_hooks_of_the_program_that_look_see_no_call_of_a_proof(mesh: str, passes_on: bool) -> None:
    def run(channel: sw.Channel, *, prove: bool) -> int:
        seen: list[str] = []

        def look(_module: nn.Module, _args: Any, output: Any, *, name: str) -> Any:
            seen.append(name)
            return output if passes_on else None

        def put(engine: sw.Engine) -> None:
            for name, module in engine.model.named_modules():
                if channel.rank == 0 or "pp" in mesh:  # the first one alone, as programs that log do; stages refuse it
                    module.register_forward_hook(partial(look, name=name))

        stages: dict[str, Any] = {"pipeline": ON_TWO} if "pp" in mesh else {}
        train(channel, between(torch.relu), plan_of(CUT, mesh, prove=prove, **stages), act=put)
        return len(seen)

    size = sw.Mesh.parse(mesh).size
    assert sw.simulate(size, partial(run, prove=True)) == sw.simulate(size, partial(run, prove=False))


def test_an_error_of_a_hook_of_the_program_stays_what_it_is() -> None:
    class EnoughError(Exception):
        """Ends a forward early."""

    def stop(*_: Any) -> None:
        raise EnoughError

    def put(engine: sw.Engine) -> None:
        engine.model.get_submodule("block.down").register_forward_hook(stop)

    with pytest.raises(EnoughError):
        sw.simulate(2, lambda channel: train(channel, between(torch.tanh), plan_of(CUT), act=put))


def test_hooks_of_the_program_are_watched_in_inference_mode() -> None:
    def run(channel: sw.Channel, *, writes: bool = False) -> int:
        seen: list[Any] = []
        engines: list[sw.Engine] = []
        train(channel, between(torch.tanh), plan_of(CUT), steps=0, act=engines.append)
        model = engines[0].model
        down = model.get_submodule("block.down")
        down.register_forward_hook(lambda *given: seen.append(given))
        if writes:
            down.register_forward_hook(lambda module, args, output: multiplied_past_the_count(module, output))
        with torch.inference_mode():
            engines[0].predict(WORDS, lambda inputs: model(inputs["words"]))
        return len(seen)

    assert sw.simulate(2, run) == [1, 1]
    with pytest.raises(ModelError, match=r"A hook of the program changes values of 'block\.down'"):
        sw.simulate(2, partial(run, writes=True))


def test_what_cannot_be_compared_is_told() -> None:
    """A cut that begins on one stage and ends on the next."""
    stages = sw.Pipeline(stages={"embedding": 0, "norm": 0, "block.up": 0, "block.down": 1, "head": 1})
    plan = plan_of(CUT, "pp=2,tp=2", pipeline=stages)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.simulate(4, lambda channel: train(channel, between(torch.tanh), plan))
    told = [str(each.message) for each in caught if "not compared with the uncut module: 'block'" in str(each.message)]
    assert told
    assert all("it runs on several stages of the pipeline" in each for each in told)


@pytest.mark.parametrize(("mesh", "name", "told"), [("tp=2", "", "the model itself"), ("pp=2,tp=2", "block", "block")])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_around_all_that_is_compared_are_told(mesh: str, name: str, told: str, before: bool) -> None:
    """Of the model, or of a module on a stage."""

    def put(engine: sw.Engine) -> None:
        module = engine.model.get_submodule(name)
        if before:
            module.register_forward_pre_hook(lambda module, *given: given, with_kwargs=True)
        else:
            module.register_forward_hook(lambda module, args, output: output * 2)

    stages: dict[str, Any] = {"pipeline": ON_TWO} if "pp" in mesh else {}
    plan = plan_of(CUT, mesh, **stages)
    with pytest.warns(UserWarning, match=f"not compared .*{told}': hooks of the program change what it reads or gives"):
        sw.simulate(plan.mesh.size, lambda channel: train(channel, between(torch.tanh), plan, act=put))
