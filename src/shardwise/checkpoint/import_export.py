"""Import and export: a folder of Hugging Face files becomes a save of ours, and a save becomes such a folder."""

import os

from shardwise.checkpoint.conversion import MAX_SHARD_BYTES, Conversion, ConvertReport, convert
from shardwise.checkpoint.destinations import Progress
from shardwise.checkpoint.formats.registry import recognise
from shardwise.checkpoint.formats.unread import no_checkpoint
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.states import Weights, check_arguments
from shardwise.checkpoint.stores import Address, store_of
from shardwise.errors import CheckpointError
from shardwise.rewrite import Rewrite


def import_hf(
    folder: Address,
    out: Address,
    rewrite: Rewrite | None = None,
    *,
    certify: bool = True,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Make a save in `out` of the safetensors files in `folder`, one or several with an index.

    rewrite: what is saved are its outputs. Parameters that it was not given come from `config.json`, the nested
        `text_config` included.
    certify: read both again, the save back through the inverse of the rewrite. Write `round-trip.json` next to its
        manifest: for each tensor, whether it comes back; see `Certificate`. What should come back and does not is an
        error, and leaves no save.

    The save keeps `config.json` and `generation_config.json` in its extra, under "huggingface", so that `export_hf`
    can write them again. It is made whole or not at all, in bounded memory; see `convert`.
    Raises CheckpointError for a folder that holds no such files, or damaged ones, and RewriteError for a rewrite that
    does not fit them.
    """
    check_arguments(rewrite=rewrite, flags={"certify": certify})
    store = store_of(folder)
    # convert takes any format; here the user has said that it is a model of Hugging Face.
    if (kind := recognise(store)) != "safetensors":
        what = f"{store.location} is a {kind} checkpoint" if kind else no_checkpoint(store)
        way = "" if kind is None else ", or use convert (shardwise ckpt convert)"
        raise CheckpointError(f"{what}; give a folder of safetensors files{way}")
    conversion = Conversion.of(store, read_contents(store), rewrite, to="whole")
    return conversion.write(out, "whole", certify=certify, progress=progress)


def export_hf(
    path: Address,
    out: Address,
    rewrite: Rewrite | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    weights: Weights = "current",
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    certify: bool = True,
    original: Address | None = None,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Make a folder `out` of Hugging Face files of the model in the checkpoint at `path`, for `from_pretrained`.

    rewrite: its outputs are written. To undo that of an import, give its `inverse()`, which finds sizes and dtypes in
        the save. Parameters that it was not given come from `config.json`.
    config: what else belongs there: a folder whose `config.json` and files of the tokenizer are copied, or a
        configuration file. They go before what the save keeps: the `config.json` of the engine's model, or what
        `import_hf` has kept. Where there is none, `missing` of the report says so.
    dtype: in which floats are written, such as "float32": from the masters where the save has them. None: as the model
        computed with them, in the dtype in which they are stored. A `config.json` that says another dtype is corrected.
        Packed weights (codes of one byte, or with tensors under their names) and their modules keep their dtypes.
    weights, step, max_shard_bytes, original: see `convert`.
    certify: see `import_hf`; `round-trip.json` is one of the files.

    The model's tensors are written in the dtype in which they are stored, a tied one once, under its own name. The
    folder must not exist or be empty; it is made whole or not at all, in bounded memory.
    Raises CheckpointError and RewriteError as `convert` does.
    """
    # The general conversion with the defaults of an export: it certifies, and never writes the state of optimizers.
    return convert(
        path,
        out,
        to="hf",
        rewrite=rewrite,
        config=config,
        dtype=dtype,
        weights=weights,
        step=step,
        max_shard_bytes=max_shard_bytes,
        certify=certify,
        original=original,
        progress=progress,
    )
