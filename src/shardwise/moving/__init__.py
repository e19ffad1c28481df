"""Moving: live state from one layout to another, across ranks and without a file.

[1] ranks tell each other which pieces they hold and want
[2] each plans alone (`routes.reshard`), and they compare the plans
[3] batches of messages go round, bounded in bytes; targets are allocated when their first bytes come

`exchange` gives whole values to every rank.
"""

from shardwise.moving.live_states import reshard
from shardwise.moving.nested_exchange import exchange
from shardwise.moving.piece_exchange import Gathering
from shardwise.moving.tensors import reshard_tensor

__all__ = ["Gathering", "exchange", "reshard", "reshard_tensor"]
