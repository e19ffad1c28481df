"""Plans of tensor parallelism are proved by the first forward: wrong ones are refused, right ones leave no trace."""

import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm.recorded import Recorded
from shardwise.engine.wrapping import structures_of
from shardwise.errors import ModelError
from tests.engine.pipeline.oracle import adamw

WIDTH, WIDE = 8, 24


class Between(nn.Module):
    """Two linear maps with a function between, which may mix what is cut."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], *, parts: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE * parts)
        self.down = nn.Linear(WIDE, WIDTH)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.between(self.up(x)))
        return out


class Heads(nn.Module):
    """Attention whose view takes whatever is left for positions, as that of OPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, WIDTH // 4
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        shape = (rows, -1, self.num_heads, self.head_dim)
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class Experts(nn.Module):
    """Two experts in bare parameters, and a bias that begins as zeros."""

    def __init__(self, *, alternate: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2, 2 * WIDE, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(2, WIDTH, WIDE) / 5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.alternate = alternate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.bias.expand_as(x)
        for first, last in zip(self.gate_up, self.down, strict=True):
            both = functional.linear(x, first)
            gate, up = (both[..., 0::2], both[..., 1::2]) if self.alternate else both.chunk(2, -1)
            total = total + functional.linear(torch.sigmoid(gate) * up, last)
        return total


class Net(nn.Module):
    """A block between an embedding and a head."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.block = block
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(words))
        out: torch.Tensor = self.head(x + self.block(x))
        return out


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.sigmoid(gate) * up


def in_eights(x: torch.Tensor) -> torch.Tensor:
    """A softmax over units of eight; what is no whole number of them takes from the next position."""
    return x.reshape(len(x), -1, 8).softmax(-1).reshape(x.shape)


CUT = {"block.up": "column", "block.down": "row"}
EXPERTS = {"block": "sum", "block.down": "row", "block.bias": "once"}
ATTENTION = {"block.[qkv]": "column", "block.out": "row"}

FAULTS: dict[str, tuple[Callable[[], nn.Module], Mapping[str, str]]] = {
    "order of fused parts": (lambda: Between(gated, parts=2), CUT),
    "order of alternating parts": (lambda: Experts(alternate=True), {**EXPERTS, "block.gate_up": "packed_colwise"}),
    "order of bare parts": (Experts, {**EXPERTS, "block.gate_up": "column"}),
    "missing heads": (Heads, ATTENTION),
    "mean": (lambda: Between(lambda x: torch.relu(x - x.mean(-1, keepdim=True))), CUT),
    "softmax": (lambda: Between(lambda x: x.softmax(-1)), CUT),
    "wrong unit": (lambda: Between(in_eights), {"block.up": "column(unit=2)", "block.down": "row(unit=2)"}),
    "missing sum": (Experts, {"block.gate_up": "packed_colwise", "block.down": "row"}),
    "bias that counts twice": (
        Experts,
        {"block": "sum", "block.gate_up": "packed_colwise", "block.down": "row"},
    ),
}

RIGHT: dict[str, tuple[Callable[[], nn.Module], Mapping[str, str]]] = {
    "fused parts": (
        lambda: Between(gated, parts=2),
        {"block.up": "column(parts=2)", "block.down": "row"},
    ),
    "alternating parts": (lambda: Experts(alternate=True), {**EXPERTS, "block.gate_up": "column(unit=2)"}),
    "bare parts": (Experts, {**EXPERTS, "block.gate_up": "packed_colwise"}),
    "heads": (Heads, {**ATTENTION, "block": "heads"}),
    "softmax of what is gathered": (
        lambda: Between(lambda x: x.softmax(-1)),
        {"block.up": "colwise_gather_output", "block.down": "rowwise_split_input"},
    ),
    "units": (lambda: Between(in_eights), {"block.up": "column(unit=8)", "block.down": "row(unit=8)"}),
}


class Shift(nn.Module):
    """Mixes positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 1)


