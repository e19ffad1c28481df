"""Layers to move, and a channel that notes what is under way."""

from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
from shardwise.comm import Work
from shardwise.space import Mesh, Piece
from tests.moving.layouts import whole_values
from tests.space.layouts import Cut, Layout, Shard


class Watched:
    """A channel that knows how many bytes of messages are under way, and calls `at_send` before each leaves."""

    def __init__(self, channel: sw.Channel, at_send: Callable[[], None] = lambda: None) -> None:
        self._channel = channel
        self._at_send = at_send
        self.under_way = self.most_under_way = self.largest = self.num_messages = self.sent_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        self._at_send()
        self.sent_bytes += tensor.nbytes
        return self._watch(tensor, self._channel.send(tensor, destination, purpose=purpose))

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        return self._watch(tensor, self._channel.receive(tensor, source, purpose=purpose))

    def _watch(self, tensor: torch.Tensor, work: Work) -> Work:
        self.under_way += tensor.nbytes
        self.num_messages += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.largest = max(self.largest, tensor.nbytes)
        return WatchedWork(self, work, tensor.nbytes)


class WatchedWork:
    def __init__(self, watched: Watched, work: Work, num_bytes: int) -> None:
        self._watched, self._work, self._num_bytes = watched, work, num_bytes

    @property
    def is_done(self) -> bool:
        return self._work.is_done

    def wait(self) -> None:
        self._work.wait()
        self._watched.under_way -= self._num_bytes


def of_layers(layout: Layout, rank: int, num_layers: int = 12) -> list[Piece]:
    return [layout.piece(rank, name=f"layers.{at}", dtype="float32", global_shape=(8, 16)) for at in range(num_layers)]


LAYERS = {f"layers.{at}": whole_values("float32", (8, 16)) + at for at in range(12)}


RUNS = Layout(Mesh(dp_shard=4), {"dp_shard": Cut((0, 10, 20, 70, 128))})


COLUMNS = Layout(Mesh(tp=4), {"tp": Shard(1)})


def piece_of(name: str = "w", shape: tuple[int, ...] = (4,), dtype: str = "float32", **place: Any) -> Piece:
    return Piece(name=name, dtype=dtype, global_shape=shape, **place)
