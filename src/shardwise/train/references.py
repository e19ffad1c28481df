"""Callables that a configuration names: "package.module:name" or "file.py:name".

Apart from what builds the model, which needs torch: a command that names something wrong ends before torch is loaded.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError, in_words
from shardwise.train.config import ModelTable, RunConfig, TurnTable
from shardwise.train.data_settings import PACKING, PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCallable:
    """A setting that names a callable, and what it is called with."""

    key: str
    reference: str
    options: Mapping[str, object] | None = None
    """Keyword arguments that the configuration has for it; None where it is called as it is."""
    options_key: str = ""
    """Of the options; left out: `key` and "_options"."""
    num_given: int = 0
    """Positional arguments that it gets as well."""
    of_objects: bool = False
    """Whether a class is made with the options alone, and its object is called."""
    given: frozenset[str] = frozenset()
    """Names of further arguments that it gets."""

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with the name, or else with the options."""
        try:
            found = resolve(self.reference, folder=folder, key=self.key)
        except ConfigError as error:
            return list(error.problems)
        if self.options is None:
            return []
        if getattr(found, "config_class", None) is not None:  # of transformers: the class checks its settings
            return []
        return option_problems(self, found, 0 if self.of_objects and makes_callables(found) else self.num_given)


def option_problems(named: NamedCallable, found: Callable[..., Any], num_given: int) -> list[str]:
    """Options that a callable does not take, with the nearest that it does, and those that it lacks."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # written in C: it says for itself what it takes
        return []
    by_place = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    left = [each for each in parameters if each not in by_place[:num_given]]
    known = [each.name for each in left if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    options, problems = named.options or {}, []
    key = named.options_key or f"{named.key}_options"
    if not any(each.kind is each.VAR_KEYWORD for each in left):
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {key}.{near[0]}?" if near else ""
                problems.append(f"{key}.{name}: {named.reference} takes no {name}{hint}")
    lacking = [each.name for each in left if each.name in known and each.default is each.empty]
    return problems + [
        f"{key}.{name}: missing; {named.reference} needs it" for name in lacking if name not in {*options, *named.given}
    ]


def check_references(config: RunConfig) -> None:
    """Import all that `config` names. Raises `ConfigError` with every name that cannot be imported.

    Options that a callable does not take, or lacks, are refused too.
    """
    problems = [problem for named in _named_callables(config) for problem in named.problems(config.folder)]
    schedule = config.train.schedule
    if schedule is not None and ":" not in schedule:
        try:
            known = named_schedules()
            if schedule not in known:
                near = difflib.get_close_matches(schedule, known, n=1)
                hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(known)}"
                problems.append(f'train.schedule: transformers has no schedule "{schedule}"; {hint}')
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)


def _named_callables(config: RunConfig) -> Iterator[NamedCallable]:
    model, data, train = config.model, config.data, config.train
    yield NamedCallable(
        key="model.factory",
        reference=model.factory,
        options=model.config if model.pretrained is None else None,
        options_key="model.config",
    )
    losses: list[tuple[str, ModelTable | TurnTable]] = [("model", model)]
    losses += [(f"train.turns.{at}", turn) for at, turn in enumerate(train.turns)]
    for table, trained in losses:
        if trained.loss is not None:
            yield NamedCallable(
                key=f"{table}.loss",
                reference=trained.loss,
                options=trained.loss_options,
                num_given=2,
                given=frozenset({"model"}),
                of_objects=True,
            )
    if model.loss_weight is not None:
        yield NamedCallable(key="model.loss_weight", reference=model.loss_weight)
    yield NamedCallable(
        key="train.optimizer",
        reference=train.optimizer,
        options=train.optimizer_options,
        num_given=1,
        given=frozenset({"lr"}),
    )
    if train.schedule is not None and ":" in train.schedule:
        yield NamedCallable(
            key="train.schedule",
            reference=train.schedule,
            options=train.schedule_options,
            num_given=_num_given_to_schedule(config, train.schedule),
        )
    for key, reference, options in (
        ("dataset", data.dataset, data.dataset_options),
        ("held_out_dataset", data.held_out_dataset, data.dataset_options | data.held_out_options),
    ):
        if reference is not None:
            yield NamedCallable(
                key=f"data.{key}", reference=reference, options=options, options_key="data.dataset_options"
            )
    if data.collate not in (None, PADDING, PACKING):
        yield NamedCallable(
            key="data.collate",
            reference=str(data.collate),
            options=data.collate_options,
            num_given=1,
            given=frozenset({"tokenizer"}),
            of_objects=True,
        )
    for at, each in enumerate(train.callbacks):
        key = f"train.callbacks.{at}"
        yield NamedCallable(
            key=f"{key}.factory", reference=each.factory, options=each.options, options_key=f"{key}.options"
        )
    for name, reference in train.metric_inputs.items():
        yield NamedCallable(key=f"train.metric_inputs.{name}", reference=reference)
    for name, reference in train.metrics.items():
        yield NamedCallable(
            key=f"train.metrics.{name}",
            reference=reference,
            options=train.metric_options.get(name, {}),
            options_key=f"train.metric_options.{name}",
            num_given=2,
            of_objects=True,
        )


def _num_given_to_schedule(config: RunConfig, reference: str) -> int:
    """An optimizer for a class of torch; for another callable the number of steps too."""
    try:
        return 1 if is_scheduler_class(resolve(reference, folder=config.folder, key="train.schedule")) else 2
    except ConfigError:
        return 2


def is_scheduler_class(factory: object) -> bool:
    """Whether this is a class of torch's schedulers, which are not given the number of steps."""
    from torch.optim.lr_scheduler import LRScheduler  # only a schedule needs torch here

    return isinstance(factory, type) and issubclass(factory, LRScheduler)