class Shifted(Between):
    """What is cut, behind what mixes positions."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.shift = Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.shift(x))


class InTraining(nn.Module):
    """Computes something else while it is trained, behind dropout of two kinds."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.change = (
            nn.Linear(WIDTH, WIDE),
            nn.Linear(WIDE, WIDTH),
            nn.Dropout(),
            change,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.dropout(self.drop(self.up(x)), 0.3, self.training)
        out: torch.Tensor = self.down(self.change(h) if self.training else h)
        return out


FAULTS["mean in training"] = (lambda: InTraining(lambda h: h - h.mean(-1, keepdim=True)), CUT)
RIGHT["training"] = (lambda: InTraining(torch.tanh), CUT)
RIGHT["noise in training"] = (lambda: InTraining(lambda h: h + torch.randn_like(h)), CUT)
SHIFTED = {"block.0.up": "column", "block.0.down": "row"}
FAULTS["wrong sequence"] = (lambda: nn.Sequential(Shifted()), {**SHIFTED, "block.0.shift": "sequence"})


def plan_of(rules: Mapping[str, str], mesh: str = "tp=2", *, compute: str | None = None, **others: Any) -> sw.Plan:
    sizes = {name: int(size) for name, size in (each.split("=") for each in mesh.split(","))}
    return sw.Plan(
        mesh=sw.Mesh(**sizes),
        tensor=sw.Tensor(rules=rules, prove=others.pop("prove", True)),
        precision=sw.Precision(compute=compute),
        **others,
    )


