"""The packages that trainers need, asked for in words."""

from importlib import import_module

from shardwise.errors import ConfigError

_HOOKS = ("_run_epoch", "_prepare_for_training", "_maybe_log_save_evaluate", "_finalize_training", "get_batch_samples")
"""Methods of transformers.Trainer that the engine's trainer extends, the youngest of them."""


def need_packages() -> None:
    """Raise ConfigError where transformers or accelerate are missing, or are of a version that does not fit."""
    try:
        import_module("accelerate")
        trainer = import_module("transformers").Trainer
    except ImportError as error:
        raise ConfigError(
            f'shardwise.hf needs the package {error.name}; pip install "shardwise[hf]" brings it'
        ) from error
    if missing := [name for name in _HOOKS if not hasattr(trainer, name)]:
        version = import_module("transformers").__version__
        raise ConfigError(
            f"shardwise.hf extends Trainer.{missing[0]}, which transformers {version} does not have; "
            "pip install 'transformers>=5.24'"
        )
