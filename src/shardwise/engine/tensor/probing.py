"""What a module computes, found out by calling it: not its name decides whether it can be cut, but what it does."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.comm.local_tensors import is_dtensor
from shardwise.engine.tensor.styles import attributes_set, parameters_set

_ROWS = 3


class Probes:
    """Looks at modules; those of one class, shape and settings alike are called once."""

    def __init__(self) -> None:
        self._known: dict[object, dict[str, Any]] = {}

    def look_at(self, module: nn.Module) -> dict[str, Any]:
        """`computes`, `output_sizes` and problems of its `TensorModule`."""
        if isinstance(module, nn.Embedding):
            settings = [key for key in ("max_norm", "scale_grad_by_freq") if getattr(module, key)]
            own = type(module).forward is not nn.Embedding.forward or "forward" in vars(module)
            return {
                "computes": "embedding",
                "problem": _embedding_problem(settings),
                "column_problem": "its forward does more than to look up rows" if own else "",
            }
        held = {key: value for key, value in module._parameters.items() if value is not None}
        weight = held.get("weight")
        if weight is None or weight.dim() != 2 or not held.keys() <= {"weight", "bias"} or is_dtensor(weight):
            return {}
        if type(module).forward is nn.Linear.forward and "forward" not in vars(module):
            return {"computes": "linear"}
        if any(True for _ in module.children()):
            return {}
        numbers = {key: value for key, value in vars(module).items() if type(value) is int}
        alike = (type(module), tuple(weight.shape), tuple(held), tuple(numbers.items()))
        if alike not in self._known:
            with torch.no_grad(), torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
                self._known[alike] = _probe(module, held, numbers)
        return self._known[alike]


def _embedding_problem(settings: list[str]) -> str:
    if not settings:
        return ""
    return (
        f"it has {' and '.join(settings)}, which depend on the tokens of the other ranks; leave them out, or it whole"
    )


def _probe(module: nn.Module, held: Mapping[str, nn.Parameter], numbers: Mapping[str, int]) -> dict[str, Any]:
    rows, columns = held["weight"].shape
    for computes, outputs, inputs in (("linear", rows, columns), ("transposed linear", columns, rows)):
        if not _is_linear(module, held, outputs, inputs, computes):
            continue
        for attributes in _candidates(outputs, numbers):
            with attributes_set(module, dict.fromkeys(attributes, outputs - 1)):
                if _is_linear(module, held, outputs - 1, inputs, computes):
                    return {"computes": computes, "output_sizes": attributes}
        problem = f"its forward works with all {outputs} outputs only, and no attribute says how many there are"
        return {"computes": computes, "column_problem": problem}
    return {}


def _candidates(outputs: int, numbers: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Sets of attributes that may be the number of outputs: none, each, all."""
    yield ()
    named = tuple(key for key, value in numbers.items() if value == outputs)
    yield from ((key,) for key in named)
    yield named


def _is_linear(module: nn.Module, held: Mapping[str, nn.Parameter], outputs: int, inputs: int, computes: str) -> bool:
    """Whether the module, with random parameters of these sizes, maps a random input as it should."""
    given = held["weight"]
    device = torch.device("cpu") if given.is_meta else given.device
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    weight = random(outputs, inputs) if computes == "linear" else random(inputs, outputs)
    bias = random(outputs) if "bias" in held else None
    value = random(1, _ROWS, inputs)
    expected = value @ (weight.t() if computes == "linear" else weight)
    expected = expected if bias is None else expected + bias
    try:
        with parameters_set(module, {"weight": weight} if bias is None else {"weight": weight, "bias": bias}):
            output = module.forward(value)
    except Exception:  # whatever a forward that wants something else raises
        return False
    if not isinstance(output, torch.Tensor) or output.shape != expected.shape:
        return False
    # Both add `inputs` products of order 1 in float32, in some order.
    tolerance = max(inputs, 1) * torch.finfo(torch.float32).eps * 8
    return torch.allclose(output.float(), expected, rtol=tolerance, atol=tolerance)
