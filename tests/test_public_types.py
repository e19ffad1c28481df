"""Public signatures say what they take and give: `Any` only where a reason stands here.

`tests/typed_programs.py` has what a type checker accepts of a user's program, and what it refuses.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any, get_args, get_origin, get_type_hints

import shardwise as sw
from shardwise import comm, engine, moving, plan, rewrite, space, train

# Names are loaded when first used: here, so that the test has only its own work.
NAMES = {
    f"{room.__name__}.{name}": getattr(room, name)
    for room in (sw, sw.checkpoint, comm, engine, moving, plan, rewrite, space, train)
    for name in room.__all__
}

REASONS = {
    "a batch is what the user's model takes: any nesting of tensors and other values": [
        "engine.engine.Engine.evaluate(batch)",
        "engine.engine.Engine.step(batch)",
        "engine.parallelize.parallelize(sample)",
        "train.verification.verifier.verify(batches)",
    ],
    "objects of torchmetrics, which need not be installed, and what they compute": [
        "engine.engine.Engine.evaluate(metrics)",
        "engine.reports.EvaluationReport.metrics",
    ],
    "what wandb.init takes": ["train.wandb_curves.Wandb.__init__(options)"],
    "the user's functions name the types of their batches and of what the model returns": [
        "data.global_batches.Data.__init__(collate)",
        "data.global_batches.RankBatches.__iter__()",
        "engine.engine.Engine.step(loss)",
        "engine.parallelize.parallelize(loss)",
        "engine.parallelize.parallelize(loss_weight)",
        "train.verification.verifier.verify(loss)",
        "train.verification.verifier.verify(loss_weight)",
    ],
    "JSON values, whose types only the program knows that saved them": [
        "checkpoint.contents.Contents.extra",
        "checkpoint.contents.Contents.settings",
        "checkpoint.inspection.Catalogue.extra()",
        "checkpoint.loading.Loaded, its base",
        "checkpoint.torch_state.TorchState.settings()",
        "data.global_batches.Data.cursor()",
        "engine.engine.Engine.settings()",
        "rewrite.rewrites.Rewrite.from_record(record)",
        "train.callbacks.TrainingLoop.__init__(settings)",
        "train.callbacks.TrainingLoop.load_state_dict(states)",
        "train.callbacks.TrainingLoop.state_dict()",
        "train.config.RunConfig.settings()",
        "train.early_stopping.EarlyStopping.load_state_dict(state)",
        "train.early_stopping.EarlyStopping.state_dict()",
        "train.wandb_curves.Wandb.load_state_dict(state)",
        "train.wandb_curves.Wandb.state_dict()",
    ],
    "inputs of any nesting, and what the user's function makes of them: the overloads say more": [
        "engine.engine.Engine.predict()",
        "engine.engine.Engine.predict(inputs)",
        "engine.engine.Engine.predict(output_of)",
    ],
    "values of any nesting, of any rank": [
        "moving.nested_exchange.exchange()",
        "moving.nested_exchange.exchange(value)",
    ],
    "what a model's own generate takes and gives": [
        "engine.engine.Engine.generate()",
        "engine.engine.Engine.generate(inputs)",
        "engine.engine.Engine.generate(kwargs)",
    ],
    "state dicts, as torch types them": [
        "engine.full_state.full_state_dict()",
    ],
    "objects of fsspec, which has no types": [
        "checkpoint.remote.FsspecStore.__init__(file_system)",
        "checkpoint.remote.FsspecStore.begin()",
        "checkpoint.remote.FsspecStore.finish(file)",
    ],
}

OF_THE_ENGINE = ("shardwise.engine.pipeline.", "shardwise.engine.state.")
"""Users read attributes of what these modules have, and call nothing of it."""

Hints = Iterator[tuple[str, object]]
"""Types by place: "file.function(argument)", "file.function()" for its result, "file.Class.attribute"."""


def anys_in(hint: object) -> int:
    """How often `Any` stands in a type, at any depth."""
    return 1 if hint is Any else sum(map(anys_in, hint if isinstance(hint, list) else get_args(hint)))


def classes_in(hint: object) -> Iterator[type]:
    """The classes of the library that a type names, at any depth."""
    origin = get_origin(hint) or hint
    module = f"{getattr(origin, '__module__', '')}."
    if inspect.isclass(origin) and module.startswith("shardwise.") and not module.startswith(OF_THE_ENGINE):
        yield origin
    for part in hint if isinstance(hint, list) else get_args(hint):
        yield from classes_in(part)


def classes_given(hints: dict[str, object]) -> set[type]:
    """The classes of results and attributes; what a function takes was made by another one."""
    given = [hint for place, hint in hints.items() if place.endswith("()") or not place.endswith(")")]
    return {kind for hint in given for kind in classes_in(hint)}


def hints_of_function(function: FunctionType, name: str) -> Hints:
    """What it takes and gives. An argument without a type counts as `Any`."""
    hints = get_type_hints(function)
    for argument in inspect.signature(function).parameters.keys() - {"self", "cls"}:
        yield f"{name}({argument})", hints.get(argument, Any)
    yield f"{name}()", hints.get("return", Any)


def hints_of_class(kind: type, *, users_make_it: bool) -> Hints:
    """What its own attributes are, and what its own methods take and give."""
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("shardwise.")
    hints = get_type_hints(kind)
    yield from ((f"{name}, its base", each) for each in getattr(kind, "__orig_bases__", ()))
    yield from ((f"{name}.{each}", hints[each]) for each in inspect.get_annotations(kind) if each[0] != "_")
    for attribute, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        operators = ("__call__", "__enter__", "__getitem__", "__iter__", "__rshift__")
        is_public = attribute[0] != "_" or attribute in operators or (attribute == "__init__" and users_make_it)
        if is_public and isinstance(function, FunctionType):
            yield from hints_of_function(function, f"{name}.{attribute}")


def public_hints() -> dict[str, object]:
    """Of every public name, and of each class that a public name gives or has as an attribute."""
    hints: dict[str, object] = {}
    listed: set[type] = set()
    for name, each in NAMES.items():
        if isinstance(each, FunctionType):
            hints |= hints_of_function(each, f"{each.__module__}.{each.__name__}".removeprefix("shardwise."))
        elif inspect.isclass(each):
            listed.add(each)
        else:
            hints[name] = each
    # Dataclasses are made from their attributes, protocols are not made, and `parallelize` makes engines.
    made = {each for each in listed if not dataclasses.is_dataclass(each) and not getattr(each, "_is_protocol", False)}
    waiting = listed | classes_given(hints)
    known: set[type] = set()
    while waiting:
        kind = waiting.pop()
        known.add(kind)
        found = dict(hints_of_class(kind, users_make_it=kind in made - {sw.Engine}))
        hints |= found
        waiting |= (classes_given(found) | {base for each in kind.__bases__ for base in classes_in(each)}) - known
    return hints


def test_any_stands_in_public_signatures_for_a_reason_only() -> None:
    found = {place for place, hint in public_hints().items() if anys_in(hint)}
    assert found == {place for places in REASONS.values() for place in places}
