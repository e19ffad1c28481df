"""What saves say of a model besides its tensors: the files that describe it, and by which rewrite they were made."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from shardwise.plan.saved_settings import (
    ADDED,
    CONFIG,
    DEGREES,
    KEPT,
    LOADED_BY,
    MODEL_FILES,
    SEVERAL,
    SavedRecord,
    a_mapping,
    record_in,
    text_of_record,
)

_GENERATION = "generation_config.json"

_MOST_BYTES = 1 << 20
"""Of one file: the manifest has it, and every rank reads that."""


class ModelRecord(SavedRecord):
    """The record of a live model, which a load gives and later saves repeat."""

    def __init__(self) -> None:
        self._loaded_by: Mapping[str, Any] = {}

    @override
    def settings(self, model: object) -> dict[str, Any]:
        return settings_of_model(model) | ({LOADED_BY: self._loaded_by} if self._loaded_by else {})

    @override
    def after(self, settings: Mapping[str, Any]) -> Callable[[], None]:
        return partial(setattr, self, "_loaded_by", _record_after(self._loaded_by, settings))


def settings_of_model(model: object) -> dict[str, Any]:
    """The files that `save_pretrained` would write next to the tensors of a model, as settings; {} for other models.

    A configuration is known by its method `to_json_string`, as those of transformers have it.
    """
    # A model that torch.compile wrapped has another class, and the name of the class goes into the configuration.
    model = getattr(model, "_orig_mod", model)
    # By what the object can do, not by its class: this room imports no torch and the library needs no transformers.
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


def _record_after(before: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record after a load of a save with these settings. before: that of the values until then."""
    found = record_in(settings)
    kept = {*settings.get(ADDED, ()), *settings.get(KEPT, ())}
    if not kept or not before or before == found:
        return found
    # Each value has one origin, but the state has several: no single rewrite leads back.
    degrees = {name: each for name, each in a_mapping(before.get(DEGREES)).items() if name in kept}
    loads = [text for each in (before, found) for text in each.get(SEVERAL) or [text_of_record(each)]]
    return {SEVERAL: loads, DEGREES: {**degrees, **a_mapping(found.get(DEGREES))}}


def _written(config: Any) -> dict[str, Any] | None:
    """A configuration as JSON; None where there is none, or none that a save could keep."""
    write = getattr(config, "to_json_string", None)
    if not callable(write):
        return None
    try:
        text = write()
        found = json.loads(text) if len(text) <= _MOST_BYTES else None
    # A configuration may be of the user's own and raise anything. It only describes the model: a save goes on without.
    except Exception:
        return None
    return found if isinstance(found, dict) else None
