"""First values for models built without any: the same whoever asks for which of them, and what the modules would do."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
import xxhash
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.comm import Channel
from shardwise.engine.initialisation import Initialisation, forget_initialised, initialise
from shardwise.errors import ModelError

Build = Callable[[], nn.Module]

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
        nn.LayerNorm(30),
        nn.Embedding(20, 30, padding_idx=3),
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.LSTM(5, 6, 2),
        nn.GRUCell(4, 5),
        nn.Bilinear(3, 4, 5),
        nn.PReLU(),
        nn.MultiheadAttention(16, 2, kdim=8, vdim=4, add_bias_kv=True),
        nn.Linear(8, 8, dtype=torch.bfloat16),
    )


def gpt2() -> nn.Module:
    config = tf.GPT2Config(
        n_embd=32, n_layer=8, n_head=4, vocab_size=67, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=67)
    )


def bert() -> nn.Module:
    return tf.BertForMaskedLM(tf.BertConfig(**SIZES))


def llama() -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=True))


def llama_bfloat16() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))
    finally:
        torch.set_default_dtype(before)


def mixtral() -> nn.Module:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def vit() -> nn.Module:
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return tf.ViTModel(tf.ViTConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8))


def mamba() -> nn.Module:
    return tf.MambaModel(tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=67))


def encoder_decoder() -> nn.Module:
    return nn.Transformer(16, 2, 1, 1, 24, batch_first=True)


MODELS: list[Build] = [plain, encoder_decoder, gpt2, t5, bert, llama, llama_bfloat16, mixtral, vit, mamba]


def built(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


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


@pytest.mark.parametrize("build", MODELS)
def test_values_do_not_depend_on_which_others_are_asked_for(build: Build) -> None:
    expected = initialised(build)
    initialisation = Initialisation(built(build), 0)
    names = initialisation.names
    assert set(names) == expected.keys()
    for start in range(3):
        part = names[start::3]
        got = dict(initialisation.values(part))
        assert list(got) == list(part)
        assert_equal(got, expected)
    alone = one_by_one(built(build))
    assert alone.keys() == expected.keys()
    assert_equal(alone, expected)


@pytest.mark.parametrize("build", MODELS)
def test_values_are_distributed_as_those_of_the_model_that_initialises_itself(build: Build) -> None:
    torch.manual_seed(0)
    reference, got = tensors(build()), initialised(build)
    assert got.keys() == reference.keys()
    for name, expected in reference.items():
        values = got[name]
        assert (values.shape, values.dtype) == (expected.shape, expected.dtype), name
        own, other = values.double(), expected.double()
        if torch.equal(own, other):  # constants
            continue
        # Two samples of n values from one distribution: their deviations differ by about the deviation / sqrt(n), and
        # so do their means. Ten times as much is exceeded by a wrong scale (GPT-2's residual projections: 4 times).
        assert values.numel() > 4, name
        bound = 10 * other.std() / values.numel() ** 0.5
        assert abs(own.std() - other.std()) <= bound, name
        assert abs(own.mean() - other.mean()) <= bound, name


def test_the_scaled_projections_of_gpt2_are_scaled() -> None:
    values = initialised(gpt2)
    assert values["transformer.h.3.mlp.c_proj.weight"].std() == pytest.approx(0.02 / 4, rel=0.1)  # 1,536 draws: 2 %
    assert values["transformer.h.3.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.1)
    layers = [values[f"transformer.h.{layer}.mlp.c_fc.weight"] for layer in range(2)]
    assert not torch.equal(*layers)


def test_one_draw_is_a_draw_from_a_seed_made_of_the_seed_the_name_and_its_number() -> None:
    values = initialised(lambda: nn.ModuleDict({"words": nn.Embedding(5, 3), "out": nn.Linear(3, 4)}), seed=7)
    for name, key, fill in (
        ("words.weight", "words reset_parameters 0", torch.Tensor.normal_),
        ("out.bias", "out reset_parameters 1", lambda bias: bias.uniform_(-(3**-0.5), 3**-0.5)),
    ):
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"7 {key}".encode()))
        assert torch.equal(values[name], fill(torch.empty_like(values[name])))


def test_values_depend_on_the_seed_and_the_name_alone() -> None:
    def small() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(4, 4)})

    def large() -> nn.Module:
        return nn.ModuleDict({"before": nn.Linear(3, 3), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    torch.manual_seed(1)
    first = initialised(small)
    torch.manual_seed(2)
    second = initialised(large)
    assert_equal(first, second)
    assert not torch.equal(second["a.weight"], second["b.weight"])
    assert not torch.equal(first["a.weight"], initialised(small, seed=1)["a.weight"])


def test_the_random_state_around_and_the_model_stay_as_they_are() -> None:
    model = built(plain)
    before = tensors(model)
    objects = list(model.parameters())
    state = torch.get_rng_state()
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


def test_ranks_that_keep_a_part_each_have_the_whole_together() -> None:
    expected = initialised(llama)

    def part(channel: Channel) -> dict[str, torch.Tensor]:
        initialisation = Initialisation(built(llama), 0)
        return dict(initialisation.values(initialisation.names[channel.rank :: channel.size]))

    together: dict[str, torch.Tensor] = {}
    for each in sw.simulate(3, part):
        together |= each
    assert together.keys() == expected.keys()
    assert_equal(together, expected)


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
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.div_(module.weight.abs().max().item())


def test_values_from_before_reach_an_initialiser_that_goes_by_them() -> None:
    expected = initialised(Normed)
    assert_equal(one_by_one(built(Normed)), expected)
    drawn = initialised(lambda: nn.ModuleDict({"a": nn.Linear(8, 8, bias=False)}))["a.weight"]
    assert torch.equal(expected["a.weight"], drawn / drawn.abs().max())
    assert not torch.equal(expected["a.weight"], expected["b.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 30)
        self.head = nn.Linear(30, 40, bias=False)
        self.head.weight = self.words.weight


class TiedByStorage(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.words.weight.data)


@pytest.mark.parametrize("kind", [Tied, TiedByStorage])
def test_of_tied_parameters_the_first_place_decides(kind: type[nn.Module]) -> None:
    model = built(kind)
    initialisation = Initialisation(model, 0)
    assert initialisation.names == ("words.weight",)
    assert [name for name, _ in initialisation.values(["head.weight"])] == ["words.weight"]
    initialise(model, 0)
    assert isinstance(model, Tied)
    assert (model.head.weight is model.words.weight) == (kind is Tied)
    assert model.head.weight.data_ptr() == model.words.weight.data_ptr()
    alone = initialised(lambda: nn.ModuleDict({"words": nn.Embedding(40, 30)}))
    assert torch.equal(model.head.weight, alone["words.weight"])


class Marked(nn.Parameter):
    """A parameter with a class of its own."""


def test_parameters_keep_their_class_their_attributes_and_whether_they_train() -> None:
    def build() -> nn.Module:
        model = nn.Linear(3, 3, dtype=torch.float16)
        model.weight = Marked(model.weight.data, requires_grad=False)
        vars(model.weight)["colour"] = "red"
        model.bias.requires_grad_(False)
        return model

    model = built(build)
    initialise(model, 0)
    weight, bias = model.weight, model.bias
    assert isinstance(weight, Marked)
    assert vars(weight)["colour"] == "red"
    assert not weight.requires_grad
    assert not bias.requires_grad
    assert weight.dtype == torch.float16


def test_a_model_that_was_initialised_computes() -> None:
    recurrent = built(partial(nn.LSTM, 5, 6, 2))  # lists its parameters a second time
    initialisation = Initialisation(recurrent, 0)
    for name, values in initialisation.values(initialisation.names):
        initialisation.put(name, values)
    assert recurrent(torch.ones(2, 3, 5))[0].isfinite().all()
    model = built(llama)
    initialise(model, 0)
    words = torch.arange(6).view(1, 6)
    torch.manual_seed(0)
    whole = llama()
    whole.load_state_dict(model.state_dict())
    assert torch.equal(model(words).logits, whole(words).logits)  # inv_freq is not in the state dict


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
    scaled = built(Scaled)
    assert isinstance(scaled, Scaled)
    scaled.a = nn.Linear(4, 4)
    values = scaled.a.weight.detach().clone()
    initialise(scaled, 0)
    assert torch.equal(scaled.a.weight, values)  # though an initialiser around it would halve it
    assert torch.equal(scaled.b.weight, 0.5 * values.t() + 1)  # what the initialiser computes from them is new


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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (plain_attribute, "'table' is a tensor without values .* in a plain attribute"),
        (overlapping, "'weight' and 'head', which have no values yet, share a part of one storage"),
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


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_memory_is_that_of_the_largest_module_and_of_what_is_kept() -> None:
    widths = (512, 768, 1024, 640)
    model = built(lambda: nn.Sequential(*(nn.Linear(512, width) for _ in range(2) for width in widths)))
    whole_bytes = sum(each.numel() * 4 for each in model.parameters())
    largest_bytes = (512 + 1) * 1024 * 4
    initialisation = Initialisation(model, 0)
    wanted = initialisation.names[: len(initialisation.names) // 4]
    kept: dict[str, torch.Tensor] = {}
    peak = peak_bytes(lambda: kept.update(initialisation.values(wanted)))
    kept_bytes = sum(each.numel() * 4 for each in kept.values())
    assert kept_bytes < whole_bytes / 4
    # Beside values there are states of a generator, 5 KB each, and some seeds.
    assert kept_bytes <= peak <= kept_bytes + largest_bytes + 20_000
    peak = peak_bytes(lambda: [None for _ in initialisation.values(initialisation.names)])
    assert largest_bytes <= peak <= 2 * largest_bytes + 20_000  # what the loop still holds, and the next
