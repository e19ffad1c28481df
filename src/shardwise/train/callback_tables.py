"""The callbacks that [[train.callbacks]] names."""

from shardwise.errors import ConfigError, ShardwiseError, in_words
from shardwise.runs.callbacks import Callback, named_callbacks
from shardwise.train.best_save import BestSave
from shardwise.train.config import RunConfig
from shardwise.train.references import resolve


def build_callbacks(config: RunConfig) -> list[Callback]:
    """One of each table, in their order, but best saves last. Raises ConfigError for what a factory raises."""
    built = []
    for at, table in enumerate(config.train.callbacks):
        key = f"train.callbacks.{at}"
        factory = resolve(table.factory, folder=config.folder, key=f"{key}.factory")
        try:
            built.append(factory(**table.options))
        except (Exception, SystemExit) as error:  # a factory that calls exit() would end the rank without a word
            said = str(error) if isinstance(error, ShardwiseError) else in_words(error)
            raise ConfigError(f"{key}: {table.factory} raised {said}") from error
    named_callbacks(built)
    # A save has the states of all others, as they are after the evaluation that was best.
    return sorted(built, key=lambda each: isinstance(each, BestSave))
