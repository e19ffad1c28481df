"""A Llama-like model of about so many bytes as safetensors files, and a rewrite that fuses and transposes it.

Its values are random bytes, so that nothing in it is alike; some of them are no numbers, which nobody here minds.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

__all__ = ["STATEMENTS", "Weights", "prove"]

HIDDEN = 1024
INTERMEDIATE = 2816
NUM_HEADS, NUM_GROUPS, HEAD = 16, 4, 64
EMBEDDINGS = 0.13
"""The share of all bytes that embedding and head have together: so many as 32,000 words in a model of 1 GB."""
BYTES_PER_FILE = 200 * 10**6

STATEMENTS = f"""
model.layers.$L.self_attn.q_proj.weight^T, model.layers.$L.self_attn.k_proj.weight^T, \
model.layers.$L.self_attn.v_proj.weight^T \
-> layers.$L.qkv, fused_qkv, num_heads={NUM_HEADS}, num_key_value_groups={NUM_GROUPS}
model.layers.$L.self_attn.o_proj.weight^T -> layers.$L.out
model.layers.$L.mlp.gate_proj.weight^T, model.layers.$L.mlp.up_proj.weight^T -> layers.$L.gate_up, fused_ffn, dst_tp=2
model.layers.$L.mlp.down_proj.weight^T -> layers.$L.down
lm_head.weight^T -> head
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model of so many layers and words."""

    num_layers: int
    num_words: int

    @classmethod
    def of_bytes(cls, num_bytes: int) -> "Weights":
        """The model whose size is nearest to this; it has a layer at least."""
        words = round(EMBEDDINGS * num_bytes / (2 * 2 * HIDDEN))
        empty, one = (cls(num_layers=layers, num_words=words).num_bytes for layers in (0, 1))
        return cls(num_layers=max(1, round((num_bytes - empty) / (one - empty))), num_words=words)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(2 * math.prod(shape) for shape in self.shapes().values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors in order; all are bfloat16."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.num_words, HIDDEN)}
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            shapes[f"{name}.input_layernorm.weight"] = (HIDDEN,)
            shapes[f"{name}.self_attn.q_proj.weight"] = (NUM_HEADS * HEAD, HIDDEN)
            shapes[f"{name}.self_attn.k_proj.weight"] = (NUM_GROUPS * HEAD, HIDDEN)
            shapes[f"{name}.self_attn.v_proj.weight"] = (NUM_GROUPS * HEAD, HIDDEN)
            shapes[f"{name}.self_attn.o_proj.weight"] = (HIDDEN, NUM_HEADS * HEAD)
            shapes[f"{name}.post_attention_layernorm.weight"] = (HIDDEN,)
            shapes[f"{name}.mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
            shapes[f"{name}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
            shapes[f"{name}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (self.num_words, HIDDEN)}

    def write(self, folder: Path) -> None:
        """Write the model into several files, as models come from a hub."""
        generator = torch.Generator().manual_seed(5)
        for number, shapes in enumerate(self._files()):
            tensors = {name: _random(shape, generator) for name, shape in shapes.items()}
            save_file(tensors, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})

    def _files(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """The tensors of each file. Without an index beside them, all files of a folder count."""
        part: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes().items():
            if part and 2 * sum(map(math.prod, [*part.values(), shape])) > BYTES_PER_FILE:
                yield part
                part = {}
            part[name] = shape
        yield part


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    integers = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    return integers.view(torch.bfloat16)


def prove(weights: Weights, source: Path, read: Callable[[str], torch.Tensor]) -> None:
    """Compare a converted model with what plain torch makes of the source: the first and the last layer, and the head.

    read: gives a tensor of the converted model. Raises RuntimeError for one that is another.
    """
    before = _reader(source)
    for layer in sorted({0, weights.num_layers - 1}):
        old, new = f"model.layers.{layer}", f"layers.{layer}"
        q, k, v = (before(f"{old}.self_attn.{part}_proj.weight").T for part in "qkv")
        gate, up = (before(f"{old}.mlp.{part}_proj.weight").T for part in ("gate", "up"))
        heads = [part.view(HIDDEN, NUM_GROUPS, -1) for part in (q, k, v)]
        halves = [part.reshape(HIDDEN, 2, -1) for part in (gate, up)]
        _compare(f"{new}.qkv", torch.cat(heads, dim=2).flatten(1), read)
        _compare(f"{new}.gate_up", torch.cat(halves, dim=2).flatten(1), read)
        _compare(f"{new}.out", before(f"{old}.self_attn.o_proj.weight").T, read)
        _compare(f"{new}.down", before(f"{old}.mlp.down_proj.weight").T, read)
        _compare(f"{old}.input_layernorm.weight", before(f"{old}.input_layernorm.weight"), read)
    _compare("head", before("lm_head.weight").T, read)
    _compare("model.embed_tokens.weight", before("model.embed_tokens.weight"), read)


def _reader(folder: Path) -> Callable[[str], torch.Tensor]:
    """Reads tensors of safetensors files, as integers: bits are compared, not numbers."""
    place = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            place.update(dict.fromkeys(file.keys(), path))

    def read(name: str) -> torch.Tensor:
        with safe_open(place[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.view(torch.int16)

    return read


def _compare(name: str, expected: torch.Tensor, read: Callable[[str], torch.Tensor]) -> None:
    if not torch.equal(read(name).view(torch.int16), expected):
        raise RuntimeError(f"{name} is not what plain torch makes of the source")
