"""`engine.generate` gives the tokens that `generate` of one process gives, under any plan, by any way of decoding.

Also what loops of reinforcement learning do between updates: lists of prompts and inputs, frozen engines, inner calls.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.covering import covering
from tests.engine.channels import GoesOnAlone
from tests.engine.loops import begun, mean_square
from tests.engine.pipeline.transformers_models import DECODER, MAKERS, sentences
from tests.engine.refusals import same_error_everywhere
from tests.engine.tower import TP, on_ranks, tower
from tests.oracle.program import seeded, sgd
from tests.refusals import Refusals

SHORT: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 2}


def llama() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    sizes = {**DECODER, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return seeded(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)))().double()


def prompts(seed: int = 0, rows: int = 3) -> dict[str, torch.Tensor]:
    """[rows, 5] tokens, some padded on the left."""
    batch = sentences(seed)
    return {name: batch[name].flip(1)[:rows].contiguous() for name in ("input_ids", "attention_mask")}


def in_one_process(model: nn.Module, inputs: Any, seed: int = 7, **kwargs: Any) -> torch.Tensor:
    """What a plain program gets."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens: torch.Tensor = model.eval().generate(**inputs, **SHORT, **kwargs)  # type: ignore[operator]
        return tokens


def under(plan: sw.Plan, model: nn.Module, channel: sw.Channel) -> sw.Engine:
    return sw.parallelize(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), channel=channel)


def named(value: Any) -> str:
    if isinstance(value, sw.Plan):
        return f"{value.mesh} {value.sharding.stage}"
    if isinstance(value, str):
        return value
    return value.__name__ if callable(value) else " ".join(value) if isinstance(value, tuple) else str(value)


def mesh(text: str, stage: int = 1, *, tp: bool = False) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh.parse(text),
        sharding=sw.Sharding(stage=3, bucket_bytes=4000) if stage == 3 else sw.Sharding(stage=stage),
        tensor=sw.Tensor(rules="auto" if tp else None),
    )


class Apart(GoesOnAlone):
    """No rank can read what another has: all must gather together."""

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return Apart(super().over(ranks))

    def share(self, num_bytes: int) -> None:
        return None


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 12},
    "static": {"do_sample": False, "cache_implementation": "static"},
}
FIRST = ("greedy", "beams", "sampled")


def mamba() -> nn.Module:
    return MAKERS["mamba"]()().double()


def gpt2() -> nn.Module:
    return MAKERS["gpt2"]()().double()


def t5() -> nn.Module:
    return MAKERS["t5"]()().double()


STAGED, STAGED_DATA, DATA = mesh("pp=2"), mesh("pp=2,dp_shard=2", 3), mesh("dp_shard=2", 3)


@pytest.mark.parametrize(
    ("make", "plan", "gather", "ways", "on_device"),
    [
        (llama, mesh("dp_shard=2", 2), "each", FIRST, False),
        (gpt2, DATA, "each", FIRST, False),
        (gpt2, DATA, "once", ("greedy",), True),
        (gpt2, STAGED, "each", FIRST, False),
        (llama, STAGED_DATA, "each", ("sampled", "static"), False),
        (t5, STAGED_DATA, "once", ("beams",), False),
        (mamba, mesh("pp=3"), "each", ("greedy",), False),
        (llama, mesh("pp=2,tp=2", tp=True), "each", ("beams",), False),
        pytest.param(mamba, DATA, "once", FIRST, False, marks=pytest.mark.stress),
        pytest.param(t5, mesh("tp=2", tp=True), "each", ("beams", "sampled"), False, marks=pytest.mark.stress),
    ],
    ids=named,
)
def test_tokens_are_those_of_one_process(
    fake: str, make: Callable[[], nn.Module], plan: sw.Plan, gather: Any, ways: Sequence[str], on_device: bool
) -> None:
    """It leaves nothing behind: the next update is that of an engine that generated nothing."""
    wanted = {way: in_one_process(make(), prompts(), **WAYS[way]) for way in ways}
    assert "beams" not in ways or "sampled" not in ways or not torch.equal(wanted["beams"], wanted["sampled"])
    batch = {name: rows[:4] for name, rows in sentences(1).items()}

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine, other = under(plan, make().train(), channel), under(plan, make().train(), channel)
        state = torch.get_rng_state()
        given = {way: engine.generate(prompts(), seed=7, gather=gather, **SHORT, **WAYS[way]) for way in ways}
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in engine.model.modules())
        assert engine.step(batch).loss == other.step(batch).loss
        assert all(torch.equal(engine.state()[piece], tensor) for piece, tensor in other.state().items())
        assert {each.device for each in given.values()} == {channel.device}
        return {way: tokens.cpu() for way, tokens in given.items()}

    for given in sw.simulate(plan.mesh.size, run, device=fake if on_device else "cpu"):
        assert given.keys() == wanted.keys()
        assert all(torch.equal(given[way], tokens) for way, tokens in wanted.items())


