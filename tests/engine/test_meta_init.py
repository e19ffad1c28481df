"""First values for models built without any: the same whoever asks for which of them, and what the modules would do."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import alone
from shardwise.engine.meta_init import Initialisation, forget_initialised
from tests.engine.initialised import Build, assert_equal, built, initialise, initialised, one_by_one, tensors
from tests.engine.loops import begun, mean_square
from tests.engine.memory import peak_bytes
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import word_loss
from tests.oracle.comparison import assert_close
from tests.oracle.decoder import DECODER, Decoder
from tests.oracle.places import train, whole_state
from tests.oracle.program import adamw, plan_of
from tests.refusals import Refusals

SEED = 7
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 30),
        nn.BatchNorm1d(30),
        nn.Embedding(20, 30, padding_idx=3),
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.LSTM(5, 6, 2),
        nn.GRUCell(4, 5),
        nn.Bilinear(3, 4, 5),
        nn.PReLU(),
        nn.MultiheadAttention(16, 2, kdim=8, vdim=4, add_bias_kv=True),
        nn.Linear(8, 8, dtype=torch.bfloat16),
        nn.Transformer(16, 2, 1, 1, 24, batch_first=True),
    )


def of_transformers(kind: str, dtype: torch.dtype = torch.float32, head: str = "ForCausalLM", **sizes: Any) -> Build:
    def build() -> nn.Module:
        import transformers as tf  # seconds, which to collect tests does not take

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model: nn.Module = getattr(tf, kind + head)(getattr(tf, f"{kind}Config")(**sizes))
            return model
        finally:
            torch.set_default_dtype(before)

    return build


LLAMA = of_transformers("Llama", **SIZES, tie_word_embeddings=True)
GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 8, "n_head": 4, "vocab_size": 67, "n_positions": 16}
GPT2 = of_transformers("GPT2", head="LMHeadModel", **GPT2_SIZES, bos_token_id=1, eos_token_id=2)
MODELS: dict[str, Build] = {
    "plain": plain,
    "gpt2": GPT2,
    "llama": LLAMA,
    "llama in bfloat16": of_transformers("Llama", torch.bfloat16, **SIZES),
    "mixtral": of_transformers("Mixtral", **SIZES, num_key_value_heads=2, num_local_experts=4),
    "mamba": of_transformers("Mamba", head="Model", hidden_size=32, num_hidden_layers=2, vocab_size=67),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_do_not_depend_on_which_others_are_asked_for(name: str) -> None:
    """And are distributed as those of the model that initialises itself."""
    build = MODELS[name]
    expected, initialisation = initialised(build), Initialisation(built(build), 0)
    names = initialisation.names
    assert set(names) == expected.keys()
    for start in range(3):
        got = dict(initialisation.values(names[start::3]))
        assert list(got) == list(names[start::3])
        assert_equal(got, expected)
    assert_equal(one_by_one(built(build)), expected)
    torch.manual_seed(0)
    reference = tensors(build())
    assert expected.keys() == reference.keys()
    for name, each in reference.items():
        values = expected[name]
        assert (values.shape, values.dtype) == (each.shape, each.dtype), name
        own, other = values.double(), each.double()
        if torch.equal(own, other):  # constants
            continue
        # Two samples of n values from one distribution: their deviations differ by about the deviation / sqrt(n), and
        # so do their means. Ten times as much is exceeded by a wrong scale (GPT-2's residual projections: 4 times).
        assert values.numel() > 4, name
        bound = 10 * other.std() / values.numel() ** 0.5
        assert abs(own.std() - other.std()) <= bound, name
        assert abs(own.mean() - other.mean()) <= bound, name


def test_one_draw_is_of_the_seed_the_name_and_its_number_alone() -> None:
    def small() -> nn.Module:
        return nn.ModuleDict({"words": nn.Embedding(5, 3), "out": nn.Linear(3, 4)})

    values = initialised(small, seed=7)
    for name, key, fill in (
        ("words.weight", "words reset_parameters 0", torch.Tensor.normal_),
        ("out.bias", "out reset_parameters 1", lambda bias: bias.uniform_(-(3**-0.5), 3**-0.5)),
    ):
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"7 {key}".encode()))
        assert torch.equal(values[name], fill(torch.empty_like(values[name])))
    within = initialised(lambda: nn.ModuleDict({"before": nn.Linear(3, 3), **small(), "b": nn.Linear(3, 4)}), seed=7)  # type: ignore[dict-item]
    assert_equal(values, within)
    assert not torch.equal(within["out.weight"], within["b.weight"])


def test_the_random_state_around_and_the_model_stay_as_they_are() -> None:
    model = built(plain)
    before, objects, state = tensors(model), list(model.parameters()), torch.get_rng_state()
    values = Initialisation(model, 0).values(list(before))
    next(values)
    torch.rand(1)  # between two modules the caller may draw
    drawn = torch.get_rng_state()
    list(values)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().set_state(state)))
    assert all(each.is_meta for each in tensors(model).values())
    assert all(now is then for now, then in zip(model.parameters(), objects, strict=True))


class Tied(nn.Module):
    def __init__(self, *, by_storage: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(40, 30), nn.Linear(30, 40, bias=False)
        self.head.weight = nn.Parameter(self.words.weight.data) if by_storage else self.words.weight


@pytest.mark.parametrize("by_storage", [False, True])
def test_of_tied_parameters_the_first_place_decides(by_storage: bool) -> None:
    model: Any = built(lambda: Tied(by_storage=by_storage))
    initialisation = Initialisation(model, 0)
    assert initialisation.names == ("words.weight",)
    assert [name for name, _ in initialisation.values(["head.weight"])] == ["words.weight"]
    initialise(model, 0)
    assert (model.head.weight is model.words.weight) != by_storage
    assert model.head.weight.data_ptr() == model.words.weight.data_ptr()
    own = initialised(lambda: nn.ModuleDict({"words": nn.Embedding(40, 30)}))
    assert torch.equal(model.head.weight, own["words.weight"])


class Marked(nn.Parameter):
    """A parameter with a class of its own."""


def test_parameters_keep_their_class_their_attributes_and_whether_they_train() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 3, dtype=torch.float16)
        model.weight = Marked(model.weight.data, requires_grad=False)
        vars(model.weight)["colour"] = "red"
        return model

    model: Any = built(build)
    initialise(model, 0)
    assert isinstance(model.weight, Marked)
    assert vars(model.weight)["colour"] == "red"
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)
    assert model.weight.dtype == torch.float16


def test_a_model_that_was_initialised_computes() -> None:
    recurrent = built(partial(nn.LSTM, 5, 6, 2))  # lists its parameters a second time
    initialise(recurrent, 0)
    assert recurrent(torch.ones(2, 3, 5))[0].isfinite().all()
    model, words, whole = built(LLAMA), torch.arange(6).view(1, 6), LLAMA()
    initialise(model, 0)
    whole.load_state_dict(model.state_dict())
    assert torch.equal(model(words).logits, whole(words).logits)  # inv_freq is not in the state dict


# Initialisers that reach beyond their module, go by what they find, or leave gaps -----------------------------------


class Own(nn.Module):
    """Two parameters and an initialiser, f(module)."""

    def __init__(self, fill: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(6, 6)), nn.Parameter(torch.empty(6))
        self.fill, self.done = fill, False
        self.pairs = [(self.weight, self.bias)]

    def reset_parameters(self) -> None:
        self.fill(self)


def deciding(module: Any) -> None:
    """Goes by the values it drew."""
    nn.init.normal_(module.weight)
    while float(module.weight.abs().max()) > 1.5:
        nn.init.normal_(module.weight)
    module.bias.data.fill_(module.weight.sum().item())


def generated(module: Any) -> None:
    """Draws from a generator of its own, and from numpy."""
    module.weight.data.normal_(generator=torch.Generator().manual_seed(3))
    module.bias.data.numpy()[:] = np.arange(6)


def replacing(module: Any) -> None:
    """Makes new parameters instead of filling those it has."""
    module.weight = nn.Parameter(torch.randn(6, 6))
    module.bias.data = torch.zeros(6)


def suspicious(module: Any) -> None:
    """Leaves out what has no values, and what it has done before."""
    if not (module.weight.is_meta or module.weight.device.type == "meta" or module.done):
        module.done = True
        module.weight.data[:3].uniform_()
        module.weight.data[3:] = 2.0
        module.bias.data.zero_()


def raising(module: Any) -> None:
    raise OverflowError("too much")


def aside(module: Any) -> None:
    """Initialises its parameters through a list in which they have not been replaced."""
    for each in module.pairs[0]:
        nn.init.ones_(each)


@pytest.mark.parametrize("fill", [deciding, generated, replacing, suspicious])
def test_initialisers_may_go_by_what_they_find(fill: Callable[[Any], object]) -> None:
    expected = initialised(lambda: Own(fill))
    assert_equal(one_by_one(built(lambda: Own(fill))), expected)
    weight, bias = expected["weight"], expected["bias"]
    assert weight.isfinite().all()
    drawn = torch.empty(6, 6).normal_(generator=torch.Generator().manual_seed(3))
    sums: dict[Any, torch.Tensor] = {deciding: torch.full((6,), weight.sum().item()), generated: torch.arange(6.0)}
    assert torch.equal(bias, sums.get(fill, torch.zeros(6)))
    assert fill is not deciding or weight.abs().max() <= 1.5
    assert fill is not generated or torch.equal(weight, drawn)
    assert fill is not suspicious or torch.equal(weight[3:], torch.full((3, 6), 2.0))


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

    def __init__(self, value: float = 3.0, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.linear, self.norm, self.value = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), value
        self.inner = inner

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, self.value)
            module.bias.data.div_(module.bias.abs().max().item())


def test_a_module_may_initialise_what_is_in_it_after_the_module_itself() -> None:
    expected = initialised(Scaled)
    assert_equal(one_by_one(built(Scaled)), expected)
    before = initialised(lambda: nn.ModuleDict({"a": nn.Linear(4, 4)}))
    assert torch.equal(expected["a.weight"], 0.5 * before["a.weight"])
    assert torch.equal(expected["a.bias"], before["a.bias"])
    assert torch.equal(expected["b.weight"], expected["a.weight"].t() + 1)
    assert torch.equal(expected["d.weight"], expected["c.weight"])
    assert expected["c.weight"].abs().max() <= 2
    assert expected["c.weight"].std() > 0.5  # of a linear layer it would be 0.29

    def applied() -> nn.Module:
        return Applied(3.0, Applied(5.0))

    values = initialised(applied)
    assert_equal(one_by_one(built(applied)), values)
    assert torch.equal(values["linear.weight"], torch.full((8, 8), 3.0))
    assert torch.equal(values["inner.linear.weight"], torch.full((8, 8), 5.0))
    drawn = initialised(lambda: nn.ModuleDict({"linear": nn.Linear(8, 8), "words": nn.Embedding(9, 8)}))
    assert torch.equal(values["words.weight"], drawn["words.weight"])
    assert torch.equal(values["linear.bias"], drawn["linear.bias"] / drawn["linear.bias"].abs().max())
    assert torch.equal(values["norm.weight"], torch.ones(8))


def test_what_has_values_keeps_them() -> None:
    around: Any = built(Around)
    around.scaled.a = nn.Linear(4, 4)
    weight = around.scaled.a.weight
    values = weight.detach().clone()
    assert "scaled.a.weight" not in Initialisation(around, 0).names
    initialise(around, 0)
    assert around.scaled.a.weight is weight
    assert torch.equal(weight, values)  # though the initialiser of `scaled` would halve it
    assert torch.equal(around.e.weight, values)
    assert torch.equal(around.scaled.b.weight, 0.5 * values.t() + 1)  # computed in the call that halves it


class FromScale(nn.Module):
    """`weight` is computed from `scale`, which has values, and is overwritten by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.full((3,), 2.0, device="cpu")), nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        self.weight.data.copy_(self.scale * 10)


