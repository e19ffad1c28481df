"""First values for models built without any: the same whoever asks for which of them, and what the modules would do."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import alone
from shardwise.engine.model.meta_init import Initialisation, forget_initialised
from tests.engine.loops import begun, mean_square
from tests.engine.memory import peak_bytes
from tests.engine.pipeline.transformers_models import DECODER as decoder_sizes  # noqa: N811
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import word_loss
from tests.oracle.decoder import DECODER, Decoder
from tests.oracle.places import whole_state
from tests.oracle.program import adamw, plan_of
from tests.refusals import Refusals

Build = Callable[[], nn.Module]


def built(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def initialise(model: nn.Module, seed: int) -> None:
    """Give a model that was built on the meta device the values of `Initialisation`, in place."""
    initialisation = Initialisation(model, seed)
    for name, values in initialisation.values(initialisation.names):
        initialisation.put(name, values)


def initialised(build: Build, seed: int = 0) -> dict[str, torch.Tensor]:
    model = built(build)
    initialise(model, seed)
    return tensors(model)


def one_by_one(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """All values, each asked for alone, the last ones first."""
    initialisation = Initialisation(model, seed)
    return dict(pair for name in reversed(initialisation.names) for pair in initialisation.values([name]))


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() <= expected.keys()
    for name, values in got.items():
        assert values.dtype == expected[name].dtype, name
        assert torch.equal(values, expected[name]), name


SEED = 7


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


def of_transformers(kind: str, **sizes: Any) -> Build:
    def build() -> nn.Module:
        import transformers as tf  # seconds, which to collect tests does not take

        of: Any = tf.AutoModelForCausalLM
        model: nn.Module = of.from_config(tf.AutoConfig.for_model(kind, **sizes))
        return model

    return build


SIZES: dict[str, Any] = {**decoder_sizes, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = of_transformers("llama", **SIZES, tie_word_embeddings=True)
MODELS: dict[str, Build] = {
    "plain": plain,
    "gpt2": of_transformers("gpt2", n_embd=32, n_layer=8, n_head=4, vocab_size=67, n_positions=16),
    "llama in bfloat16": lambda: LLAMA().bfloat16(),
    "mixtral": of_transformers("mixtral", **SIZES, num_local_experts=4),
    "mamba": of_transformers("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=67),
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


def test_a_recurrent_model_that_was_initialised_computes() -> None:
    model = built(partial(nn.LSTM, 5, 6, 2))  # lists its parameters a second time
    initialise(model, 0)
    assert model(torch.ones(2, 3, 5))[0].isfinite().all()


# Initialisers that reach beyond their module, go by what they drew, or leave gaps -----------------------------------


class Own(nn.Module):
    """Two parameters, or other parts, and an initialiser, f(module)."""

    def __init__(self, fill: Callable[[Any], object], **parts: Any) -> None:
        super().__init__()
        self.fill, self.done = fill, False
        for name, part in parts.items():
            setattr(self, name, part)
        if not parts:
            self.weight, self.bias = nn.Parameter(torch.empty(6, 6)), nn.Parameter(torch.empty(6))
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
    """Draws from a generator of its own."""
    module.weight.data.normal_(generator=torch.Generator().manual_seed(3))


def replacing(module: Any) -> None:
    """Makes new parameters instead of filling those it has."""
    module.weight = nn.Parameter(torch.randn(6, 6))
    module.bias.data = torch.zeros(6)


def suspicious(module: Any) -> None:
    """Leaves out what has no values, and what it has done before."""
    if not (module.weight.is_meta or module.weight.device.type == "meta" or module.done):
        module.done = True
        module.weight.data.uniform_()
        module.weight.data[3:] = 2.0
        module.bias.data.zero_()


def making(module: Any) -> None:
    """Makes new parameters after it has filled those that it had."""
    nn.init.zeros_(module.weight)
    module.weight = nn.Parameter(torch.randn(6, 6))
    module.bias = nn.Parameter(torch.empty(6))
    nn.init.ones_(module.bias)


def tying(module: Any) -> None:
    module.b.weight = module.a.weight


def exchanging(module: Any) -> None:
    module.b = module.a


def raising(module: Any) -> None:
    raise OverflowError("too much")


def aside(module: Any) -> None:
    """Initialises its parameters through a list in which they have not been replaced."""
    for each in module.pairs[0]:
        nn.init.ones_(each)


def scaling(module: Any) -> None:
    """Initialises what is in it once more, one tensor from its own former values."""
    module.a.weight.data.mul_(0.5)
    module.a.bias.data.copy_(-module.a.bias.data)
    nn.init.trunc_normal_(module.c.weight)
    nn.init.zeros_(module.c.bias)


def scaled() -> nn.Module:
    return Own(scaling, **{name: nn.Linear(4, 4) for name in "ac"})


def taking(module: Any) -> None:
    """Computes a tensor of one module from that of another."""
    module.b.weight.data.copy_(module.a.weight.t() + torch.ones(4))


class Applied(nn.Module):
    """A model whose `_init_weights(module)` knows some of its modules only, around one that has its own."""

    def __init__(self, value: float = 3.0, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.linear, self.norm, self.value = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), value
        self.inner = inner

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, self.value)
            module.bias.data.div_(4)


def drawn(name: str, size: int) -> dict[str, torch.Tensor]:
    """What a linear layer of this name gives itself."""
    return initialised(lambda: nn.ModuleDict({name: nn.Linear(size, size)}))


def one() -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.empty(6, 6))}


KNOWN: dict[str, tuple[Build, Callable[[Any], dict[str, torch.Tensor]]]] = {
    "leaves out what it has done": (
        lambda: Own(suspicious),
        lambda got: {"weight": got["weight"].clone().index_fill(0, torch.arange(3, 6), 2.0), "bias": torch.zeros(6)},
    ),
    "makes new parameters": (
        lambda: Own(making),
        lambda _: {
            "weight": initialised(lambda: Own(lambda module: module.weight.data.copy_(torch.randn(6, 6)), **one()))[
                "weight"
            ],
            "bias": torch.ones(6),
        },
    ),
    "initialises what is in it": (
        scaled,
        lambda got: {
            "a.weight": 0.5 * drawn("a", 4)["a.weight"],
            "a.bias": -drawn("a", 4)["a.bias"],
            "c.weight": got["c.weight"].clamp(-2, 2),
        },
    ),
    "has an initialiser of all in it": (
        lambda: Applied(3.0, Applied(5.0)),
        lambda _: {
            "linear.weight": torch.full((8, 8), 3.0),
            "linear.bias": drawn("linear", 8)["linear.bias"] / 4,
            "inner.linear.weight": torch.full((8, 8), 5.0),
            "norm.weight": torch.ones(8),
        },
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_initialisers_may_scale_what_they_find_and_reach_into_other_modules(name: str) -> None:
    build, known = KNOWN[name]
    expected = initialised(build)
    assert_equal(one_by_one(built(build)), expected)
    assert_equal(known(expected), expected)
    assert expected.get("c.weight", torch.ones(1)).abs().max() > 0.5  # more than a linear layer gives itself


class Reseeded(TorchDispatchMode):
    """Each draw begins from the seed of a call and of its own number, as in `Initialisation`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            key = f"{SEED}  reset_parameters {next(self.draws)}"
            torch.manual_seed(xxhash.xxh3_64_intdigest(key.encode()))
        return func(*args, **(kwargs or {}))


