"""Model settings: what a save keeps of a model beside its tensors, so that others can load what is exported of it."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["CONFIG", "LOADED_BY", "MODEL_FILES", "REWRITE", "origin_of", "settings_of_model"]

CONFIG = "config.json"
"""The file from which `from_pretrained` makes a model."""

MODEL_FILES = "model_files"
"""Under this key the settings of a save have the files that describe the model: file name -> JSON."""

REWRITE = "rewrite"
"""Under this key the settings of a save have the record of the rewrite by which its tensors were made."""

LOADED_BY = "loaded_by"
"""Under this key they have the record of the rewrite by which the values were made that training went on from."""

_GENERATION = "generation_config.json"

_MOST_BYTES = 1 << 20
"""Of one file: the manifest has it, and every rank reads that."""


def settings_of_model(model: object) -> dict[str, Any]:
    """The files that `save_pretrained` would write beside the tensors of a model, as settings; {} for other models.

    A configuration is known by its method `to_json_string`, as those of transformers have it.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    config = _written(getattr(model, "config", None))
    if config is None:
        return {}
    if hasattr(type(model), "config_class"):  # a class that `from_pretrained` can make
        config["architectures"] = [type(model).__name__]
    files = {CONFIG: config}
    can_generate = getattr(model, "can_generate", None)
    if callable(can_generate) and can_generate():
        generation = _written(getattr(model, "generation_config", None))
        files |= {} if generation is None else {_GENERATION: generation}
    return {MODEL_FILES: files}


def origin_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings of a save, what says by which rewrite its values came into the form that they have."""
    record = settings.get(REWRITE, settings.get(LOADED_BY))
    return {} if record is None else {LOADED_BY: record}


def _written(config: Any) -> dict[str, Any] | None:
    """A configuration as JSON; None where there is none, or none that a save could keep."""
    write = getattr(config, "to_json_string", None)
    if not callable(write):
        return None
    try:
        text = write()
        found = json.loads(text) if len(text) <= _MOST_BYTES else None
    except Exception:  # a configuration of the user's own: whatever keeps it from being written, a save goes on
        return None
    return found if isinstance(found, dict) else None
