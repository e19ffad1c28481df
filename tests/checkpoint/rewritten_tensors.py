"""Small states, rewrites of them, and what plain torch makes of the same tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.checkpoint import Loaded
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import Cut, Pieces, cut
from tests.checkpoint.small_states import same_tensor

Whole = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A rewrite, and the same in plain torch."""

    text: str
    sources: Mapping[str, tuple[int, ...]]
    plain: Callable[[Whole], Whole]
    dtype: str = "float32"

    def values(self) -> Whole:
        """Source tensors: every element is another number."""
        numbers = torch.Generator().manual_seed(7)
        dtype = getattr(torch, self.dtype)
        return {name: torch.randn(shape, generator=numbers).to(dtype) for name, shape in self.sources.items()}


def _qkv(whole: Whole) -> Whole:
    """Of four query heads, two key and two value heads of two rows each."""
    q, k, v = (whole[name].view(-1, 2, 5) for name in "qkv")
    parts = [part for group in (0, 1) for part in (*q[2 * group : 2 * group + 2], k[group], v[group])]
    return {"qkv": torch.cat(parts)}


def _apart(whole: Whole) -> Whole:
    heads = whole["qkv"].view(8, 2, 5)
    picked = {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
    return {name: heads[at].reshape(-1, 5) for name, at in picked.items()}


CASES: Mapping[str, Case] = {
    "names": Case(
        text="layers.$L.w -> h.$L.weight",
        sources={"layers.0.w": (6, 4), "layers.1.w": (4, 3), "other": (7,)},
        plain=lambda w: {"h.0.weight": w["layers.0.w"], "h.1.weight": w["layers.1.w"], "other": w["other"]},
    ),
    "rows": Case(
        text="a, b, c -> abc, axis=0",
        sources={"a": (4, 6), "b": (3, 6), "c": (5, 6)},
        plain=lambda w: {"abc": torch.cat([w["a"], w["b"], w["c"]])},
    ),
    "split": Case(
        text="a -> x, y, axis=1, sizes='[2,5]'",
        sources={"a": (4, 7)},
        plain=lambda w: {"x": w["a"][:, :2], "y": w["a"][:, 2:]},
    ),
    "transposed": Case(text="a^T -> b", sources={"a": (5, 7)}, plain=lambda w: {"b": w["a"].T}),
    "reshaped": Case(
        text="a -> b, permute='[1,0,2]', reshape='[6,-1]'",
        sources={"a": (2, 6, 5)},
        plain=lambda w: {"b": w["a"].permute(1, 0, 2).reshape(6, -1)},
    ),
    "qkv": Case(
        text="q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0",
        sources={"q": (8, 5), "k": (4, 5), "v": (4, 5)},
        plain=_qkv,
    ),
    "apart": Case(
        text="qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0",
        sources={"qkv": (16, 5)},
        plain=_apart,
    ),
    "experts": Case(
        text="e.*.w^T -> experts, stack=0, gaps=1",
        sources={f"e.{number}.w": (4, 6) for number in (0, 1, 2, 10)},
        plain=lambda w: {"experts": torch.stack([w[f"e.{number}.w"].T for number in (0, 1, 2, 10)])},
    ),
    "padded": Case(
        text="a^T -> b, pad='[9,-1]', fill='0.1'; b, c -> d, axis=1, dtype='bfloat16'",
        sources={"a": (5, 7), "c": (9, 2)},
        plain=lambda w: {
            "d": torch.cat([torch.nn.functional.pad(w["a"].T, (0, 0, 0, 2), value=0.1), w["c"]], 1).bfloat16()
        },
    ),
    "padded and cropped": Case(
        text="a -> t, pad='[9,8]', fill=3; t -> b, permute='[]', crop='[6,-1]'",
        sources={"a": (5, 7)},
        plain=lambda w: {"b": torch.nn.functional.pad(w["a"], (0, 1, 0, 4), value=3)[:, :6].T},
    ),
    "cast": Case(
        text="a^T -> b, dtype='bfloat16'",
        sources={"a": (5, 7)},
        plain=lambda w: {"b": w["a"].T.bfloat16()},
    ),
    "rounded twice": Case(
        text="a^T -> t, dtype='bfloat16'; t -> b, dtype='float16'",
        sources={"a": (5, 7)},
        plain=lambda w: {"b": w["a"].T.bfloat16().half()},
    ),
    "copies": Case(
        text="a -> b; a -> c, permute='[]'; a -> a",
        sources={"a": (4, 6)},
        plain=lambda w: {"b": w["a"], "c": w["a"].T, "a": w["a"]},
    ),
    "dropped": Case(
        text="a -> _; b -> c", sources={"a": (4, 6), "b": (3, 4)}, plain=lambda w: {"c": w["b"]}, dtype="float64"
    ),
    "empty": Case(
        text="a, none -> b, axis=0; nothing -> still",
        sources={"a": (4, 6), "none": (0, 6), "nothing": (0, 3)},
        plain=lambda w: {"b": w["a"], "still": w["nothing"]},
    ),
}


def shares_of(whole: Mapping[str, torch.Tensor], how: Cut, size: int) -> list[Pieces]:
    """Tensors cut into the pieces of so many ranks; what has no elements is on all."""
    shares: list[Pieces] = [{} for _ in range(size)]
    for name, tensor in whole.items():
        parts = cut(name, tensor, how, size) if tensor.numel() else [_whole(name, tensor)] * size
        for share, part in zip(shares, parts, strict=True):
            share.update({piece: value.clone() for piece, value in part.items()})
    return shares


def _whole(name: str, tensor: torch.Tensor) -> Pieces:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {Piece(name=name, dtype=dtype, global_shape=tuple(tensor.shape)): tensor}


def blank(shares: Sequence[Pieces]) -> list[Pieces]:
    """The same pieces, with other numbers."""
    return [{piece: torch.full_like(tensor, 77) for piece, tensor in share.items()} for share in shares]


def same_pieces(one: Pieces, other: Pieces) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(same_tensor(tensor, other[piece]) for piece, tensor in one.items())


CUTS: list[tuple[Cut, Cut]] = [("rows", "columns"), ("columns", "runs"), ("runs", "rows"), ("rows", "runs")]
"""How tensors are cut that are saved, and that are loaded."""


def load_all(path: Path, states: list[Any], **arguments: Any) -> list[Loaded]:
    """A load by as many ranks as there are states."""
    return sw.simulate(len(states), lambda channel: sw.load(path, states[channel.rank], channel=channel, **arguments))