def of_tensor(method: str, weight: torch.Tensor) -> object:
    """A random method of a view."""
    return getattr(weight.t()[1:], method)(*([0.3] if method[0] in "bg" else []))


OF_TORCH: dict[str, Callable[[torch.Tensor], object]] = {
    **{f"init.{each}": getattr(nn.init, each) for each in dir(nn.init) if each.endswith("_") and each[0] != "_"},
    "init.constant_": lambda weight: nn.init.constant_(weight, 0.3),
    "init.dirac_": lambda weight: nn.init.dirac_(weight.view(6, 3, 2)),
    "init.sparse_": lambda weight: nn.init.sparse_(weight, 0.3),
    **{
        f"Tensor.{each}": partial(of_tensor, each)
        for each in (
            "bernoulli_",
            "cauchy_",
            "exponential_",
            "geometric_",
            "log_normal_",
            "normal_",
            "random_",
            "uniform_",
        )
    },
    "index_fill_": lambda weight: weight.normal_().index_fill_(0, torch.tensor([1, 3]), 2.0),
    "masked_fill_": lambda weight: weight.normal_().masked_fill_(torch.eye(6, dtype=torch.bool), 2.0),
    "of its own values": lambda weight: weight.normal_().masked_fill_(weight > 0, 2.0).div_(weight.norm()),
    "a slice of a view": lambda weight: weight.view(-1)[3:20:2].uniform_(),
    "diagonal": lambda weight: weight.diagonal().copy_(torch.arange(6.0)),
    "through data": lambda weight: weight.data[2:4].data.copy_(torch.rand(2, 6)),
    "chunks": lambda weight: [nn.init.orthogonal_(each) for each in weight.chunk(2)],
    "permutations": lambda weight: [weight[row].copy_(torch.randperm(6)) for row in range(6)],
}
OF_TORCH.pop("init.trunc_normal_")  # one draw, however often it draws


