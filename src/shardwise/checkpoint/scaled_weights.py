"""Scaled weights: which tensors of a checkpoint are narrow floats with scales, and the rewrite that dequantises them.

    w.weight_scale_inv   float32 or float8_e8m0fnu    DeepSeek, and FineGrainedFP8 of transformers
    w.weight_scale       float8_e8m0fnu or uint8      MXFP8; float32 by rows, of compressed-tensors

Shapes say the block: the one of `config.json` where it fits, else (128, 128), (1, 32), or what divides evenly.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.huggingface_files import model_files
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import Address, store_of
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.plan.saved_settings import CONFIG
from shardwise.rewrite import Rewrite
from shardwise.rewrite.compiled_ops import QUANTISED, SCALES
from shardwise.rewrite.op_steps import grid_of
from shardwise.rewrite.spelling import quoted

__all__ = ["dequantising"]

_ENDINGS: Final = ("_scale_inv", "_scale")
_QUANTIZATION = "quantization_config"


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
    for name, tensor in contents.tensors.items():
        if tensor.dtype not in QUANTISED:
            continue
        scales = next((contents.tensors[name + end] for end in _ENDINGS if name + end in contents.tensors), None)
        if scales is None:
            findings.append(
                f"{name} is {tensor.dtype}, and has no tensor {' or '.join(name + end for end in _ENDINGS)}"
            )
            continue
        block = _block_of(tensor.shape, scales.shape, said) if scales.dtype in SCALES else None
        if block is None:
            findings.append(
                f"{name} {list(tensor.shape)} and its scales, {scales.dtype} {list(scales.shape)}, do not go together "
                "by blocks; write the statement by hand, if they do"
            )
            continue
        yield f"{quoted(name)}, {quoted(scales.name)} -> {quoted(name)}, dequantise='{list(block)}'{cast}"


def _said_block(config: Any) -> Sequence[int] | None:
    said: Any = config.get(_QUANTIZATION) if isinstance(config, Mapping) else None
    block = said.get("weight_block_size") if isinstance(said, Mapping) else None
    fits = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    return block if fits else None


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...], said: Sequence[int] | None) -> tuple[int, ...] | None:
    """The block by which scales are of elements; None where there is none."""
    if len(shape) != len(scales) or not all(scales):
        return None
    # Blocks are of the last two dims; of a stack of experts each has its own.
    known = [(1,) * (len(shape) - 2) + tuple(each) for each in ([said] if said else []) + [(128, 128), (1, 32)]]
    even = [tuple([size // each for size, each in zip(shape, scales, strict=True)])]
    for block in [each for each in known if len(each) == len(shape)] + even:
        if all(block) and grid_of(shape, block) == scales:
            return block
    return None
