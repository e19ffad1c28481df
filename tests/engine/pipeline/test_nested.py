"""The walk through nested values: what modules take and give."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from shardwise.comm.nested_values import tensors_in, transform
from shardwise.engine.pipeline.nested import token_of

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = None


def plus_one(leaf: Any) -> Any:
    return leaf + 1 if isinstance(leaf, torch.Tensor) else leaf


def one() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [
        one(),
        (one(), None, 3),
        [one(), [one()]],
        {"a": one(), "b": "text"},
        OrderedDict(b=one(), a=2),
        Pair(one(), {"x": one()}),
        Frozen(one(), [one()]),
        torch.max(torch.ones(2, 2), dim=0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_replaced_and_the_containers_keep_their_types(value: Any) -> None:
    assert_replaced(value)


def assert_replaced(value: Any) -> None:
    found = tensors_in(value)
    replaced = transform(value, plus_one)
    assert type(replaced) is type(value)
    assert [each.tolist() for each in tensors_in(replaced)] == [(each + 1).tolist() for each in found]
    assert [each.tolist() for each in tensors_in(value)] == [each.tolist() for each in found], "the original stays"


def test_what_holds_no_tensor_stays_the_same_object() -> None:
    value = {"a": (1, [2, None]), "b": Frozen("text")}
    assert transform(value, plus_one) is value


def test_an_output_of_transformers_keeps_its_attributes_and_keys_in_step() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast  # seconds, which to collect tests does not take

    assert_replaced(CausalLMOutputWithPast(loss=one(), logits=one(), hidden_states=(one(), one())))
    output = transform(CausalLMOutputWithPast(loss=one(), logits=one()), plus_one)
    assert torch.equal(output.loss, output["loss"])
    assert output.loss.tolist() == [2, 2]
    assert output.past_key_values is None


def test_plain_values_count_by_type_and_value() -> None:
    assert token_of(0.5) != token_of(0.25)
    assert token_of(2) != token_of(2.0)
    assert token_of(1) != token_of(True)
    assert token_of(slice(0, 2)) != token_of(slice(0, 3))
    assert token_of(torch.float32) != token_of(torch.float64)