def test_values_are_computed_from_what_the_model_had_before_it_was_cut() -> None:
    """No other memory is taken for that of a parameter that has moved."""
    model: Any = built(lambda: nn.ModuleDict({"a": FromScale(), "b": nn.Linear(3, 3)}))
    expected = initialised(lambda: nn.ModuleDict({"b": nn.Linear(3, 3)}))
    initialisation = Initialisation(model, 0)
    model.a.scale.data = torch.zeros(1)  # as where a rank keeps its portion
    gc.collect()  # the next memory may come at the address that is free now
    values = dict(initialisation.values(initialisation.names))
    assert values.pop("a.weight").tolist() == [20.0] * 3
    assert_equal(values, expected)


class Legacy(nn.Module):
    """Has parameters that were made by a constructor which the meta device does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.FloatTensor(3, 3)), nn.Linear(2, 2)
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
        self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
        self.part = Own(lambda module: (module.weight.data[1:].zero_(), module.bias.data.zero_()))


def with_attribute(name: str, value: Callable[[nn.Linear], object]) -> Build:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        setattr(model, name, value(model))
        return model

    return build


class Gap(Decoder):
    """Nobody says what its scale begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def begun_on_ranks(mesh: str) -> None:
    plan = replace(plan_of(DECODER, mesh), pipeline=sw.Pipeline())
    settings: Any = {"optimizer": adamw, "loss": word_loss}
    raise same_error_everywhere(plan.mesh.size, lambda channel: begun(channel, lambda: built(Gap), plan, **settings))


