"""From a configuration to the things that train: the model, the loss, the optimizer."""

import contextlib
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.comm.devices import named_device
from shardwise.engine.batches import LossFunction
from shardwise.engine.meta_init import Initialisation, forget_initialised
from shardwise.engine.optimizers import OptimizerFunction
from shardwise.errors import ConfigError, ModelError, PlanError
from shardwise.train.config import RunConfig
from shardwise.train.references import resolve


def build_model(config: RunConfig) -> nn.Module:
    """The model that [model] asks for, the same on every rank.

    A model class of transformers gets its configuration class made from `model.config`, any other callable gets
    `model.config` as keyword arguments. Raises `ConfigError` for keys that the configuration class does not know,
    `ModelError` when the factory raises or gives something else than a module. If modules initialise themselves, the
    model has no values yet (it is on the meta device), and one that leaves a gap raises `ModelError`.
    """
    reference = config.model.factory
    factory = resolve(reference, folder=config.folder, key="model.factory")
    config_class = getattr(factory, "config_class", None)
    if config_class is not None:
        _check_keys(config_class, config.model.config)
    by_module = config.model.initialise == "by module"
    # Each rank builds the model for itself, so each has to draw the same initial parameters.
    torch.manual_seed(config.train.seed)
    try:
        given = config.model.config
        with torch.device("meta") if by_module else contextlib.nullcontext():
            model = factory(**given) if config_class is None else factory(config_class(**given))
    except (Exception, SystemExit) as error:  # a factory that calls exit() would end the rank without a word
        hint = " when it was called without values (on the meta device)" if by_module else ""
        raise ModelError(f"model.factory: {reference} raised {type(error).__name__}{hint}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model.factory: {reference} gave a {type(model).__name__}, not a torch.nn.Module")
    if by_module:
        _leave_to_modules(model, config.train.seed)
    return model


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


def build_loss(config: RunConfig) -> LossFunction | None:
    """The loss function that [model] names, if it names one."""
    reference = config.model.loss
    return None if reference is None else resolve(reference, folder=config.folder, key="model.loss")


def optimizer_factory(config: RunConfig) -> OptimizerFunction:
    """A function from parameters to the optimizer that [train] asks for, or to several."""
    train = config.train
    factory = resolve(train.optimizer, folder=config.folder, key="train.optimizer")

    def build(parameters: Iterable[nn.Parameter]) -> Any:
        listed = list(parameters)
        groups = [
            # The usual split: weight decay is for matrices; biases and scales of norms, of one dim, are left alone.
            {"params": [p for p in listed if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
        ]
        return factory(
            [group for group in groups if group["params"]], lr=train.learning_rate, **train.optimizer_options
        )

    return build


def _check_keys(config_class: Any, given: Mapping[str, object]) -> None:
    """Refuse keys that the configuration class would take silently and never read."""
    try:
        # Configuration classes of transformers take any keyword and keep it as an attribute. A misspelt "num_layer"
        # would train another model than was asked for.
        default = config_class()
    except Exception:  # it has required arguments: then it checks for itself
        return
    known = [*default.to_dict(), *getattr(default, "attribute_map", {})]
    problems = []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean model.config.{near[0]}?" if near else ""
            problems.append(f"model.config.{key}: {config_class.__name__} has no such setting{hint}")
    if problems:
        raise ConfigError(*problems)
