"""Scaled weights: which tensors of a checkpoint are narrow floats with scales, and the rewrite that dequantises them.

    w.weight_scale_inv   float32 or float8_e8m0fnu    DeepSeek, and FineGrainedFP8 of transformers
    w.weight_scale       float8_e8m0fnu or uint8      MXFP8; float32 by rows or one, of compressed-tensors or ModelOpt

Shapes say the block: the one of `config.json` where it fits, else (128, 128), (1, 32), or what divides evenly. Scales
with fewer dims ([], [1], [rows]) are one for all, or one for each index of the first dims.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.model_files import model_files
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import Address, store_of
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.plan.saved_settings import CONFIG
from shardwise.rewrite import Rewrite
from shardwise.rewrite.spelling import text_of_name
from shardwise.rewrite.statements import Name, NamePart, Placeholder, TextPlace
from shardwise.rewrite.verbs.quantise import QUANTISED, SCALES, grid_of

_ENDINGS: Final = ("_scale_inv", "_scale")
_QUANTIZATION: Final = "quantization_config"
_DIGITS: Final = re.compile("[0-9]+")


def dequantising(source: Address, dtype: str = "bfloat16", *, step: int | None = None) -> Rewrite:
    """The rewrite that multiplies all narrow floats of the checkpoint at `source` by their scales.

    dtype: of the products, which are computed in float32. step: the newest save of this step.
    Only metadata is read. Give the rewrite to `sw.load` or `convert`, alone or before another one (`>>`). Its inverse
    quantises by the same blocks. Raises CheckpointError where nothing is quantised, or scales are not understood.
    """
    if dtype not in COMPUTE_DTYPES:
        raise CheckpointError(f"floats are dequantised to {', '.join(COMPUTE_DTYPES)}, not to {dtype!r}")
    store = store_of(source)
    contents = read_contents(store, step=step)
    config = model_files(store, contents).get(CONFIG)
    findings: list[str] = []
    statements = list(_statements(contents, _said_block(config), dtype, findings))
    if findings:
        raise CheckpointError(*findings, about=f"{contents.location} cannot be dequantised")
    if not statements:
        raise CheckpointError(
            f"{contents.location} has no tensor of {' or '.join(QUANTISED)}, so that there is nothing to dequantise"
        )
    return Rewrite(statements)


def _statements(contents: Contents, said: Sequence[int] | None, dtype: str, findings: list[str]) -> Iterator[str]:
    cast = "" if dtype == "float32" else f", dtype='{dtype}'"
    alike: dict[tuple[str, ...], dict[tuple[str, tuple[int, ...]], list[str]]] = {}
    for name, tensor in contents.tensors.items():
        end = next((end for end in _ENDINGS if name + end in contents.tensors), None)
        if tensor.dtype not in QUANTISED:
            # A statement for all layers would match it too.
            if end is not None:
                alike.setdefault(_words(name), {})["", ()] = []
            continue
        if end is None:
            findings.append(
                f"{name} is {tensor.dtype}, and has no tensor {' or '.join(name + end for end in _ENDINGS)}"
            )
            continue
        scales = contents.tensors[name + end]
        block = _block_of(tensor.shape, scales.shape, said) if scales.dtype in SCALES else None
        if block is None:
            findings.append(
                f"{name} {list(tensor.shape)} and its scales, {scales.dtype} {list(scales.shape)}, do not go together "
                "by blocks; write the statement by hand, if they do"
            )
            continue
        alike.setdefault(_words(name), {}).setdefault((end, block), []).append(name)
    for groups in alike.values():
        for (end, block), names in groups.items():
            # One statement for all layers and experts, unless they differ: 45,000 would take a minute to check.
            written = [_pattern(names[0])] if len(groups) == 1 and len(names) > 1 else [(name,) for name in names]
            for parts in written:
                elements, scales_text = (text_of_name(_named(each), right=True) for each in (parts, (*parts, end)))
                yield f"{elements}, {scales_text} -> {elements}, dequantise='{list(block)}'{cast}"


def _words(name: str) -> tuple[str, ...]:
    """What names of all layers and experts have in common."""
    return tuple(_DIGITS.split(name))


def _pattern(name: str) -> tuple[NamePart, ...]:
    """A name with a placeholder for each number."""
    words = _words(name)
    numbers: list[NamePart] = [Placeholder(f"N{place}") for place in range(1, len(words))]
    parts: list[NamePart] = [part for pair in zip(words, (*numbers, ""), strict=True) for part in pair]
    return tuple(part for part in parts if part)


def _named(parts: Sequence[NamePart]) -> Name:
    *most, last = parts
    # The ending of scales belongs to the text before it.
    merged = (*most[:-1], most[-1] + last) if most and isinstance(most[-1], str) and isinstance(last, str) else parts
    return Name(tuple(merged), False, TextPlace(1, 1, 1))


def _said_block(config: Any) -> Sequence[int] | None:
    said: Any = config.get(_QUANTIZATION) if isinstance(config, Mapping) else None
    block = said.get("weight_block_size") if isinstance(said, Mapping) else None
    fits = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    return block if fits else None


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...], said: Sequence[int] | None) -> tuple[int, ...] | None:
    """The block by which scales are of elements; None where there is none."""
    if not all(scales):
        return None
    if len(shape) != len(scales):
        first = [size for size in scales if size != 1]
        block = (*[1] * len(first), *[-1] * (len(shape) - len(first)))
        return block if list(shape[: len(first)]) == first and shape else None
    # Blocks are of the last two dims; of a stack of experts each has its own.
    known = [(1,) * (len(shape) - 2) + tuple(each) for each in ([said] if said else []) + [(128, 128), (1, 32)]]
    even = [tuple([size // each for size, each in zip(shape, scales, strict=True)])]
    for block in [each for each in known if len(each) == len(shape)] + even:
        if all(block) and grid_of(shape, block) == scales:
            return block
    return None