@pytest.mark.parametrize(("text", "gather"), [("dp_shard=3", "once"), ("pp=2,dp_shard=3", "each")])
def test_data_ranks_go_on_until_the_last_has_finished(text: str, gather: Any) -> None:
    plan, lengths, greedy = mesh(text, 3), [2, 9, 0], {"pad_token_id": 0, "do_sample": False}

    def inputs_of(rank: int) -> Any:
        return {name: rows[:, : 3 + rank] for name, rows in prompts(rank, rows=1 + rank).items()}

    model: Any = llama().eval()
    wanted = [model.generate(**inputs_of(rank), max_new_tokens=lengths[rank], **greedy) for rank in range(2)]
    batch = sentences(1)

    def run(channel: sw.Channel) -> tuple[int, torch.Tensor, float]:
        engine = under(plan, llama(), Apart(channel))
        rank = plan.mesh.data_rank(channel.rank)
        num, tokens, gathers = lengths[rank], list[torch.Tensor](), list[int]()
        for inputs in (inputs_of(rank), {name: each[:0] for name, each in inputs_of(rank).items()}):
            tokens.append(engine.generate(inputs if num else None, gather=gather, max_new_tokens=num, **greedy))
            assert len(tokens[-1]) == (len(inputs["input_ids"]) if num else 0)
        for more in (0, 4):  # whatever the length
            before, longer = engine.counters.all_gathers, {"max_new_tokens": (num or 1) + more, **greedy}
            engine.generate(inputs_of(rank) if num else None, gather="once", **longer)
            gathers.append(engine.counters.all_gathers - before)
        assert gathers[0] == gathers[1] > 0
        return rank, tokens[0], engine.step({name: rows[rank::3] for name, rows in batch.items()}).loss

    results = sw.simulate(plan.mesh.size, run)
    assert len({loss for _, _, loss in results}) == 1
    for rank, tokens, _ in results:
        assert rank == 2 or torch.equal(tokens, wanted[rank])


class Until(nn.Module):
    """Generates by values, with a state that it hands on, and calls a layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 6), nn.GRUCell(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        state = self.cell(torch.tanh(self.first(x)), state)
        return self.last(state), {"state": state}

    @torch.no_grad()
    def generate(self, x: torch.Tensor, *, most: int) -> list[torch.Tensor]:
        """Until a sum is large, or `most` times."""
        state, rows = torch.tanh(self.first(x)), [x]
        while len(rows) < most and (len(rows) == 1 or rows[-1].sum() > 1.2):
            y, kept = self(rows[-1], state)
            state = kept["state"]
            rows.append(y.abs() + torch.rand_like(y) * 0.1)
        return rows


class Memory:
    """A cache of a program's own: of each layer what it gave and how often, and how many calls there were."""

    def __init__(self) -> None:
        self.slots: list[Any] = []
        self.num = torch.zeros((), dtype=torch.int64)


class Recalling(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.mix, self.number = nn.Linear(4, 4), number

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        while len(memory.slots) <= self.number:
            memory.slots.append(SimpleNamespace(rows=torch.empty(0, 4), length=0, last={}))
        slot = memory.slots[self.number]
        y = torch.tanh(self.mix(x))
        slot.rows, slot.last["given"] = torch.cat([slot.rows, y]), y
        slot.length = len(slot.rows)
        memory.num.add_(1)
        out: torch.Tensor = y + slot.rows.mean(0, keepdim=True)
        return out


class Recollection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recalling(number) for number in range(4))

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        out: torch.Tensor = x * (1 + memory.slots[0].length / 10)
        return out

    @torch.no_grad()
    def generate(self, x: torch.Tensor, *, most: int) -> list[torch.Tensor]:
        """Decides by what the cache of any layer says."""
        memory, found = Memory(), []
        while not memory.slots or memory.slots[3].length + memory.slots[0].length < most:
            x = self(x, memory)
            shown = [int(memory.num), *memory.slots[1].last["given"].shape, len(memory.slots)]
            found += [x, torch.tensor(shown)]
        return found