def named_schedules() -> list[str]:
    """The names of transformers' `get_scheduler`. Raises ConfigError where transformers is not there."""
    try:
        from transformers.trainer_utils import SchedulerType
    except ImportError as error:
        raise ConfigError(
            'train.schedule: names of schedules need transformers; pip install "shardwise[train]", or give '
            '"torch.optim.lr_scheduler:CLASS"'
        ) from error
    return [each.value for each in SchedulerType]


def made(reference: str, options: Mapping[str, object], *, folder: Path, key: str) -> Callable[..., Any]:
    """The callable that `reference` names, with the options; of a class of callables an object. Raises ConfigError."""
    found = resolve(reference, folder=folder, key=key)
    if not makes_callables(found):
        return partial(found, **options) if options else found
    try:
        return found(**options)  # type: ignore[no-any-return]  # a callable of unknown signature
    except Exception as error:  # a foreign class may raise anything
        raise ConfigError(f"{key}: {reference} raised {in_words(error)}") from error


def arguments_of(found: Callable[..., Any]) -> list[str]:
    """The names of the arguments of a callable or a class; none where it is written in C and does not say."""
    try:
        return list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return []


def makes_callables(found: object) -> bool:
    """Whether this is a class whose objects can be called."""
    return isinstance(found, type) and any("__call__" in vars(kind) for kind in found.__mro__)


def resolve(reference: str, *, folder: Path, key: str) -> Callable[..., Any]:
    """The callable that `reference`, the value of `key`, names; files are below `folder`. Raises `ConfigError`."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name:
        raise ConfigError(f'{key}: {reference!r} is not of the form "package.module:name" or "file.py:name"')
    try:
        module = _load_file(folder / source) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: no file {folder / source}") from error
    except Exception as error:  # a foreign module may raise anything while it is imported
        is_left_out = isinstance(error, ModuleNotFoundError) and error.name == "transformers"
        hint = '; pip install "shardwise[train]" brings it' if is_left_out else ""
        raise ConfigError(f"{key}: {source} cannot be imported: {in_words(error)}{hint}") from error
    try:
        found = getattr(module, name)
    except AttributeError as error:
        near = difflib.get_close_matches(name, dir(module), n=1, cutoff=0.75)
        hint = f"; did you mean {source}:{near[0]}?" if near else ""
        raise ConfigError(f"{key}: {source} has no {name}{hint}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {reference} is a {type(found).__name__}, not something that can be called")
    return found  # type: ignore[no-any-return]  # a callable of unknown signature


def _load_file(path: Path) -> ModuleType:
    """The module in a file, executed once however many of its names are asked for."""
    # Made of the whole path: two files of one name in different folders are two modules.
    name = f"shardwise_config_file_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Else the second attempt would find a module that was executed halfway.
        del sys.modules[name]
        raise
    return module
