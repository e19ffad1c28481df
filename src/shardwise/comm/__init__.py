"""How ranks talk: one protocol, `Channel`, and its implementations.

`processes` joins real processes, which `launch` or `torchrun` started. `simulate` runs n ranks in this process. `alone`
is a world of one. `Recorded` wraps any channel and lists its calls.
"""

from shardwise.comm.channel import Channel, Work, alone
from shardwise.comm.given_channel import default_channel
from shardwise.comm.process.world import processes
from shardwise.comm.recorded import Recorded, RecordedCall
from shardwise.comm.simulated import simulate
from shardwise.launchers.local import launch

__all__ = ["Channel", "Recorded", "RecordedCall", "Work", "alone", "default_channel", "launch", "processes", "simulate"]