@pytest.mark.parametrize(
    ("kind", "most", "plan"),
    [(Until, 40, STAGED), (Until, 40, DATA), (Recollection, 10, STAGED), (Recollection, 10, STAGED_DATA)],
    ids=named,
)
def test_any_loop_that_decides_by_values_and_any_cache_is_alike_on_all_ranks(
    kind: Any, most: int, plan: sw.Plan
) -> None:
    x = torch.full((2, 4), 0.01)
    with torch.random.fork_rng(devices=[]):
        model = seeded(kind)()
        torch.manual_seed(3)
        wanted = model.generate(x, most=most)
    assert 2 < len(wanted) < 40

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        found: list[torch.Tensor] = under(plan, seeded(kind)(), channel).generate({"x": x}, seed=3, most=most)
        return found

    for found in sw.simulate(plan.mesh.size, run):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_processors_criteria_and_streamers_are_passed_on() -> None:
    def only_odd(input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(0, scores.shape[1], 2), -math.inf)

    def three_more(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 8)

    def generated(generate: Callable[..., Any]) -> tuple[list[int], torch.Tensor]:
        given: list[int] = []
        streamer = SimpleNamespace(
            put=lambda value: given.extend(value.flatten().tolist()), end=lambda: given.append(-1)
        )
        asked = {"logits_processor": [only_odd], "stopping_criteria": [three_more], "streamer": streamer}
        found = generate(**asked, return_dict_in_generate=True, do_sample=True)
        return given, found.sequences

    def run(channel: sw.Channel) -> Any:
        engine = under(mesh("pp=2"), llama(), channel)
        return generated(partial(engine.generate, prompts(rows=1), seed=7, **SHORT))

    streamed, sequences = generated(partial(in_one_process, llama(), prompts(rows=1)))
    for given, found in sw.simulate(2, run):
        assert given == streamed
        assert torch.equal(found, sequences)


@pytest.mark.parametrize("text", ["dp_shard=2", "pp=2"])
def test_it_computes_in_the_dtypes_of_the_plan_and_the_region_of_the_caller(text: str) -> None:
    plan = sw.Plan(mesh=sw.Mesh.parse(text), precision=sw.Precision(compute="bfloat16"))
    narrow = in_one_process(MAKERS["gpt2"]()().bfloat16(), prompts(), do_sample=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = in_one_process(MAKERS["gpt2"]()(), prompts(), do_sample=False)

    def run(channel: sw.Channel) -> tuple[torch.Tensor, torch.Tensor]:
        model = MAKERS["gpt2"]()()
        model.get_submodule("transformer.h.0").requires_grad_(False)
        first = under(plan, model, channel).generate(prompts(), do_sample=False, **SHORT)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other = under(sw.Plan(mesh=plan.mesh), MAKERS["gpt2"]()(), channel)
            return first, other.generate(prompts(), do_sample=False, **SHORT)

    for found, found_cast in sw.simulate(2, run):
        assert torch.equal(found, narrow)
        assert torch.equal(found_cast, cast)


def test_without_a_seed_numbers_come_from_the_step_and_the_data_rank() -> None:
    def run(channel: sw.Channel) -> list[list[int]]:
        engine, found = under(mesh("dp_shard=2"), llama(), channel), []
        for is_last in (False, False, True):
            if is_last:
                engine.step({name: rows[:2] for name, rows in sentences(1).items()})
            found.append(engine.generate(prompts(), do_sample=True, **SHORT).tolist())
        return found

    one, other = sw.simulate(2, run)
    assert one[0] == one[1] != one[2]
    assert one[0] != other[0]


# What loops of reinforcement learning do between updates --------------------------------------------------------------


PLANS = [mesh("single"), mesh("dp_shard=2", 3), mesh("pp=2,dp_shard=2", 3), mesh("tp=2", tp=True)]
SHARES = ([[0, 1, 2], [3]], [[0, 1, 2, 3], []])
"""Which of four prompts each of two data ranks has."""
SAMPLING: dict[str, Any] = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}


def prompt(number: int) -> dict[str, torch.Tensor]:
    """Prompts of unlike lengths and numbers of rows."""
    return {name: rows[:, : 3 + number % 3] for name, rows in prompts(number, rows=1 + number % 2).items()}


@pytest.fixture(scope="module")
def wanted() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens of each prompt in one process, and the model's logits for them."""
    tokens = [in_one_process(llama(), prompt(number), seed=number, **SAMPLING) for number in range(4)]
    with torch.no_grad():
        return [(each, llama().eval()(each).logits) for each in tokens]