def train(
    channel: sw.Channel,
    make: Callable[[], nn.Module],
    plan: sw.Plan,
    *,
    double: bool = False,
    steps: int = 2,
    act: Callable[[sw.Engine], object] = lambda _: None,
) -> list[float]:
    torch.manual_seed(0)
    model = Net(make())
    engine = sw.parallelize(
        model.double() if double else model,
        plan,
        optimizer=adamw,
        loss=lambda output, batch: functional.cross_entropy(output.flatten(0, 1).float(), batch["words"].flatten()),
        channel=channel,
    )
    act(engine)
    words = torch.arange(48).view(8, 6) * 3
    return [engine.step({"words": (words + at) % 11}).loss for at in range(steps)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_every_dtype(fault: str, dtype: str) -> None:
    make, rules = FAULTS[fault]
    compute = dtype if dtype in ("bfloat16", "float16") else None
    plan = plan_of(rules, compute=compute)
    with pytest.raises(ModelError, match=r"'block.*' .* gives other numbers when it is cut") as caught:
        sw.simulate(2, lambda channel: train(channel, make, plan, double=dtype == "float64"))
    numbers = re.search(r"differs by (\S+) .* rounding gives (\S+)\. The rules in it", str(caught.value))
    assert numbers is not None
    # Half precision is computed as float32: rounding does not hide a fault.
    assert float(numbers[2]) < 1e-5 < 100 * float(numbers[2]) + 1e-2 < 1e-1 + float(numbers[1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_plan_is_proved_and_no_bit_is_changed(case: str, dtype: str) -> None:
    make, rules = RIGHT[case]
    compute = "bfloat16" if dtype == "bfloat16" else None

    def run(channel: sw.Channel, prove: bool) -> list[float]:
        return train(channel, make, plan_of(rules, compute=compute, prove=prove), double=dtype == "float64")

    assert sw.simulate(2, lambda channel: run(channel, True)) == sw.simulate(2, lambda channel: run(channel, False))


class Busy(nn.Module):
    """Everything that a second forward could disturb: dropout, statistics, counters, lists, caches, checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Between(torch.tanh)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.calls = 0
        self.seen: list[int] = []
        self.last: torch.Tensor
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        cache = Cache()
        first = self.pass_on(x, cache)
        second = self.pass_on(x, cache)  # twice
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
        ("tp=2", {}),
        ("tp=3", {"merge": sw.Merge(microbatches=3)}),
        ("pp=2,tp=2", {"pipeline": sw.Pipeline(stages={"embedding": 0, "norm": 0, "block": 1, "head": 1})}),
        ("dp_shard=2,tp=2", {"sharding": sw.Sharding(stage=2)}),
        ("dp_shard=2,tp=2", {"sharding": sw.Sharding(stage=3)}),
        (
            "pp=2,dp_shard=2,tp=2",
            {
                "sharding": sw.Sharding(stage=3),
                "pipeline": sw.Pipeline(stages={"embedding": 0, "norm": 0, "block": 1, "head": 1}),
                "merge": sw.Merge(microbatches=2),
            },
        ),
        ("dp_shard=2,tp=2", {"sharding": sw.Sharding(stage=3, units=("block.inner.*", "."))}),
    ],
    ids=["tp2", "tp3", "pp", "stage2", "stage3", "pp stage3", "stage3 in small units"],
)
def test_the_proof_leaves_no_trace(mesh: str, others: Mapping[str, Any]) -> None:
    rules = {"block.inner.up": "column", "block.inner.down": "row", "embedding": "vocab", "head": "vocab"}
    kept: list[Any] = []

    def run(channel: sw.Channel, prove: bool) -> tuple[Any, ...]:
        engines: list[sw.Engine] = []
        plan = plan_of(rules, mesh, prove=prove, **others)
        losses = train(channel, Busy, plan, act=engines.append)
        (engine,) = engines
        busy = engine.model.block
        assert isinstance(busy, Busy)
        kept.append(engine._computation.proof.unproved)
        state = {name: tensor.tolist() for name, tensor in engine.model.named_buffers() if not tensor.is_meta}
        return losses, state, busy.calls, busy.seen, engine.counters, torch.rand(2).tolist()

    size = math.prod(int(each.split("=")[1]) for each in mesh.split(","))
    proved = sw.simulate(size, lambda channel: run(channel, True))
    assert proved == sw.simulate(size, lambda channel: run(channel, False))
    assert not any(kept)


def test_after_the_first_step_nothing_is_left_of_the_proof() -> None:
    def run(channel: sw.Channel) -> None:
        recorded = Recorded(channel)
        purposes: list[list[str]] = []
        make, rules = RIGHT["bare parts"]
        engines: list[sw.Engine] = []
        train(recorded, make, plan_of(rules), steps=1, act=engines.append)
        (engine,) = engines
        purposes.append([call.purpose for call in recorded.calls])
        for name, module in engine.model.named_modules():
            assert "_Watch" not in str(structures_of(vars(module).get("forward"))), name
        before = len(recorded.calls)
        engine.step({"words": torch.ones(8, 6, dtype=torch.int64)})
        purposes.append([call.purpose for call in recorded.calls[before:]])
        ours = [[each for each in listed if "proof of tensor.rules" in each] for listed in purposes]
        assert ours[0]
        assert not ours[1]

    sw.simulate(2, run)


class Sometimes(nn.Module):
    """A block that runs for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Between(lambda x: x.softmax(-1))
        self.runs = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.runs else x


def test_what_is_first_called_later_is_proved_then() -> None:
    rules = {"block.inner.up": "column", "block.inner.down": "row"}

    def run(channel: sw.Channel) -> None:
        engines: list[sw.Engine] = []
        train(channel, Sometimes, plan_of(rules, "dp_shard=2,tp=2"), steps=2, act=engines.append)
        engine = engines[0]
        engine.model.block.runs = True  # type: ignore[union-attr]
        engine.evaluate({"words": torch.ones(8, 6, dtype=torch.int64)})

    with pytest.raises(ModelError, match=r"'block.inner' \(Between\) gives other numbers"):
        sw.simulate(4, run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_ranks_that_skip_microbatches_prove_in_step(stage: int) -> None:
    """The first data rank skips the first microbatch: under stage 3 it gathers what the other one gathers."""

    def run(channel: sw.Channel, fault: bool) -> tuple[list[float], Any]:
        make, rules = (FAULTS if fault else RIGHT)["order of bare parts" if fault else "bare parts"]
        torch.manual_seed(0)
        engine = sw.parallelize(
            Net(make()),
            plan_of(rules, "dp_shard=2,tp=2", sharding=sw.Sharding(stage=stage), merge=sw.Merge(microbatches=2)),
            optimizer=adamw,
            loss=lambda output, batch: functional.cross_entropy(output.flatten(0, 1), batch["words"].flatten()),
            loss_weight=lambda batch: float(batch["weight"].sum()),
            channel=channel,
        )
        weight = torch.tensor([0.0, 0.0, 1.0, 1.0]) if channel.rank < 2 else torch.ones(4)
        words = torch.arange(24).view(4, 6) % 11
        return [engine.step({"words": words, "weight": weight}).loss for _ in range(2)], engine._computation.proof

    for _, proof in sw.simulate(4, lambda channel: run(channel, False)):
        assert not proof._watched
        assert not proof.unproved
    with pytest.raises(ModelError, match="gives other numbers"):
        sw.simulate(4, lambda channel: run(channel, True))


@pytest.mark.parametrize("way", ["step", "evaluate", "predict"])
def test_all_ranks_refuse_before_anything_is_updated(way: str) -> None:
    make, rules = FAULTS["softmax"]

    def run(channel: sw.Channel) -> str:
        engines: list[sw.Engine] = []
        # Data ranks predict each for itself.
        mesh = "tp=2" if way == "predict" else "dp_shard=2,tp=2"
        train(channel, make, plan_of(rules, mesh), steps=0, act=engines.append)
        engine = engines[0]
        before = {piece: tensor.clone() for piece, tensor in engine.state().items()}
        batch = {"words": torch.ones(8, 6, dtype=torch.int64)}
        more = [lambda inputs: engine.model(inputs["words"])] if way == "predict" else []
        with pytest.raises(ModelError, match="gives other numbers") as caught:
            getattr(engine, way)(batch, *more)
        assert all(torch.equal(tensor, before[piece]) for piece, tensor in engine.state().items())
        return str(caught.value)

    assert len(set(sw.simulate(2 if way == "predict" else 4, run))) == 1


def test_a_fault_behind_an_error_is_what_is_refused() -> None:
    """A norm of all outputs: torch's words of sizes do not name the rule."""

    def norm() -> nn.Module:
        block = Between(torch.tanh)
        block.between = nn.LayerNorm(WIDE)
        return block

    with pytest.raises(ModelError, match=r"'block' \(Between\) fails when it is cut, and runs with whole") as caught:
        sw.simulate(2, lambda channel: train(channel, norm, plan_of(CUT)))
    assert "in 'block.between' (LayerNorm, without a rule in tensor.rules), which was given (8, 6, 12)" in str(
        caught.value
    )


def test_an_error_of_the_batch_stays_what_it_is() -> None:
    def run(channel: sw.Channel) -> None:
        engines: list[sw.Engine] = []
        train(channel, lambda: Between(torch.tanh), plan_of(CUT), steps=0, act=engines.append)
        engines[0].step({"words": torch.full((8, 6), 99)})

    with pytest.raises(IndexError):
        sw.simulate(2, run)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_region_that_is_placed_on_a_stage_is_proved_there(stage: int) -> None:
    make, rules = FAULTS["softmax"]
    stages = {"embedding": 0, "norm": 0, "block": stage, "head": 1}
    plan = plan_of(rules, "pp=2,tp=2", pipeline=sw.Pipeline(stages=stages))
    with pytest.raises(ModelError, match=r"'block' \(Between\) gives other numbers"):
        sw.simulate(4, lambda channel: train(channel, make, plan))


def test_what_cannot_be_compared_is_told() -> None:
    """A cut that begins on one stage and ends on the next."""
    stages = {"embedding": 0, "norm": 0, "block.up": 0, "block.down": 1, "head": 1}
    plan = plan_of(CUT, "pp=2,tp=2", pipeline=sw.Pipeline(stages=stages))

    def run(channel: sw.Channel) -> dict[str, str]:
        engines: list[sw.Engine] = []
        train(channel, lambda: Between(torch.tanh), plan, act=engines.append)
        return dict(engines[0]._computation.proof.unproved)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = sw.simulate(4, run)
    assert all(result == {"block": "it runs on several stages of the pipeline"} for result in results)
    assert any("not compared with the uncut module: 'block'" in str(each.message) for each in caught)


def test_the_proof_keeps_no_model_alive() -> None:
    def run(channel: sw.Channel) -> None:
        engines: list[sw.Engine] = []
        make, rules = RIGHT["fused parts"]
        train(channel, make, plan_of(rules), act=engines.append)
        kept = weakref.ref(engines.pop().model)
        gc.collect()
        assert kept() is None

    sw.simulate(2, run)
