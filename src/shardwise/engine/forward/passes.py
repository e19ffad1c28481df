"""Passes: what data ranks do together around microbatches, also those that only some of them compute.

A rank leaves out microbatches of weight 0. At stages 2 and 3 it must still join the collectives of the others:

    number      0       1       2       3          computed by (`Joint`): 0 ALL, 1 SOME, 2 SOME, 3 ALL
    rank 0      F B     F B     skip    F B        NONE, where no rank computes it, is no round at all
    rank 1      F B     skip    F B     F B

The calls of one pass, in each of its states:

    (outside) --begin_pass--> (between microbatches) --end_pass--> (outside)      has_failed: from any state
                                 |             ^
        begin_microbatch(joint)  v             |  microbatch_done: what is left of it is reduced
                              (forward, backward)
    skip_microbatch: goes out and comes back; the rank follows the others, and ends with `microbatch_done` as they do
"""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch


class Joint(enum.Enum):
    """Which data ranks compute a microbatch."""

    NONE = enum.auto()
    SOME = enum.auto()
    ALL = enum.auto()


# A class that does nothing and not `None`: the loop over microbatches is the same at all stages.
class Passes:
    """What data ranks do together while microbatches are computed: at stages 0 and 1, which this class is, nothing."""

    moves_in_step = False
    """Whether they reduce or gather something in every microbatch."""

    gathers = False
    """Whether forwards gather something (stage 3)."""

    is_followed = False
    """Whether other data ranks skip this microbatch, and do of it what this one announces."""

    advice = ""
    """What to do where ranks make other calls than their peers."""

    def begin_pass(self, *, trains: bool, is_agreed: bool = True) -> None:
        """Forwards of some microbatches follow, and their backwards too where it `trains`. `is_agreed`: the ranks have
        exchanged something since parameters were last written."""

    def joint_of(self, num_microbatches: int) -> Sequence[Joint]:
        """Which data ranks compute each microbatch that any has, where this rank has so many. All of them call it."""
        return [Joint.ALL] * num_microbatches

    def begin_microbatch(self, *, is_joint: bool) -> None:
        """Its forward follows, or (with stages) its backward. Not `is_joint`: some data ranks skip it."""

    def microbatch_done(self, stage: int | None = None) -> None:
        """The backward of a microbatch has ended; on one of this rank's stages, or (None) on all."""

    def skip_microbatch(self) -> None:
        """Other data ranks compute a microbatch that this rank does not."""

    def end_pass(self, *, has_failed: bool = False) -> None:
        """No more forwards and backwards follow, perhaps because one raised."""

    def generating(self, *, once: bool) -> AbstractContextManager[None]:
        """Forwards follow in the body, on each data rank as many as it needs. `once`: what they gather is gathered
        first, and stays."""
        return nullcontext()

    def begin_backward_of(self, roots: Sequence[torch.Tensor]) -> None:
        """The backward of a microbatch follows. Any other is one that a forward or a loss runs itself."""

    def hold_calls(self) -> None:
        """The forwards that go on save tensors as they are from here on: what they have gathered stays."""

    def pack_saved(self, tensor: torch.Tensor) -> object:
        """What autograd keeps instead of a tensor that it saves: no tensor for one that is gathered.

        An operation saves what it gives as well. That leads to its node, which would hold itself: a graph that has no
        backward, as of an output that the loss does not use, would stay for ever. So the tensor is detached.
        """
        return tensor.detach()


class UnevenMicrobatches:
    """The microbatches of one pass, numbered over all that any data rank computes."""

    def __init__(
        self,
        passes: Passes,
        counted: Sequence[int],
        joint: Sequence[Joint],
        *,
        trains: bool = True,
        is_agreed: bool = True,
    ) -> None:
        """`counted`: the microbatches that this rank computes. `joint`: who computes each."""
        self.passes = passes
        """Of all microbatches."""
        self._counted = counted
        self._joint = joint
        self._trains = trains
        self._is_agreed = is_agreed
        self._next = 0

    def __enter__(self) -> Self:
        self.passes.begin_pass(trains=self._trains, is_agreed=self._is_agreed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the peers are stopped anyway (`aborting`); to follow them would only wait for them.
        if kind is None:
            self._skip_to(len(self._joint))
        self.passes.end_pass(has_failed=kind is not None)

    def go_one_by_one(self, num_chunks: int) -> bool:
        """Whether a pipeline leaves its schedule. Data ranks that skip a microbatch follow the others in it, and know
        no other order than one microbatch after the other. num_chunks: stages of each rank."""
        moves = self.passes.gathers or (self.passes.moves_in_step and num_chunks > 1)
        return moves and Joint.SOME in self._joint

    def begin(self, number: int) -> None:
        """The rank goes on to the `number`-th microbatch that it computes: to its forward, or (with stages) to a
        backward."""
        at = self._counted[number]
        # A pipeline comes here several times for one microbatch: for each forward and backward of its stages.
        if self._next <= at:
            self._skip_to(at)
            self._next = at + 1
            self.passes.begin_microbatch(is_joint=self._joint[at] is Joint.ALL)

    def done(self, stage: int | None = None) -> None:
        """Its backward has ended (in a pass that does not train, its forward); see `Passes.microbatch_done`."""
        self.passes.microbatch_done(stage)

    def end(self) -> None:
        """No data rank computes any more of them."""
        self._next = len(self._joint)

    def _skip_to(self, end: int) -> None:
        # In the order of the numbers and before the next one that this rank computes, so that ranks never wait for each
        # other in different microbatches.
        for at in range(self._next, end):
            if self._joint[at] is not Joint.NONE:
                self.passes.skip_microbatch()
        self._next = max(self._next, end)


class Backward(enum.Enum):
    """How far the backward of a call is."""

    TO_COME = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


def unpack(saved: Any) -> torch.Tensor:
    """What autograd gets back of what it saved."""
    # A tuple, told by its class: an operation saves several tensors, and each of them comes here.
    if type(saved) is tuple:
        # The very tensor that autograd saved: its storage has bytes again, with the same values.
        tensor, call = saved
        if call.backward is not Backward.RUNNING:
            call.resume()
        return tensor  # type: ignore[no-any-return]
    return saved  # type: ignore[no-any-return]  # an activation, or a parameter of no unit
