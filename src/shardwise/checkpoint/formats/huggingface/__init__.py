"""Files of Hugging Face: safetensors, one file or several, read and written."""

from collections.abc import Sequence

from shardwise.checkpoint.formats.format import Format
from shardwise.checkpoint.formats.huggingface.reading import read_contents
from shardwise.checkpoint.formats.huggingface.writing import plan_files


def _is_model(names: Sequence[str]) -> bool:
    # Not below: a folder that holds models in folders is no model.
    return any("/" not in name and name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


FORMAT = Format(
    name="safetensors",
    recognises=_is_model,
    recognises_file=lambda name: name.endswith(".safetensors"),
    read=read_contents,
    targets={"hf": plan_files},
)
