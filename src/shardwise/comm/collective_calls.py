"""Calls of torch.distributed in a forward or a loss, noticed in the first step of an engine.

process group    mesh             `if dist.is_initialized(): dist.all_reduce(..)` in a forward
none             data ranks       is left out, and each rank has numbers of its own rows: a warning
the user's       data ranks only  runs, as under DistributedDataParallel
the user's       with tp or pp    would have ranks with the same rows in it, or wait for stages for ever: refused
one made of it   any              runs: it may have the right ranks
"""

import inspect
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.channel import Channel
from shardwise.errors import CollectivesWarning, ModelError

Output = TypeVar("Output")


class CollectiveCalls:
    """Looks for them on one rank."""

    def __init__(self, world: Channel, data_ranks: Channel) -> None:
        self._is_data_alone = world.size == data_ranks.size
        self._warns = world.rank == 0 and data_ranks.size > 1
        self._names: dict[int, tuple[object, str]] = {}
        """What is looked for, by the id of its code: however a program came by the function.

        Not by the code itself: what torch's compiler makes may hold a dict, and has no hash then.
        """
        if world.size > 1 and dist.is_available():
            has_group = dist.is_initialized()
            for name, each in vars(dist).items():
                code = getattr(inspect.unwrap(each), "__code__", None) if callable(each) else None
                if code is not None and ("async_op" in code.co_varnames if has_group else name == "is_initialized"):
                    self._names[id(code)] = code, name

    def noticed(self, run: Callable[..., Output], *args: Any) -> Output:
        """`run(*args)`, looked at."""
        # A profiler of the program's own goes on. Ours is called for each function, so it is for the first step alone.
        if not self._names or sys.getprofile() is not None:
            return run(*args)
        sys.setprofile(self._notice)
        try:
            return run(*args)
        finally:
            sys.setprofile(None)

    def _notice(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (found := self._names.get(id(frame.f_code))) is None:
            return
        _, name = found
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__", "").startswith("torch.distributed"):
            caller = caller.f_back
        # Torch's own modules ask too, and know what to do; a greenlet may be outside of the forward.
        if caller is None or caller.f_globals.get("__name__", "").startswith("torch.") or not _is_inside(caller):
            return
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        # A group that the program made may have the right ranks.
        is_of_all = frame.f_locals.get("group") in (None, dist.group.WORLD)
        if name != "is_initialized" and not self._is_data_alone and is_of_all:
            raise ModelError(
                f"{where} calls torch.distributed.{name} inside of a step. Its process group is not the data ranks of "
                "the plan: peers along tp and pp are in it. Leave it out: modules and losses compute on this data "
                "rank's rows, and losses are averaged by loss_weight. Or give it a group of the data ranks"
            )
        if name == "is_initialized" and self._warns:
            self._warns = False
            warnings.warn(
                f"{where} asks in a step whether torch.distributed is initialised. It is not, because shardwise needs "
                "no process group: what the program would sum or gather over ranks there is left out. For a mean over "
                "all ranks give a loss_weight (what the loss is divided by). Or call init_process_group before "
                "parallelize, on a mesh of data ranks only: the calls then run as under DistributedDataParallel",
                CollectivesWarning,
                stacklevel=1,
            )


def unnoticed(run: Callable[..., Output], *args: Any, **kwargs: Any) -> Output:
    """`run(*args, **kwargs)`, code of a library that asks for a group and knows what to do without one."""
    return run(*args, **kwargs)


def _is_inside(frame: FrameType | None) -> bool:
    ends = CollectiveCalls.noticed.__code__, unnoticed.__code__
    while frame is not None and frame.f_code not in ends:
        frame = frame.f_back
    return frame is not None and frame.f_code is ends[0]
