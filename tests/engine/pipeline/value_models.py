"""Hand-written nets, each with one kind of value that goes into modules and out of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.engine.pipeline.models import CHAIN, NUM_WORDS, Chain, case, on_words
from tests.engine.pipeline.oracle import Case


@dataclass
class Halves:
    """Neither a tuple nor known to torch as a tree."""

    left: torch.Tensor
    right: torch.Tensor | None
    note: str


class Splitter(nn.Module):
    """A tuple of a tensor, a list with None, and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        return h, [h[:, :3], None, (h[:, 3:],)], {"sum": h.sum(), "count": 3, "nothing": None}


class Joiner(nn.Module):
    """Takes all that apart again; gives a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, pair: Any, /, parts: Any, *, extra: dict[str, Any], scale: float = 1.0) -> Halves:
        left, nothing, (right,) = parts
        assert nothing is None
        assert extra["nothing"] is None
        h = self.layer(torch.cat([left, right], 1) * scale + pair) + extra["sum"] / extra["count"]
        return Halves(left=h, right=h.tanh() if scale > 1 else None, note="joined")


def result(**values: Any) -> Any:
    """What models of transformers return; without attentions."""
    from transformers.modeling_outputs import CausalLMOutput  # seconds, which to collect tests does not take

    return CausalLMOutput(**values)


class Reporter(nn.Module):
    """Takes a dataclass, gives a ModelOutput."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, halves: Halves, *, factors: list[Any]) -> Any:
        assert halves.right is not None
        assert halves.note == "joined"
        h = self.layer(halves.left) * factors[1]
        return result(logits=h, hidden_states=(halves.left, halves.right))


class Nested(nn.Module):
    """Arguments and results in every kind of container, with other things between the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.splitter, self.joiner, self.reporter = Splitter(), Joiner(), Reporter()
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        whole, parts, extra = self.splitter(self.first(x))
        halves = self.joiner(whole, parts, extra=extra, scale=1.5)
        reported = self.reporter(halves, factors=["two", 2.0, None])
        assert reported.attentions is None
        assert reported.hidden_states is not None
        logits = self.last(reported[0] + reported.hidden_states[1])
        return result(loss=F.mse_loss(logits, y), logits=logits, hidden_states=(*reported.hidden_states, logits))


NESTED = {"first": 0, "splitter": 1, "joiner": 2, "reporter": 3, "last": 3}


class WithoutParameters(nn.Module):
    """Modules without parameters between those with some; two of them work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.fold = nn.Unflatten(1, (2, 3))
        self.middle = nn.Sequential(nn.ReLU(inplace=True), nn.Identity(), nn.Flatten())
        self.second = nn.Linear(6, 6)
        self.squash = nn.Tanh()
        self.third = nn.Linear(6, 6)
        self.clip = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.squash(self.second(self.middle(self.fold(self.first(x)))))
        out: torch.Tensor = self.last(self.drop(self.clip(self.third(h))))
        return out


WITHOUT_PARAMETERS = {"first": 0, "middle": 1, "second": 1, "squash": 2, "third": 2, "drop": 3, "last": 3}


class Turned(nn.Module):
    """Hands on what it computes with its dims exchanged, and a single value seen as many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layer(x)
        return h.unflatten(1, (1, 7)).transpose(0, 2), h.mean(1, keepdim=True).expand(-1, 7)


class Strided(nn.Module):
    """Outputs that are not contiguous cross stages, and are viewed as only their strides allow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.turned = nn.ModuleList(Turned() for _ in range(3))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for turned in self.turned:
            swapped, mean = turned(h)
            assert not swapped.is_contiguous()
            h = swapped.transpose(0, 2).view(-1, 7) + mean
        out: torch.Tensor = self.last(h)
        return out


STRIDED = {"first": 0, "turned.0": 0, "turned.1": 1, "turned.2": 2, "last": 3}


class Spectrum(nn.Module):
    """Gives complex values, whole numbers, truths and float64, and one of its inputs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.layer(x)
        return torch.fft.rfft(h), h.argsort(1), h > 0, h.double().cumsum(1), x


class Kinds(nn.Module):
    """Values of many dtypes cross stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.spectra = nn.ModuleList(Spectrum() for _ in range(3))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for spectrum in self.spectra:
            waves, order, positive, sums, same = spectrum(h)
            h = torch.fft.irfft(waves * 1.5, n=7).gather(1, order) + sums.float() * positive + same
        out: torch.Tensor = self.last(h)
        return out


KINDS = {"first": 0, "spectra.0": 0, "spectra.1": 1, "spectra.2": 2, "last": 3}


class Cube(torch.autograd.Function):
    """x^3 with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gradient: torch.Tensor = 3 * x**2 * gradients[0]
        return gradient


cube: Callable[[torch.Tensor], torch.Tensor] = Cube.apply


class Cubing(nn.Module):
    """A function of the user's own inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(cube(x))
        return out


class OwnFunctions(Chain):
    """Two blocks whose function has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[2] = Cubing(), Cubing()


class Autocast(Chain):
    """The forward switches autocast on and off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.blocks[1](self.blocks[0](self.first(x)))
            with torch.autocast("cpu", enabled=False):
                h = self.blocks[2](h.float())
            out: torch.Tensor = self.last(self.blocks[3](h))
        return out.float()


class TorchLayers(nn.Module):
    """torch's own encoder, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 6)
        # With this activation torch has no second way to evaluate, which it takes where a module has no hooks.
        layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, activation=torch.tanh, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(6, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        out: torch.Tensor = self.out(self.encoder(self.embed(words), mask=causal, is_causal=True))
        return out


TORCH_LAYERS = {"embed": 0, "encoder.layers.0": 1, "encoder.layers.1": 2, "encoder.layers.2": 3, "out": 3}


CASES: dict[str, Case] = {
    "nested": case(Nested, NESTED, loss=None),
    "without parameters": case(WithoutParameters, WITHOUT_PARAMETERS),
    "strided": case(Strided, STRIDED),
    "kinds": case(Kinds, KINDS),
    "own functions": case(OwnFunctions, CHAIN),
    "autocast": case(Autocast, CHAIN),
    "torch layers": on_words(TorchLayers, TORCH_LAYERS),
}
