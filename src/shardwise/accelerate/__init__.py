"""accelerate's loop on an engine: `accelerator = shardwise.accelerate.Accelerator(plan=...)`."""

try:
    import accelerate  # noqa: F401
    import greenlet  # noqa: F401
except ImportError as error:
    from shardwise.errors import ShardwiseError

    raise ShardwiseError(
        f'shardwise.accelerate needs the package {error.name}; install it: pip install "shardwise[accelerate]"'
    ) from error

from shardwise.accelerate.plain_loop import Accelerator

__all__ = ["Accelerator"]
