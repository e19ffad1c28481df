"""Why a channel has ended, in words, and how ranks tell each other."""

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a rank has been waiting for a while."""

    operation: str
    purpose: str
    awaited: tuple[int, ...]
    """The world ranks it waits for."""

    def packed(self) -> bytes:
        """As the payload of a STATUS frame."""
        return json.dumps([self.operation, self.purpose, self.awaited]).encode()

    @classmethod
    def parsed(cls, payload: bytes) -> "Status":
        """From the payload of a STATUS frame."""
        operation, purpose, awaited = json.loads(payload)
        return cls(operation=operation, purpose=purpose, awaited=tuple(awaited))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelVerdict:
    """Why a channel has ended. The first one holds; ranks pass it on, so that all name the same culprit."""

    fact: str
    """A sentence about the culprit, without what this rank was doing."""

    culprit: int | None
    """World rank; None for a mismatch, which names its ranks in the fact."""

    def packed(self) -> bytes:
        """As the payload of a FAILED frame."""
        return json.dumps([self.fact, self.culprit]).encode()

    @classmethod
    def parsed(cls, payload: bytes) -> "ChannelVerdict":
        """From the payload of a FAILED frame."""
        fact, culprit = json.loads(payload)
        return cls(fact=fact, culprit=culprit)


def gone(rank: int) -> ChannelVerdict:
    """The verdict on a rank whose connection ended without a goodbye."""
    return ChannelVerdict(fact=f"rank {rank} is gone (its process died)", culprit=rank)


def garbled(rank: int, what: str) -> ChannelVerdict:
    """The verdict on a rank that sent what cannot be understood."""
    fact = f"rank {rank} sent {what}; its connection is broken, or it runs another version of shardwise"
    return ChannelVerdict(fact=fact, culprit=rank)


def different(texts: Mapping[int, str]) -> ChannelVerdict:
    """The verdict on calls that meet and do not fit, by world rank."""
    lines = [f"  - rank {rank}: {texts[rank]}" for rank in sorted(texts)]
    heading = "calls that meet differ; make the same calls in the same order on every rank:"
    return ChannelVerdict(fact="\n".join([heading, *lines]), culprit=None)
