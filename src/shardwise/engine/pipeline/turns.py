"""Several forwards of one rank that take turns: each in a thread of its own, one of them running at a time.

    scheduler   advance ........................ advance ....
    forward             runs ... park                    runs ... end

A forward parks before it works on a stage whose action has not begun. Threads, because grad mode and autocast belong to
a thread in torch, and a forward in the middle of a user's code cannot be left any other way.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable

import torch


class _Abandoned(BaseException):
    """Unwinds a parked forward that nobody will continue."""


class Turn:
    """One forward."""

    def __init__(self, body: Callable[[], None], device: torch.device) -> None:
        self._body = body
        self._error: BaseException | None = None
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._has_ended = False
        self._is_abandoned = False
        self._num_threads = torch.get_num_threads()
        self._is_grad_enabled = torch.is_grad_enabled()
        kind = device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="forward", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Let the forward run until it parks or ends; raises what it raised."""
        if self._has_ended:
            return
        self._go.release()
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def park(self) -> None:
        """Called in the forward: let the scheduler go on until it advances this one again."""
        self._stop.release()
        self._go.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End a forward that is parked, or has ended."""
        if not self._has_ended:
            self._is_abandoned = True
            self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_abandoned:
                torch.set_num_threads(self._num_threads)  # a new thread would take all cores
                with torch.set_grad_enabled(self._is_grad_enabled), self._casting():
                    self._body()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended = True
            self._stop.release()

    def _casting(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        kind, dtype = self._autocast
        return torch.autocast(kind, dtype=dtype)
