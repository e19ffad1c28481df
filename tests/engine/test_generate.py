"""`engine.generate` gives the tokens that `generate` of one process gives, under any plan, by any way of decoding."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.engine.channels import GoesOnAlone
from tests.engine.expected import seeded
from tests.engine.pipeline import transformers_models as models
from tests.engine.pipeline.transformers_models import DECODER, VOCABULARY, sentences
from tests.engine.refusals import same_error_everywhere, two_layers

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 12},
    "static": {"do_sample": False, "cache_implementation": "static"},
}
FIRST = ("greedy", "beams", "sampled")
SHORT: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": 2}
STAGE_3 = sw.Sharding(stage=3, bucket_bytes=4000)


def llama() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    config = tf.LlamaConfig(
        **{**DECODER, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    )
    return seeded(lambda: tf.LlamaForCausalLM(config))().double()


def mamba() -> nn.Module:
    import transformers as tf

    config = tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=3)
    return seeded(lambda: tf.MambaForCausalLM(config))().double()


def gpt2() -> nn.Module:
    return models.gpt2_still()().double()


def t5() -> nn.Module:
    return models.t5()().double()


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
    return value.__name__ if callable(value) else " ".join(value)


def mesh(text: str, stage: int = 1, *, tp: bool = False) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh.parse(text),
        sharding=STAGE_3 if stage == 3 else sw.Sharding(stage=stage),
        tensor=sw.Tensor(rules="auto" if tp else None),
    )


@pytest.mark.parametrize(
    ("make", "plan", "gather", "ways"),
    [
        (llama, sw.Plan(), "each", FIRST),
        (llama, mesh("dp_shard=2", 2), "each", FIRST),
        (gpt2, mesh("dp_shard=2", 3), "each", FIRST),
        (mamba, mesh("dp_shard=2", 3), "once", FIRST),
        (gpt2, mesh("pp=2"), "each", FIRST),
        (llama, mesh("pp=2,dp_shard=2", 3), "each", ("sampled", "static")),
        (t5, mesh("pp=2,dp_shard=2", 3), "once", ("beams",)),
        (mamba, mesh("pp=3"), "each", ("greedy",)),
        (llama, mesh("pp=2,tp=2", tp=True), "each", ("beams",)),
        (t5, mesh("tp=2", tp=True), "each", ("beams", "sampled")),
    ],
    ids=named,
)
def test_tokens_are_those_of_one_process(
    make: Callable[[], nn.Module], plan: sw.Plan, gather: Any, ways: Sequence[str]
) -> None:
    wanted = {way: in_one_process(make(), prompts(), **WAYS[way]) for way in ways}
    assert "beams" not in ways or "sampled" not in ways or not torch.equal(wanted["beams"], wanted["sampled"])
    batch = {name: rows[:4] for name, rows in sentences(1).items()}

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine, other = under(plan, make().train(), channel), under(plan, make().train(), channel)
        state = torch.get_rng_state()
        given = {way: engine.generate(prompts(), seed=7, gather=gather, **SHORT, **WAYS[way]) for way in ways}
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in engine.model.modules())
        # It leaves nothing behind: the next update is that of an engine that generated nothing.
        assert engine.step(batch).loss == other.step(batch).loss
        assert all(torch.equal(engine.state()[piece], tensor) for piece, tensor in other.state().items())
        return given

    for given in sw.simulate(plan.mesh.size, run):
        assert given.keys() == wanted.keys()
        assert all(torch.equal(given[way], tokens) for way, tokens in wanted.items())


class Apart(GoesOnAlone):
    """No rank can read what another has: all must gather together."""

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return Apart(self._channel.over(ranks))

    def share(self, num_bytes: int) -> None:
        return None


@pytest.mark.parametrize(
    ("text", "gather"), [("dp_shard=3", "each"), ("dp_shard=3", "once"), ("pp=2,dp_shard=3", "each")]
)
def test_data_ranks_go_on_until_the_last_has_finished(text: str, gather: Any) -> None:
    plan = mesh(text, 3)
    lengths = [2, 9, 0]

    def inputs_of(rank: int) -> Any:
        return {name: rows[:, : 3 + rank] for name, rows in prompts(rank, rows=1 + rank).items()}

    wanted = [
        model.generate(**inputs_of(rank), max_new_tokens=num, pad_token_id=0, do_sample=False)
        for rank, num in enumerate(lengths[:2])
        for model in list[Any]([llama().eval()])
    ]
    batch = sentences(1)

    def run(channel: sw.Channel) -> tuple[int, torch.Tensor, float]:
        engine = under(plan, llama(), Apart(channel))
        rank = plan.mesh.data_rank(channel.rank)
        num = lengths[rank]
        tokens = torch.empty(0)
        for inputs in (inputs_of(rank), {name: each[:0] for name, each in inputs_of(rank).items()}):
            given = inputs if num else None
            found = engine.generate(given, gather=gather, max_new_tokens=num, pad_token_id=0, do_sample=False)
            tokens = found if len(tokens) == 0 and len(found) else tokens
            assert len(found) == (len(inputs["input_ids"]) if num else 0)
        before = engine.counters.all_gathers
        engine.generate(inputs_of(rank) if num else None, gather="once", max_new_tokens=num or 1, pad_token_id=0)
        assert engine.counters.all_gathers - before == len(engine._buffers.sharded)  # whatever the length
        return rank, tokens, engine.step({name: rows[rank::3] for name, rows in batch.items()}).loss

    results = sw.simulate(plan.mesh.size, run)
    assert len({loss for _, _, loss in results}) == 1
    for rank, tokens, _ in results:
        assert rank == 2 or torch.equal(tokens.cpu(), wanted[rank])


class Until(nn.Module):
    """Generates by values, with a state that it hands on, and calls a layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 6), nn.GRUCell(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        state = self.cell(torch.tanh(self.first(x)), state)
        return self.last(state), {"state": state}

    @torch.no_grad()
    def generate(self, x: torch.Tensor, *, most: int) -> dict[str, Any]:
        """Until a sum is large, or `most` times."""
        state, rows = torch.tanh(self.first(x)), [x]
        while len(rows) < most and (len(rows) == 1 or rows[-1].sum() > 1.2):
            y, kept = self(rows[-1], state)
            state = kept["state"]
            assert next(self.parameters()).device == x.device
            rows.append(y.abs() + torch.rand_like(y) * 0.1)
        return {"rows": rows, "num": len(rows)}


@pytest.mark.parametrize("plan", [mesh("pp=2"), mesh("pp=2,dp_shard=2", 3), mesh("dp_shard=2", 3)], ids=named)
def test_any_loop_that_decides_by_values_runs(plan: sw.Plan) -> None:
    make, x = seeded(Until), torch.full((2, 4), 0.01)
    with torch.random.fork_rng(devices=[]):
        model = make()
        torch.manual_seed(3)
        wanted = model.generate(x, most=40)
    assert 2 < wanted["num"] < 40

    def run(channel: sw.Channel) -> dict[str, Any]:
        found: dict[str, Any] = under(plan, make(), channel).generate({"x": x}, seed=3, most=40)
        return found

    for found in sw.simulate(plan.mesh.size, run):
        assert found["num"] == wanted["num"]
        assert all(map(torch.equal, found["rows"], wanted["rows"]))


class Memory:
    """A cache of a program's own."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.num = torch.zeros((), dtype=torch.int64)
        self.last: dict[int, torch.Tensor] = {}


class Slot:
    """What one layer keeps."""

    rows: torch.Tensor | None = None
    length = 0


class Recalling(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.mix, self.number = nn.Linear(4, 4), number

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        while len(memory.layers) <= self.number:
            memory.layers.append(Slot())
        slot = memory.layers[self.number]
        y: torch.Tensor = torch.tanh(self.mix(x))
        slot.rows = y if slot.rows is None else torch.cat([slot.rows, y])
        slot.length = len(slot.rows)
        memory.last[self.number] = y
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
        out: torch.Tensor = x * (1 + memory.layers[0].length / 10)
        return out

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> list[Any]:
        """Decides by what the cache of any layer says."""
        memory, found = Memory(), []
        while not memory.layers or memory.layers[3].length + memory.layers[0].length < 10:
            x = self(x, memory)
            found += [x, int(memory.num), sorted(memory.last), memory.last[1].shape, len(memory.layers)]
        return found


@pytest.mark.parametrize("plan", [mesh("pp=2"), mesh("pp=4"), mesh("pp=2,dp_shard=2", 3)], ids=named)
def test_a_cache_of_any_class_is_alike_on_all_ranks(plan: sw.Plan) -> None:
    x = torch.full((1, 4), 0.5)
    wanted = seeded(Recollection)().generate(x)
    assert len(wanted) == 25
    for found in sw.simulate(plan.mesh.size, lambda channel: under(plan, seeded(Recollection)(), channel).generate(x)):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.cpu(), other) if isinstance(one, torch.Tensor) else one == other


def test_processors_criteria_and_streamers_are_passed_on() -> None:
    import transformers as tf

    class NoEven(tf.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
            scores[:, ::2] = -float("inf")
            return scores

    class Streamed:
        def __init__(self) -> None:
            self.given: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.given += value.flatten().tolist()

        def end(self) -> None:
            self.given.append(-1)

    def three_more(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 8)

    def given(streamer: Streamed) -> dict[str, Any]:
        return {
            "logits_processor": tf.LogitsProcessorList([NoEven()]),
            "stopping_criteria": tf.StoppingCriteriaList([three_more]),
            "streamer": streamer,
            "return_dict_in_generate": True,
            "output_scores": True,
            "do_sample": True,
        }

    wanted_stream, inputs = Streamed(), prompts(rows=1)
    wanted: Any = in_one_process(llama(), inputs, **given(wanted_stream))

    def run(channel: sw.Channel) -> tuple[Any, list[int]]:
        streamer = Streamed()
        return under(mesh("pp=2"), llama(), channel).generate(
            inputs, seed=7, **SHORT, **given(streamer)
        ), streamer.given

    for found, streamed in sw.simulate(2, run):
        assert torch.equal(found.sequences, wanted.sequences)
        assert all(map(torch.equal, found.scores, wanted.scores))
        assert streamed == wanted_stream.given


@pytest.mark.parametrize("text", ["dp_shard=2", "pp=2"])
def test_it_computes_in_the_dtypes_of_the_plan_and_the_region_of_the_caller(text: str) -> None:
    plan = sw.Plan(mesh=sw.Mesh.parse(text), precision=sw.Precision(compute="bfloat16"))
    inputs = prompts()
    narrow = in_one_process(models.gpt2_still()().bfloat16(), inputs, do_sample=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = in_one_process(models.gpt2_still()(), inputs, do_sample=False)

    def run(channel: sw.Channel) -> tuple[torch.Tensor, torch.Tensor]:
        model = models.gpt2_still()()
        for parameter in model.transformer.h[0].parameters():  # type: ignore[union-attr, index]
            parameter.requires_grad_(False)
        first = under(plan, model, channel).generate(inputs, do_sample=False, **SHORT)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other = under(sw.Plan(mesh=plan.mesh), models.gpt2_still()(), channel)
            return first, other.generate(inputs, do_sample=False, **SHORT)

    for found, found_cast in sw.simulate(2, run):
        assert torch.equal(found, narrow)
        assert torch.equal(found_cast, cast)


def test_without_a_seed_numbers_come_from_the_step_and_the_data_rank() -> None:
    def run(channel: sw.Channel) -> list[torch.Tensor]:
        engine = under(mesh("dp_shard=2"), llama(), channel)
        found = [engine.generate(prompts(), do_sample=True, **SHORT) for _ in range(2)]
        engine.step({name: rows[:2] for name, rows in sentences(1).items()})
        return [*found, engine.generate(prompts(), do_sample=True, **SHORT)]

    one, other = sw.simulate(2, run)
    assert torch.equal(one[0], one[1])
    assert one[0].shape != other[0].shape or not torch.equal(one[0], other[0])
    assert one[0].shape != one[2].shape or not torch.equal(one[0], one[2])


@pytest.mark.parametrize(
    ("make", "inputs", "kwargs", "words"),
    [
        (two_layers, torch.ones(1, 4), {}, "has no generate method.* around engine.predict"),
        (Until, torch.ones(1, 4), {"gather": "never"}, "gather is 'never'; give \"each\""),
        (Until, torch.ones(1, 4), {"seed": 0.5}, "seed is 0.5; give a whole number"),
        (Until, [[1.0]], {}, "takes a tensor, tensors by name, or a list of such, not a list"),
        (Until, torch.ones(1, 4), {"seed": [1]}, r"seed is \[1\]; .* A list of prompts may have a list of seeds"),
        (Until, [torch.ones(1, 4)], {"seed": [1, 2]}, r"seed is \[1, 2\] for 1 prompts; give a whole number for each"),
        (Until, [torch.ones(1, 4)], {"seed": [0.5]}, r"seed is \[0.5\] for 1 prompts"),
        (Until, {"x": torch.ones(1, 4), "most": 3}, {"most": 4}, "was given most both in the inputs and as arguments"),
    ],
)
def test_what_cannot_be_is_refused_alike_on_all_ranks(
    make: Callable[[], nn.Module], inputs: Any, kwargs: Any, words: str
) -> None:
    def run(channel: sw.Channel) -> None:
        sw.parallelize(
            seeded(make)(),
            mesh("pp=2"),
            optimizer=torch.optim.SGD,
            loss=lambda output, _: output.mean(),
            channel=channel,
        ).generate(inputs, **kwargs)

    assert isinstance(same_error_everywhere(2, run), ShardwiseError)
    with pytest.raises(ShardwiseError, match=words):
        sw.simulate(2, run)


def test_a_forward_that_reads_a_value_of_a_stage_decides_as_in_one_process() -> None:
    class Reads(Until):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
            return super().forward(x if self.first(x).sum() > 0 else x + 1, state)

    x = torch.full((1, 4), 0.01)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        wanted = seeded(Reads)().generate(x, most=3)

    def run(channel: sw.Channel) -> Any:
        return under(mesh("pp=2"), seeded(Reads)(), channel).generate({"x": x}, seed=7, most=3)

    for found in sw.simulate(2, run):
        assert found["num"] == wanted["num"]
        assert all(torch.equal(*each) for each in zip(found["rows"], wanted["rows"], strict=True))


@pytest.mark.parametrize("plan", [mesh("dp_shard=2", 3), mesh("pp=2")], ids=named)
def test_on_a_device(fake: str, plan: sw.Plan) -> None:
    wanted = in_one_process(gpt2(), prompts(), do_sample=False)

    def run(channel: sw.Channel) -> tuple[torch.device, torch.Tensor]:
        tokens = under(plan, gpt2(), channel).generate(prompts(), do_sample=False, **SHORT)
        return tokens.device, tokens.cpu()

    for rank, (device, tokens) in enumerate(sw.simulate(2, run, device=fake)):
        assert device == torch.device(fake, rank)
        assert torch.equal(tokens, wanted)
