"""What saves say of a model besides its tensors: the files that describe it, and by which rewrite they were made."""

import json
from collections.abc import Callable, Mapping
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
    origin_of,
    text_of_record,
)

_GENERATION = "generation_config.json"

_MOST_BYTES = 1 << 20
"""Of one file: the manifest has it, and every rank reads that."""


class ModelRecord(SavedRecord):
    """The record of a live model. An origin is handed on from load to save."""

    def __init__(self) -> None:
        self._origin: dict[str, Any] = {}

    @override
    def settings(self, model: object) -> dict[str, Any]:
        return settings_of_model(model) | self._origin

    @override
    def after(self, settings: Mapping[str, Any]) -> Callable[[], None]:
        found = _origin_after(self._origin, settings)

        def take_note() -> None:
            self._origin = found

        return take_note


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


def _origin_after(before: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The origin of values that a load of a save with these settings has put over others, whose origin is `before`."""
    found = origin_of(settings)
    kept = {*settings.get(ADDED, ()), *settings.get(KEPT, ())}
    if not kept or not before or before == found:
        return found
    # Each value has one origin, but the state has several: no single rewrite leads back.
    earlier, later = (_a_mapping(each.get(LOADED_BY)) for each in (before, found))
    degrees = {name: each for name, each in _a_mapping(earlier.get(DEGREES)).items() if name in kept}
    loads = [text for each in (earlier, later) for text in each.get(SEVERAL) or [text_of_record(each)]]
    return {LOADED_BY: {SEVERAL: loads, DEGREES: {**degrees, **_a_mapping(later.get(DEGREES))}}}


def _a_mapping(value: Any) -> Mapping[str, Any]:
    """A part of a record, which any program may have written; nothing where it is of another kind."""
    return value if isinstance(value, Mapping) else {}


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
