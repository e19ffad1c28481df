"""First values for models built without any: the same whoever asks for which of them, and what the modules would do."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from shardwise.engine.meta_init import Initialisation
from tests.engine.initialised import Build, assert_equal, built, initialise, initialised, one_by_one, tensors
from tests.engine.memory import peak_bytes

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
    import transformers as tf  # seconds, which to collect tests does not take

    config = tf.GPT2Config(
        n_embd=32, n_layer=8, n_head=4, vocab_size=67, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    return tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=67)
    )


def bert() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    return tf.BertForMaskedLM(tf.BertConfig(**SIZES))


def llama() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, tie_word_embeddings=True))


def llama_bfloat16() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))
    finally:
        torch.set_default_dtype(before)


def mixtral() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    return tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))


def vit() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return tf.ViTModel(tf.ViTConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8))


def mamba() -> nn.Module:
    import transformers as tf  # seconds, which to collect tests does not take

    return tf.MambaModel(tf.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=67))


def encoder_decoder() -> nn.Module:
    return nn.Transformer(16, 2, 1, 1, 24, batch_first=True)


MODELS: list[Build] = [plain, encoder_decoder, gpt2, t5, bert, llama, llama_bfloat16, mixtral, vit, mamba]


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


class Scaled(nn.Module):
    """`weight` is computed from `scale`, which has values, and is overwritten by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0, device="cpu"))
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.scale * 10)


def test_values_are_computed_from_what_the_model_had_before_it_was_cut() -> None:
    model = built(Scaled)
    assert isinstance(model, Scaled)
    initialisation = Initialisation(model, 0)
    model.scale.data = torch.zeros(1)  # as where a rank keeps its portion
    assert [(name, values.tolist()) for name, values in initialisation.values(["weight"])] == [("weight", [20.0] * 3)]


def test_no_other_memory_is_taken_for_that_of_a_parameter_that_has_moved() -> None:
    model = built(partial(nn.Linear, 3, 3))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    expected = initialised(partial(nn.Linear, 3, 3))
    initialisation = Initialisation(model, 0)
    model.get_parameter("scale").data = torch.zeros(1)
    gc.collect()  # the next memory may come at the address that is free now
    assert_equal(dict(initialisation.values(initialisation.names)), expected)


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
