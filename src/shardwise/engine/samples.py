"""A sample for a model of transformers, made by the sizes of its configuration."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.engine.forward.trial_runs import aside

# Small: the model runs on it once to be traced, and once per rank in each rehearsal.
_ROWS = 2
_TOKENS = 8


def sample_for(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """A small batch by the names of the forward's arguments and the sizes of `model.config`.

    Tokens are arbitrary numbers; pixels and sounds are random. It is the same on every rank, and the model runs on it:
    None where no batch is found on which it does.
    """
    if getattr(model, "config", None) is None or not hasattr(model, "dummy_inputs"):
        return None
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    for names in _candidates(model):
        batch = {name: each.to(device) for name, each in _made(model, names).items()}
        try:
            with aside(model):
                model.eval()(**batch)
        except Exception:
            # A model that wants other arguments raises what it likes; the next candidate has more of them.
            continue
        return batch
    return None


def _candidates(model: nn.Module) -> Iterator[list[str]]:
    """Arguments to give: the main input of the model and those without a default; then all that are known."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    needed = [name for name, each in parameters.items() if each.default is each.empty and name in _MAKERS]
    least = list(dict.fromkeys([main, *needed, *(name for name in _BESIDE if name in parameters)]))
    yield [name for name in least if name in _MAKERS]
    yield [name for name in parameters if name in _MAKERS]


def _made(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    # A generator of its own: all ranks make one sample, infer one plan, and the random state of the program stays.
    generator = torch.Generator().manual_seed(0)
    sizes = _ConfigSizes(model.config)
    dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    made = {name: _MAKERS[name](sizes, generator) for name in names}
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in made.items()}


class _ConfigSizes:
    """Numbers of a configuration, or of one inside it."""

    def __init__(self, config: Any) -> None:
        self._configs = [config]
        for key in ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config"):
            inner = getattr(config, key, None)
            if inner is not None and not isinstance(inner, Mapping | int | float | str | bool):
                self._configs.append(inner)

    def number(self, *names: str, default: int) -> int:
        """The first of these that some configuration has."""
        for config in self._configs:
            for name in names:
                value = getattr(config, name, None)
                if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
                    value = value[0]
                if type(value) is int and value > 0:
                    return value
        return default


def _tokens(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    count = sizes.number("vocab_size", default=16)
    # Not from 0: small numbers are special tokens (padding, start), which masks may leave out of the computation.
    return torch.randint(min(5, count - 1), count, (_ROWS, _TOKENS), generator=generator)


def _pixels(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    size = sizes.number("image_size", "img_size", "input_size", default=32)
    return torch.randn(_ROWS, sizes.number("num_channels", "in_channels", default=3), size, size, generator=generator)


def _frames(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    images = [_pixels(sizes, generator) for _ in range(sizes.number("num_frames", default=2))]
    return torch.stack(images, 1)


def _mel(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    bins = sizes.number("num_mel_bins", "feature_size", "n_mels", default=16)
    # An encoder with a fixed number of positions (Whisper) halves its frames by a convolution before it adds them.
    if (positions := sizes.number("max_source_positions", default=0)) > 0:
        return torch.randn(_ROWS, bins, 2 * positions, generator=generator)
    return torch.randn(_ROWS, 32, bins, generator=generator)


def _sound(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    """A wave, or a spectrogram where frequencies are counted."""
    if (bins := sizes.number("num_mel_bins", default=0)) and (length := sizes.number("max_length", default=0)):
        return torch.randn(_ROWS, length, bins, generator=generator)
    return torch.randn(_ROWS, 2000, generator=generator)


def _boxes(sizes: _ConfigSizes, generator: torch.Generator) -> torch.Tensor:
    corner = torch.randint(0, 4, (_ROWS, _TOKENS, 2), generator=generator)
    return torch.cat([corner, corner + 3], -1)


_MAKERS: dict[str, Callable[[_ConfigSizes, torch.Generator], torch.Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _pixels,
    "pixel_values_videos": _frames,
    "input_features": _mel,
    "input_values": _sound,
    "bbox": _boxes,
}
"""Arguments of forwards, by the names that they have in transformers."""

_BESIDE = ("decoder_input_ids", "bbox")
"""What a forward needs though it has a default."""