UNFIT: dict[str, Build] = {
    "gaps": Gaps,
    "an initialiser that goes another way": lambda: Own(aside),
    "an initialiser that raises": lambda: nn.Sequential(Own(raising)),
    "a plain attribute": with_attribute("table", lambda model: torch.ones(2)),
    "a part of a parameter": with_attribute("head", lambda model: nn.Parameter(model.weight.data[0])),
    "a shape that is not known": lambda: nn.LazyLinear(3),
}
REFUSED = Refusals(
    "engine.meta_init",
    {
        **{name: lambda build=build: Initialisation(built(build), 0) for name, build in UNFIT.items()},
        "a name without a gap": lambda: list(Initialisation(built(lambda: nn.Linear(2, 2)), 0).values(["wieght"])),
        "a gap on data ranks": lambda: begun_on_ranks("dp_shard=2"),
        "a gap on stages": lambda: begun_on_ranks("pp=2,tp=2"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_nobody_initialises_is_named(case: str) -> None:
    REFUSED.check(case)


# Under plans --------------------------------------------------------------------------------------------------------


def hollow() -> nn.Module:
    return built(lambda: Decoder(0.1).double())


HOLLOW = replace(DECODER, make=hollow, draws=True)
LLAMA_PLAN: Any = {"tensor": sw.Tensor(rules="auto")}
LAYOUTS: list[tuple[Build, sw.Plan]] = [
    *((hollow, plan_of(DECODER, mesh, stage=1)) for mesh in ("single", "tp=2", "tp=3", "pp=2", "pp=2,tp=2")),
    *((hollow, plan_of(DECODER, "dp_shard=2", stage=stage)) for stage in (0, 2, 3)),
    (hollow, plan_of(DECODER, "dp_shard=3", stage=1, partition="whole")),
    (hollow, plan_of(DECODER, "pp=2", schedule="interleaved")),
    (hollow, plan_of(DECODER, "dp_replicate=2,tp=2", stage=3, partition="whole")),
    (hollow, plan_of(DECODER, "pp=2,dp_shard=2,tp=2", stage=3)),
    *((partial(built, LLAMA), replace(plan_of(DECODER, mesh, stage=3), pipeline=sw.Pipeline(), **settings))
      for mesh, settings in (("dp_shard=2", {}), ("tp=2", LLAMA_PLAN), ("pp=2,dp_shard=2,tp=2", LLAMA_PLAN))),
]  # fmt: skip


@pytest.mark.parametrize(("make", "plan"), LAYOUTS)
def test_every_layout_starts_with_the_same_bits(make: Build, plan: sw.Plan) -> None:
    """Buffers that are not saved, too."""

    def run(channel: sw.Channel) -> Any:
        loss = word_loss if make is hollow else None
        engine = sw.parallelize(make(), plan, optimizer=adamw, seed=SEED, channel=channel, loss=loss)
        buffers = {name: each.clone() for name, each in engine.model.named_buffers() if not each.is_meta}
        return {piece: each.clone() for piece, each in engine.state().items()}, buffers

    model, ranks = make(), sw.simulate(plan.mesh.size, run)
    initialise(model, SEED)
    got = whole_state([state for state, _ in ranks])
    for name, each in model.named_parameters():
        assert torch.equal(got[name], each), name
    assert {name for _, held in ranks for name in held} == dict(model.named_buffers()).keys()
    for _, held in ranks:
        assert_equal(held, dict(model.named_buffers()))


@pytest.mark.parametrize(
    "mesh", ["dp_shard=2", "pp=2,tp=2", pytest.param("pp=2,dp_shard=2,tp=2", marks=pytest.mark.stress)]
)
def test_training_from_there_is_that_of_one_process(mesh: str) -> None:
    """Dropout included; float64, so that only the order of sums is left."""
    plan = plan_of(DECODER, mesh, stage=3 if "dp" in mesh else 1, k=2, clip=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        wanted = train(HOLLOW, plan_of(DECODER, "single", k=2 * plan.mesh.num_data_ranks, clip=0.2))
        assert_close(train(HOLLOW, plan), wanted, noise=DECODER.noise)


WIDTH, LAYERS = 384, 8
"""Two layers are more than the mebibyte that small values are computed in together."""
LAYER_BYTES = WIDTH * WIDTH * 4
SMALL_BYTES = 30_000
"""States of generators, 5 KB each; seeds; vectors on which optimizers are tried."""


@pytest.mark.parametrize(
    ("mesh", "stage"), [("tp=2", 1), ("pp=2", 1), ("dp_shard=2", 3), ("pp=2,tp=2", 1), ("pp=2,dp_shard=2,tp=2", 3)]
)
def test_a_rank_has_memory_for_its_share_and_one_layer_at_a_time(mesh: str, stage: int) -> None:
    """What a layer draws is there twice for a moment: as it was drawn, and cast or cut."""
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=4 * LAYER_BYTES),
        tensor=sw.Tensor(rules={str(at): ("column", "row")[at % 2] for at in range(LAYERS)} if "tp" in mesh else None),
    )
    num_ranks, engines = plan.mesh.size, list[Any]()

    def layers() -> nn.Module:
        return built(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))

    for rank in range(num_ranks):
        channel = Silence(rank=rank, size=num_ranks, progresses_alone=False) if num_ranks > 1 else alone()
        peaks = []
        for _ in range(2):  # a part of a layer in a cycle stays until the collector comes, sometimes too late
            peaks.append(peak_bytes(lambda: engines.append(begun(channel, layers, plan, loss=mean_square))))  # noqa: B023
            engines.clear()
        share = LAYERS * LAYER_BYTES // num_ranks
        assert share <= min(peaks) <= share + 2 * LAYER_BYTES + SMALL_BYTES