@pytest.mark.parametrize("name", OF_TORCH)
def test_initialisers_of_torch_do_to_the_bit_what_they_do_on_memory(name: str) -> None:
    @torch.no_grad()
    def fill(module: Any) -> None:
        module.weight.zero_()
        module.bias.normal_()  # has no memory where the weight alone is wanted
        OF_TORCH[name](module.weight)

    plainly = Own(fill)
    with Reseeded():
        plainly.reset_parameters()
    assert_equal(initialised(lambda: Own(fill), SEED), tensors(plainly))
    assert_equal(one_by_one(built(lambda: Own(fill)), SEED), tensors(plainly))


def test_what_has_values_keeps_them() -> None:
    around: Any = built(scaled)
    around.a = nn.Linear(4, 4)
    weight = around.a.weight
    values = weight.detach().clone()
    assert "a.weight" not in Initialisation(around, 0).names
    initialise(around, 0)
    assert around.a.weight is weight
    assert torch.equal(weight, values)  # though the initialiser around it would halve it
    assert torch.equal(around.c.bias, torch.zeros(4))


def test_values_that_would_be_overwritten_can_be_taken_away() -> None:
    """As of parameters that were made by a constructor which the meta device does not reach."""
    with torch.device("meta"):
        legacy = nn.Parameter(torch.FloatTensor(3, 3))
        model = Own(lambda module: nn.init.ones_(module.weight), weight=legacy, other=nn.Linear(2, 2))
        model.register_buffer("table", torch.arange(3, device="cpu"))
    assert Initialisation(model, 0).names == ("other.weight", "other.bias")
    forget_initialised(model)
    assert Initialisation(model, 0).names == ("weight", "other.weight", "other.bias")
    initialise(model, 0)
    assert torch.equal(tensors(model)["weight"], torch.ones(3, 3))
    assert torch.equal(tensors(model)["table"], torch.arange(3))


def gaps() -> nn.Module:
    """What nobody initialises, of every kind."""
    part = Own(lambda module: (module.weight.data[1:].zero_(), module.bias.data.zero_()))
    model = Own(lambda _: None, linear=nn.Linear(2, 2), scale=nn.Parameter(torch.ones(3)), part=part)
    model.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
    return model


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
    "gaps": gaps,
    "an initialiser that goes another way": lambda: Own(aside),
    "an initialiser that goes by what it drew": lambda: Own(deciding),
    "an initialiser with its own generator": lambda: Own(generated),
    "an initialiser that makes new parameters": lambda: Own(replacing),
    "an initialiser that computes one tensor from another": lambda: Own(taking, a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
    "an initialiser that ties what was not": lambda: Own(tying, a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
    "an initialiser that exchanges modules": lambda: Own(exchanging, a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
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


LLAMA_PLAN = replace(plan_of(DECODER, "pp=2,dp_shard=2,tp=2", stage=3), tensor=sw.Tensor(rules="auto"))
LAYOUTS: list[tuple[Build, sw.Plan]] = [
    (hollow, plan_of(DECODER, "single")),
    (hollow, plan_of(DECODER, "tp=3")),
    *((hollow, plan_of(DECODER, "dp_shard=2", stage=stage)) for stage in (0, 2)),
    (hollow, plan_of(DECODER, "dp_shard=3", stage=1, partition="whole")),
    (hollow, plan_of(DECODER, "pp=2", schedule="interleaved")),
    (hollow, plan_of(DECODER, "dp_replicate=2,tp=2", stage=3, partition="whole")),
    (partial(built, LLAMA), replace(LLAMA_PLAN, pipeline=sw.Pipeline())),
]


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


WIDTH, LAYERS = 384, 8
"""Two layers are more than the mebibyte that small values are computed in together."""
LAYER_BYTES = WIDTH * WIDTH * 4
SMALL_BYTES = 30_000
"""States of generators, 5 KB each; seeds; vectors on which optimizers are tried."""


@pytest.mark.parametrize(("mesh", "stage"), [("dp_shard=2", 3), ("pp=2,tp=2", 1)])
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
