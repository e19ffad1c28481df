"""From a configuration to the things that train: the model, the loss, the optimizer."""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm.device.kinds import named_device
from shardwise.engine.forward.batches import LossWeight
from shardwise.engine.model.meta_init import Initialisation, forget_initialised
from shardwise.engine.optimizers.known import OptimizerFunction
from shardwise.errors import ConfigError, ModelError, PlanError
from shardwise.plan.names import any_matches, unmatched
from shardwise.train.config import GroupTable, RunConfig
from shardwise.train.references import made, resolve


def build_model(config: RunConfig) -> nn.Module:
    """The model that [model] asks for, the same on every rank.

    A model class of transformers gets its configuration class made from `model.config`, any other callable gets
    `model.config` as keyword arguments; or `from_pretrained` gets the folder of `model.pretrained` and them. What
    [[train.groups]] freezes has no gradient. Raises `ConfigError` for keys that the configuration class does not know,
    `ModelError` when the factory raises or gives something else than a module. If modules initialise themselves, the
    model has no values yet (it is on the meta device), and one that leaves a gap raises `ModelError`.
    """
    reference = config.model.factory
    make = _maker(config)
    by_module = config.model.initialise == "by module"
    # Each rank builds the model for itself, so each has to draw the same initial parameters.
    torch.manual_seed(config.train.seed)
    try:
        with torch.device("meta") if by_module else contextlib.nullcontext():
            model = make()
    except (Exception, SystemExit) as error:  # a factory that calls exit() would end the rank without a word
        hint = " when it was called without values (on the meta device)" if by_module else ""
        raise ModelError(f"model.factory: {reference} raised {type(error).__name__}{hint}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory: {reference} gave a {type(model).__name__}, not a torch.nn.Module")
    if by_module:
        _leave_to_modules(model, config.train.seed)
    groups = NamedGroups(config.train.groups, model)
    for parameter in model.parameters():
        if groups.is_frozen(parameter):
            parameter.requires_grad_(False)
    return model


def _maker(config: RunConfig) -> Callable[[], Any]:
    """What calls `model.factory`. Raises `ConfigError` for keys that its configuration class does not know."""
    table = config.model
    factory: Any = resolve(table.factory, folder=config.folder, key="model.factory")
    given, config_class = table.config, getattr(factory, "config_class", None)
    if config_class is not None:
        _check_keys(config_class, given, _OF_LOADING if table.pretrained is not None else ())
    if table.pretrained is None:
        return lambda: factory(**given) if config_class is None else factory(config_class(**given))
    if not callable(getattr(factory, "from_pretrained", None)):
        raise ConfigError(f"model.pretrained: {table.factory} has no from_pretrained; give a class of transformers")
    if table.initialise != "whole":
        raise ConfigError('model.initialise: "by module" draws the values that model.pretrained has; leave one out')
    if "trust_remote_code" in given:
        raise ConfigError("model.config.trust_remote_code: no code of a folder is run; leave it out")
    folder = str(config.folder / table.pretrained)
    # Nothing is downloaded, no pickle is read, and no code of the folder is run.
    safe = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}

    def loaded() -> Any:
        model = factory.from_pretrained(folder, **given, **safe)
        return model.train()  # it comes in evaluation mode

    return loaded


def _leave_to_modules(model: nn.Module, seed: int) -> None:
    """Refuse parameters that no module initialises; the values come where `parallelize` makes room for them."""
    try:
        forget_initialised(model)
        Initialisation(model, seed)
    except ModelError as error:
        raise ModelError(
            f'model.initialise = "by module": {error}\n"whole" takes the values of model.factory'
        ) from error


def device_of(config: RunConfig) -> torch.device | None:
    """The device that `train.device` names; None for that of the host. Raises `ConfigError` for one that is absent."""
    try:
        return named_device(config.train.device)
    except PlanError as error:
        raise ConfigError(f"train.device: {error}") from error


def build_loss_weight(config: RunConfig) -> LossWeight | None:
    """By what a microbatch counts, if [model] says so."""
    reference = config.model.loss_weight
    return None if reference is None else resolve(reference, folder=config.folder, key="model.loss_weight")


def build_metrics(config: RunConfig) -> dict[str, Any]:
    """What evaluations compute besides losses, by name, as `engine.evaluate` takes it. Raises ConfigError."""
    train, folder = config.train, config.folder
    metrics: dict[str, Any] = {}
    for name, reference in train.metrics.items():
        key, chosen = f"train.metrics.{name}", train.metric_inputs.get(name)
        metric: Any = made(reference, train.metric_options.get(name, {}), folder=folder, key=key)
        if all(callable(getattr(metric, each, None)) for each in ("update", "compute", "reset")):  # of torchmetrics
            inputs_key = f"train.metric_inputs.{name}"
            inputs = (
                partial(_logits_and_labels, inputs_key)
                if chosen is None
                else resolve(chosen, folder=folder, key=inputs_key)
            )
            metric = (metric, inputs)
        elif chosen is not None:
            raise ConfigError(f"train.metric_inputs.{name}: {reference} is no metric of torchmetrics; leave it out")
        metrics[name] = metric
    return metrics


