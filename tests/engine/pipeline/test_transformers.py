"""Models of transformers, as they are, train on stages to the bits that one process gives.

A parameter tied across stages is compared to the bit where each stage uses it once, in one microbatch: else its
gradient is summed in another order.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.oracle import Batch
from tests.engine.pipeline.oracle import Case, expected
from tests.engine.pipeline.stages import assert_equals_one_process, largest_difference, plan_for, train
from tests.engine.pipeline.transformers_models import MAKERS, case_of, sentences

TIED = [
    ("llama", True, "1f1b", 2),
    ("llama", True, "interleaved", 2),
    ("gpt2", None, "1f1b", 4),
    ("gemma", None, "1f1b", 2),
    ("gemma3", None, "fthenb", 4),
    ("falcon", None, "1f1b", 2),
    ("bloom", None, "1f1b", 4),
    ("opt", None, "1f1b", 2),
    ("t5", None, "1f1b", 2),
    ("t5", None, "1f1b", 4),
    ("bart", None, "1f1b", 4),
    ("bart", None, "interleaved", 2),
    ("bert", None, "1f1b", 2),
    ("mamba", None, "1f1b", 4),
]
"""With default configs, but for Llama's."""

UNTIED = [
    ("llama", "fthenb", 4, 2),
    ("llama", "interleaved", 2, 5),
    ("gpt2", "1f1b", 2, 3),
    ("gpt2", "interleaved", 2, 4),
    ("qwen3", "1f1b", 4, 8),
    ("gemma", "1f1b", 2, 5),
    ("gemma3", "interleaved", 2, 2),
    ("phi", "fthenb", 2, 7),
    ("mixtral", "1f1b", 4, 2),
    ("mixtral", "interleaved", 2, 3),
    ("qwen3-moe", "fthenb", 2, 4),
    ("falcon", "1f1b", 4, 4),
    ("bloom", "1f1b", 2, 2),
    ("opt", "1f1b", 4, 4),
    ("bart", "1f1b", 4, 2),
    ("bert", "interleaved", 2, 2),
    ("hrm", "interleaved", 2, 4),
    ("perceiver", "1f1b", 2, 2),
    ("vit", "1f1b", 4, 8),
    ("mamba", "interleaved", 2, 2),
]

BY_NAMES = [
    ("t5 apart", "1f1b", 4, 1),
    ("llama", "1f1b", 4, 8),
    ("t5", "1f1b", 4, 3),
    ("t5", "fthenb", 2, 2),
    ("bart", "1f1b", 4, 4),
]


def test_every_model_is_among_the_layouts() -> None:
    assert {name for name, *_ in TIED + UNTIED} == {name for name in MAKERS if "dropout" not in name}


@pytest.mark.parametrize(("name", "tied", "schedule", "pp"), TIED)
def test_models_with_tied_embeddings(name: str, tied: bool | None, schedule: str, pp: int) -> None:
    assert_equals_one_process(case_of(name, tied=tied), schedule=schedule, pp=pp, k=1)


@pytest.mark.parametrize(("name", "schedule", "pp", "k"), UNTIED)
def test_models_with_a_head_of_their_own(name: str, schedule: str, pp: int, k: int) -> None:
    assert_equals_one_process(case_of(name, tied=None if name == "vit" else False), schedule=schedule, pp=pp, k=k)


@pytest.mark.parametrize(("cut", "schedule", "pp", "k"), BY_NAMES)
def test_modules_placed_by_their_names(cut: str, schedule: str, pp: int, k: int) -> None:
    assert_equals_one_process(case_of(cut.split()[0], cut=cut), schedule=schedule, pp=pp, k=k)