@pytest.mark.parametrize(
    ("plan", "share", "gather", "is_apart"),
    covering(PLANS, SHARES, ("each", "once"), (False, True), strength=2),
    ids=lambda each: named(each) if isinstance(each, sw.Plan) else str(each),
)
def test_data_ranks_have_unlike_numbers_of_prompts_and_of_inputs(
    plan: sw.Plan, share: Sequence[Sequence[int]], gather: Any, is_apart: bool, wanted: Any
) -> None:
    """`is_apart`: no rank can read what another has, so that all gather together."""

    def run(channel: sw.Channel) -> list[int]:
        engine = under(plan, llama().train(), Apart(channel) if is_apart else channel)
        mine = list(range(4) if plan.mesh.num_data_ranks == 1 else share[plan.mesh.data_rank(channel.rank)])
        state = torch.get_rng_state()
        tokens = engine.generate([prompt(number) for number in mine], seed=mine, gather=gather, **SHORT, **SAMPLING)
        logits = engine.predict(
            [{"input_ids": each} for each in tokens], lambda inputs: engine.model(inputs["input_ids"]).logits
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in engine.model.modules())
        assert len(tokens) == len(logits) == len(mine)
        for number, found, other in zip(mine, tokens, logits, strict=True):
            assert torch.equal(found.cpu(), wanted[number][0])
            assert torch.allclose(other.cpu(), wanted[number][1], atol=1e-12)
        return mine

    assert {each for mine in sw.simulate(plan.mesh.size, run) for each in mine} == {0, 1, 2, 3}


def test_one_seed_goes_on_over_all_prompts() -> None:
    model: Any = llama().eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = [model.generate(**prompt(number), **SHORT, **SAMPLING) for number in range(2)]
    engine = under(sw.Plan(), llama(), sw.comm.alone())
    first, none, last = engine.generate([prompt(0), None, prompt(1)], seed=3, **SHORT, **SAMPLING)
    assert torch.equal(first, expected[0])
    assert torch.equal(last, expected[1])
    assert none.shape == (0, 0)


@pytest.mark.parametrize(
    ("plan", "call"),
    [
        *[(mesh("dp_shard=2", 0), call) for call in ("generate", "predict", "evaluate", "step")],
        *[(mesh("dp_shard=2", 3), "predict"), (mesh("pp=2"), "generate")],
    ],
    ids=named,
)
def test_a_call_inside_of_a_loss_is_right_or_refused(plan: sw.Plan, call: str) -> None:
    batch = {"input_ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}

    def run(channel: sw.Channel, *, is_inside: bool = True) -> float:
        calls: list[Any] = []

        def loss(output: Any, _: Any) -> torch.Tensor:
            if calls:
                calls.pop()()
            found: torch.Tensor = output.loss
            return found

        engine = sw.parallelize(llama(), plan, optimizer=sgd, loss=loss, channel=channel)
        inner: dict[str, Any] = {
            "generate": lambda: engine.generate({"input_ids": batch["input_ids"]}, seed=1, **SHORT)
        }
        calls += [inner.get(call, lambda: getattr(engine, call)(batch))] if is_inside else []
        engine.step(batch)
        return engine.evaluate(batch).loss

    if call != "step" and plan.sharding.stage == 0:
        assert sw.simulate(2, run) == sw.simulate(2, partial(run, is_inside=False))
        return
    # By a fault of the program, as any error in a forward: it stops the ranks.
    with pytest.raises(ModelError, match=f"engine.{call} was called inside of engine.step.* make the inner call first"):
        sw.simulate(2, run)


@pytest.mark.parametrize("plan", PLANS, ids=named)
def test_a_frozen_model_needs_no_optimizer(plan: sw.Plan, tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> None:
        asked = sw.Plan(mesh=plan.mesh, sharding=plan.sharding, tensor=TP if plan.mesh.tp > 1 else sw.Tensor())
        model = tower().requires_grad_(False)
        engine = sw.parallelize(model, asked, optimizer=None, loss=mean_square, channel=channel)
        assert engine.optimizers == ()
        rows = {"input": torch.ones(2, 4)}
        before, loss = engine.predict(rows), engine.evaluate(rows).loss
        sw.save(tmp_path / "save", engine)
        sw.load(tmp_path / "save", engine)
        assert torch.equal(engine.predict(rows), before)
        assert engine.evaluate(rows).loss == loss

    on_ranks(plan, run)


# Refusals -------------------------------------------------------------------------------------------------------------


def generate(make: Callable[[], nn.Module], inputs: Any, **kwargs: Any) -> None:
    def run(channel: sw.Channel) -> None:
        begun(channel, make, mesh("pp=2")).generate(inputs, **kwargs)

    raise same_error_everywhere(2, run)


ROW = torch.ones(1, 4)
REFUSED = Refusals(
    "engine.generation",
    {
        "no generate": lambda: generate(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)), ROW),
        "an unknown gather": lambda: generate(Until, ROW, gather="never"),
        "a seed of halves": lambda: generate(Until, ROW, seed=0.5),
        "a list of lists": lambda: generate(Until, [[1.0]]),
        "seeds for one prompt": lambda: generate(Until, ROW, seed=[1]),
        "too many seeds": lambda: generate(Until, [ROW], seed=[1, 2]),
        "a list of halves": lambda: generate(Until, [ROW], seed=[0.5]),
        "an argument twice": lambda: generate(Until, {"x": ROW, "most": 3}, most=4),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_alike_on_all_ranks(case: str) -> None:
    REFUSED.check(case)