def _logits_and_labels(key: str, output: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """What most metrics of torchmetrics take."""
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if logits is None or "labels" not in batch:
        raise ConfigError(f"{key}: missing; the output is no tensor with .logits, or the batch has no labels")
    return logits, batch["labels"]


def optimizer_factory(config: RunConfig, model: nn.Module) -> OptimizerFunction:
    """A function from the parameters of `model` to the optimizer that [train] asks for, or to several."""
    train = config.train
    factory = resolve(train.optimizer, folder=config.folder, key="train.optimizer")
    named = NamedGroups(train.groups, model)

    def build(parameters: Iterable[nn.Parameter]) -> Any:
        # First those that no group names, whose learning rate is the one that a run reports.
        sorted_out: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for each in parameters:
            if not named.is_frozen(each):
                sorted_out.setdefault((named.number(each), each.ndim < 2), []).append(each)
        groups: dict[tuple[object, ...], dict[str, Any]] = {}
        for (number, is_vector), those in sorted(sorted_out.items(), key=lambda each: each[0]):
            table = train.groups[number] if number >= 0 else None
            # The usual split: weight decay is for matrices; biases and scales of norms, of one dim, are left alone.
            settings: dict[str, float] = {"weight_decay": 0.0 if is_vector else train.weight_decay}
            if table is not None and table.weight_decay is not None:
                settings["weight_decay"] = table.weight_decay
            if table is not None and table.learning_rate is not None:
                settings["lr"] = table.learning_rate
            key = (number, *settings.values()) if number >= 0 else (number, is_vector)
            groups.setdefault(key, {"params": [], **settings})["params"] += those
        optimizers = factory(list(groups.values()), lr=train.learning_rate, **train.optimizer_options)
        _check_groups(optimizers, [group for (number, *_), group in groups.items() if number != -1], train.optimizer)
        return optimizers

    return build


def _check_groups(optimizers: Any, named: Sequence[Mapping[str, Any]], reference: str) -> None:
    """Refuse an optimizer that has lost the settings of [[train.groups]]: a callable may put parameters together."""
    listed = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    held = {
        each: group
        for optimizer in listed
        for group in getattr(optimizer, "param_groups", ())
        for each in group["params"]
    }
    for group in named:
        for key in (name for name in ("lr", "weight_decay") if name in group):
            if any(float(held.get(each, {}).get(key, group[key])) != group[key] for each in group["params"]):
                raise ConfigError(
                    f"train.groups: {reference} makes optimizers with another {key} than {group[key]}; let it keep the "
                    "groups that it gets, or leave train.groups out"
                )


class NamedGroups:
    """Which of [[train.groups]] each parameter of a model belongs to: the first that names it, or none.

    Raises ConfigError for names and globs that no parameter has.
    """

    def __init__(self, groups: Sequence[GroupTable], model: nn.Module) -> None:
        self._groups = groups
        self._number: dict[nn.Parameter, int] = {}
        if not groups:
            return
        # Under each of its names: a tied parameter may be meant by any of them.
        named = list(model.named_parameters(remove_duplicate=False))
        names = [name for name, _ in named]
        if problems := [
            problem
            for at, group in enumerate(groups)
            for problem in unmatched(group.parameters, names, role=f"train.groups.{at}.parameters")
        ]:
            raise ConfigError(*problems)
        for name, parameter in named:
            found = (at for at, group in enumerate(groups) if any_matches(group.parameters, [name]))
            if (first := next(found, None)) is not None:
                self._number[parameter] = min(first, self._number.get(parameter, first))

    def number(self, parameter: nn.Parameter) -> int:
        """Of the group; -1 where none names the parameter."""
        return self._number.get(parameter, -1)

    def is_frozen(self, parameter: nn.Parameter) -> bool:
        """Whether its group is not trained."""
        return self.number(parameter) >= 0 and self._groups[self.number(parameter)].frozen


_OF_LOADING = ("dtype", "torch_dtype", "attn_implementation", "experts_implementation", "ignore_mismatched_sizes")
"""Arguments of `from_pretrained` that are no settings of a configuration class."""


def _check_keys(config_class: Any, given: Mapping[str, object], also: Sequence[str] = ()) -> None:
    """Refuse keys that the configuration class would take silently and never read."""
    try:
        # Configuration classes of transformers take any keyword and keep it as an attribute. A misspelt "num_layer"
        # would train another model than was asked for.
        default = config_class()
    except Exception:  # it has required arguments: then it checks for itself
        return
    known = [*default.to_dict(), *getattr(default, "attribute_map", {}), *also]
    problems = []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean model.config.{near[0]}?" if near else ""
            problems.append(f"model.config.{key}: {config_class.__name__} has no such setting{hint}")
    if problems:
        raise ConfigError(*problems)