@pytest.mark.parametrize(
    ("name", "schedule", "pp", "k"),
    [
        ("llama", "interleaved", 2, 2),
        ("gpt2", "1f1b", 4, 2),
        ("qwen3-moe", "1f1b", 2, 2),
        ("t5", "1f1b", 2, 1),
        ("bert", "fthenb", 2, 2),
    ],
)
def test_gradient_checkpointing(name: str, schedule: str, pp: int, k: int) -> None:
    tied = None if name == "t5" else False
    assert_equals_one_process(case_of(name, tied=tied, checkpointing=True), schedule=schedule, pp=pp, k=k)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An update as small as the difference of two gradients, where AdamW's has the size of its rate."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "tied", "schedule", "pp", "k"),
    [
        ("llama", True, "1f1b", 2, 8),
        ("gpt2", None, "1f1b", 4, 4),
        ("t5", None, "1f1b", 2, 2),
        ("bart", None, "interleaved", 2, 4),
        ("bert", None, "1f1b", 2, 4),
    ],
)
def test_with_several_microbatches_a_tie_is_equal_to_summation_order(
    name: str, tied: bool | None, schedule: str, pp: int, k: int
) -> None:
    """Before the first update nothing differs; after it the tied parameter, by the rounding of a sum of 2 k terms.

    4 k steps of 2^-24 of gradients below 2 (measured: up to 0.5), times a rate of 0.5, and what momentum and two
    updates of a smooth model make of it: 1e-5 in all (measured after five: 1e-6).
    """
    case = case_of(name, tied=tied)
    got, wanted = train(case, plan_for(case, schedule=schedule, pp=pp, k=k), sgd), expected(case, k, optimizer_of=sgd)
    assert got.losses[0] == wanted.losses[0]
    parameters = dict(case.make().named_parameters(remove_duplicate=False))
    shared = {n for n, p in parameters.items() if sum(p is other for other in parameters.values()) > 1}
    for key, value in wanted.states[0].items():
        if key not in shared:
            assert torch.equal(got.states[0][key], value), key
    for at, (state, other) in enumerate(zip(got.states, wanted.states, strict=True)):
        assert largest_difference(state, other) < (4 * k * 2.0**-24 if at == 0 else 1e-5)
    assert got.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-5)


def loss_of_every_layer(output: Any, batch: Batch) -> torch.Tensor:
    """The model's own loss, hidden states and attentions of all layers."""
    loss: torch.Tensor = output.loss + 0.01 * output.attentions[1].square().sum()
    for hidden in output.hidden_states:
        loss = loss + 0.01 * hidden.square().mean()
    return loss


def loss_of_a_tuple(output: Any, batch: Batch) -> torch.Tensor:
    """Of an output without names."""
    loss: torch.Tensor = output[0]
    return loss


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_outputs_of_every_layer_are_collected(name: str) -> None:
    """To summation order: a layer's output has two gradients from the next stage and one from the loss."""
    everything = {"output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}
    make = MAKERS[name](tie_word_embeddings=False, **everything)
    case = Case(make=make, batches=[sentences(seed) for seed in range(2)], loss=loss_of_every_layer)
    got, wanted = train(case, plan_for(case, pp=4, k=4), sgd), expected(case, 4, optimizer_of=sgd)
    assert got.losses[0] == wanted.losses[0]
    assert got.losses == pytest.approx(wanted.losses, rel=1e-6)
    for at, (state, other) in enumerate(zip(got.states, wanted.states, strict=True)):
        assert largest_difference(state, other) < (1e-7 if at == 0 else 1e-5)


def test_outputs_as_tuples() -> None:
    batches = [{**sentences(seed), "return_dict": False} for seed in range(2)]
    case = Case(make=MAKERS["qwen3"](), batches=batches, loss=loss_of_a_tuple)
    assert_equals_one_process(case, schedule="1f1b", pp=2, k=4)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_sentences_of_another_length_at_every_update(schedule: str) -> None:
    batches = [sentences(seed, length=4 + seed % 3, padded=seed != 1) for seed in range(3)]
    case = Case(make=MAKERS["llama"](), batches=batches)
    assert_equals_one_process(case, schedule=schedule, pp=2, k=4)


# torch's compiler looks at the gradient of values that are no leaves, and is warned by torch about it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers() -> None:
    make = MAKERS["qwen3"]()

    def build() -> nn.Module:
        model: Any = make()
        model.model.layers[1].compile(backend="eager")
        return model  # type: ignore[no-any-return]

    case = Case(make=build, batches=[sentences(seed, padded=False) for seed in range(2)])
    assert_equals_one_process(case, schedule="1f1b", pp=2, k=2)
