"""Brings the calls of ranks that share a process together, compares them and moves their data.

Nothing here waits or locks: whoever uses it lets one rank at a time in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.call_signatures import Signature, gather, scatter_sum
from shardwise.errors import CallMismatchError


def named(ranks: Sequence[int]) -> str:
    """The ranks in words: "rank 1", "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


@dataclass(kw_only=True, slots=True)
class RankCall:
    """What one rank gives to a transfer; tensors are flat."""

    signature: Signature
    output: torch.Tensor | None = None
    input: torch.Tensor | None = None
    value: bytes = b""


class MatchedCalls:
    """The calls of several ranks that belong together."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls: dict[int, RankCall] = {}
        self.is_ready = False
        """Every rank has called, so that no wait blocks any more."""
        self.values: list[bytes] = []
        """What an `exchange` gave."""
        self._difference = ""

    def missing(self) -> list[int]:
        """The ranks that have not called yet."""
        return [rank for rank in self.ranks if rank not in self.calls] if not self.is_ready else []

    def join(self, rank: int, call: RankCall) -> None:
        """Add the call of one rank; the last one brings the comparison."""
        self.calls[rank] = call
        self.is_ready = len(self.calls) == len(self.ranks)
        if self.is_ready:
            self._compare()

    def _compare(self) -> None:
        alike: dict[tuple[object, ...], list[int]] = {}
        texts: dict[tuple[object, ...], str] = {}
        for rank in self.ranks:
            signature = self.calls[rank].signature
            operation = "message" if signature.operation in ("send", "receive") else signature.operation
            key = (operation, signature.purpose, signature.dtypes, signature.counts)
            alike.setdefault(key, []).append(rank)
            texts.setdefault(key, str(signature))
        if len(alike) > 1:
            lines = [f"  - {named(ranks)}: {texts[key]}" for key, ranks in alike.items()]
            self._difference = "\n".join(
                [f"calls of {named(self.ranks)} that meet differ; make the same calls in the same order:", *lines]
            )
            self.calls.clear()

    def carry_out(self) -> None:
        """Move the data unless it was done, and let go of the tensors; raises `MismatchError` when the calls differ."""
        if self._difference:
            raise CallMismatchError(self._difference)
        if not self.calls:
            return
        calls = [self.calls[rank] for rank in self.ranks]
        outputs = [call.output for call in calls if call.output is not None]
        inputs = [call.input for call in calls if call.input is not None]
        signature = calls[0].signature
        if signature.operation == "exchange":
            self.values = [call.value for call in calls]
        elif signature.operation == "reduce_scatter":
            scatter_sum(outputs, inputs, signature.counts)
        else:
            gather(outputs, inputs, signature.counts)
        self.calls.clear()


class Group:
    """The ranks of one channel: pairs the calls that belong together, in the order in which each rank makes them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._num_calls: dict[tuple[tuple[int, ...], int], int] = {}
        self._open: dict[tuple[tuple[int, ...], int], MatchedCalls] = {}

    def join(self, lane: tuple[int, ...], rank: int, call: RankCall) -> MatchedCalls:
        """Add the call to its transfer; a lane is (source, destination), or empty for collectives."""
        position = self._num_calls.get((lane, rank), 0)
        self._num_calls[lane, rank] = position + 1
        transfer = self._open.setdefault((lane, position), MatchedCalls(lane or self.ranks))
        transfer.join(rank, call)
        if transfer.is_ready:
            del self._open[lane, position]
        return transfer
