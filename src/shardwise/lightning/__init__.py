"""Lightning's Trainer on an engine: `Trainer(strategy=shardwise.lightning.Strategy(plan))`.

The import also registers the strategy by name, for `Trainer(strategy="shardwise")`: stage 1 over all ranks.
"""

try:
    import greenlet  # noqa: F401
    import lightning  # noqa: F401
except ImportError as error:
    from shardwise.errors import ShardwiseError

    raise ShardwiseError(
        f'shardwise.lightning needs the package {error.name}; install it: pip install "shardwise[lightning]"'
    ) from error

from lightning.pytorch.strategies import StrategyRegistry

from shardwise.lightning.run_record import RunRecord
from shardwise.lightning.strategy import Strategy

__all__ = ["RunRecord", "Strategy"]

# The user's own registry, which is Lightning's: a name in it is what `Trainer(strategy="shardwise")` asks for.
if "shardwise" not in StrategyRegistry:
    StrategyRegistry.register("shardwise", Strategy, description="An engine of shardwise: stage 1 over all ranks.")
