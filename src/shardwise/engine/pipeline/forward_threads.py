"""Forwards that stop between the stages of their rank, so that other microbatches have their turn on it.

    scheduler   advance ........................ advance ....
    forward             runs ... park                    runs ... end

A forward parks before it works on a stage whose action has not begun. It runs in a thread: grad mode and autocast
belong to a thread in torch, and no other way leaves a forward in the middle of a user's code. What torch keeps for the
caller's thread (modes, autocast, hooks of saved tensors) holds in the threads of forwards too.
"""

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue

import torch

from shardwise.engine.forward.precision import casts_of
from shardwise.engine.torch_private import (
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    top_saved_hooks,
)


# No `Exception`: the user's forward may catch those, and would go on with a step that has failed.
class Abandoned(BaseException):
    """Unwinds a parked forward that will not be continued."""


class ForwardThreads:
    """The threads of one rank: one whose forward has ended takes the next forward."""

    # A fresh one has nothing yet of what allocators and kernels keep for each thread: that costs more than its start.
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[_Worker] = []
        weakref.finalize(self, _dismiss, self._idle).atexit = False

    def begin(self, body: Callable[[], None]) -> "ForwardThread":
        """A forward that waits for its first turn."""
        return ForwardThread(body, self._device, self._idle)

    def close(self) -> None:
        """End the threads."""
        for worker in _dismiss(self._idle):
            worker.thread.join()


class _Worker:
    """A thread that runs what it is given."""

    def __init__(self) -> None:
        self.bodies: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.bodies,), name="forward", daemon=True)
        self.thread.start()


def _work(bodies: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (body := bodies.get()) is not None:
        body()
        del body  # it holds a forward


def _dismiss(workers: list[_Worker]) -> list[_Worker]:
    dismissed = workers.copy()
    workers.clear()
    for each in dismissed:
        each.bodies.put(None)
    return dismissed


class ForwardThread:
    """One forward."""

    def __init__(self, body: Callable[[], None], device: torch.device, idle: list[_Worker]) -> None:
        """idle: threads that have nothing to do; that of this forward is among them when it has ended."""
        self._body = body
        self._error: BaseException | None = None
        # Two, so that exactly one thread runs at a time: nothing that a rank keeps needs a lock.
        self._go, self._stop = SimpleQueue[None](), SimpleQueue[None]()
        self._has_ended = False
        self._end = threading.Lock()
        self._end.acquire()
        self._is_abandoned = False
        self._around = _ThreadState(device)
        self._idle, self._worker = idle, idle.pop() if idle else _Worker()
        self._worker.bodies.put(partial(contextvars.copy_context().run, self._run))

    def advance(self) -> None:
        """Let the forward run until it parks or ends; raises its error again."""
        if self._has_ended:
            return
        self._go.put(None)
        self._stop.get()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this, and tensors whose graphs Python does not see

    def park(self) -> None:
        """Called in the forward: let the scheduler go on until it advances this one again."""
        # Nobody advances one that was abandoned, and is still in a `finally` of the user's.
        if self._is_abandoned:
            raise Abandoned
        self._stop.put(None)
        self._go.get()
        if self._is_abandoned:
            raise Abandoned

    def abandon(self) -> None:
        """End a forward that is parked, or has ended."""
        if not self._has_ended:
            self._is_abandoned = True
            self._go.put(None)
        with self._end:
            pass

    def _run(self) -> None:
        self._go.get()
        try:
            if not self._is_abandoned:
                with self._around.taken_over():
                    self._body()
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended = True
            self._idle.append(self._worker)
            self._end.release()
            self._stop.put(None)


class _ThreadState:
    """The state of a thread in torch that forwards depend on."""

    def __init__(self, device: torch.device) -> None:
        self._num_threads = torch.get_num_threads()
        # A new thread has the first device as its current one, and the default stream of each.
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._casts, self._caches = casts_of(device), torch.is_autocast_cache_enabled()
        self._saving = top_saved_hooks(True)
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """The new thread has the same."""
        torch.set_num_threads(self._num_threads)  # a new thread would take all cores
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                # A stream that is the current one of its device does not make that the current device.
                stack.enter_context(torch.accelerator.device_index(self._stream.device.index))
                stack.enter_context(self._stream)
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._caches))
            if self._saving is not None:
                # A step inside of `save_on_cpu()` means all of its forwards, those in threads too.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            for mode in self._function_modes:  # pushed, not entered: to enter may begin to count anew
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for each in self._dispatch_modes:
                push_dispatch_mode(each)
                stack.callback(pop_dispatch_mode)
            yield
