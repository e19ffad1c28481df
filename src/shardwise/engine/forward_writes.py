"""Parameters that forwards write to: an embedding with `max_norm`, weights that are clamped, a momentum encoder."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import digest_of_values
from shardwise.errors import ModelError
from shardwise.plan import Parameter
from shardwise.space import Mesh


class ForwardWrites:
    """Finds what forwards and backwards write, and refuses what would be lost or leave the ranks with other values.

    Copies that all data ranks wrote alike stay alike, and are kept.
    """

    def __init__(self, model: nn.Module, specs: Sequence[Parameter], mesh: Mesh, world: Channel) -> None:
        """`specs`: of the whole model, alike on all ranks."""
        self._specs = specs
        self._world = world
        self._tensor_ranks = [mesh.coordinates(rank)["tp"] for rank in range(world.size)]
        self._has_copies = mesh.size > mesh.pp
        here = dict(model.named_parameters())
        self._here = {at: here[spec.name] for at, spec in enumerate(specs) if spec.name in here}
        self._versions: dict[int, int] = {}

    def begin(self) -> None:
        """Forwards follow."""
        self._versions = self._now()

    def found(self) -> list[bool]:
        """For each parameter whether this rank wrote to it since `begin`."""
        now = self._now()
        return [at in now and now[at] != self._versions.get(at) for at in range(len(self._specs))]

    def check(self, written: Collection[int]) -> None:
        """Raise ModelError, the same on all ranks, for what some rank wrote to in an update; all ranks call it."""
        if not written:
            return
        for at in written:
            spec = self._specs[at]
            if spec.trainable and spec.master != spec.working:
                raise ModelError(
                    _refusal(
                        spec.name,
                        "it is a cast of a master from which the update goes on, so that what was written is lost",
                    )
                )
        digests = {at: self._digest(at) for at in written if at in self._here and not self._here[at].is_meta}
        answers = self._world.exchange(json.dumps(digests).encode(), purpose="parameters that forwards wrote to")
        seen: dict[tuple[str, int], str] = {}
        for rank, answer in enumerate(answers):
            for at, digest in json.loads(answer).items():
                name = self._specs[int(at)].name
                if not digest:
                    raise ModelError(
                        _refusal(name, "it is gathered for that forward only (stage 3), so that the values are lost")
                    )
                if seen.setdefault((at, self._tensor_ranks[rank]), digest) != digest:
                    raise ModelError(_refusal(name, "it has other values on other ranks now"))

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Evaluations and predictions, where nothing is compared: raise ModelError for what this rank wrote to."""
        self.begin()
        yield
        written = [spec.name for spec, flag in zip(self._specs, self.found(), strict=True) if flag]
        if written and self._has_copies:
            raise ModelError(_refusal(written[0], "every rank has a copy, and they are to stay alike"))

    def _now(self) -> dict[int, int]:
        with torch._C.DisableTorchFunctionSubclass():  # at rest or not
            return {at: each._version for at, each in self._here.items()}

    def _digest(self, at: int) -> str:
        """Empty for what is at rest."""
        parameter = self._here[at]
        return "" if hasattr(type(parameter), "_is_resting") else str(digest_of_values(parameter.detach()))


def _refusal(name: str, reason: str) -> str:
    return (
        f"parameter {name!r} was written to in a forward: {reason}; keep what forwards write in buffers, and leave out "
        "options that write to parameters (max_norm)"
    )
