"""Several forwards of one rank that take turns: each in a thread of its own, one of them running at a time.

    scheduler   advance ........................ advance ....
    forward             runs ... park                    runs ... end

A forward parks before it works on a stage whose action has not begun. Threads, because grad mode and autocast belong to
a thread in torch, and a forward in the middle of a user's code cannot be left any other way. What torch keeps for the
caller's thread (modes, autocast, hooks of what is saved) holds in the threads of forwards too.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator

import torch
from torch.utils import _python_dispatch


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
        self._around = _ThreadState(device)
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
                with self._around.taken_over():
                    self._body()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended = True
            self._stop.release()


class _ThreadState:
    """What torch keeps for a thread, and forwards depend on."""

    def __init__(self, device: torch.device) -> None:
        self._num_threads = torch.get_num_threads()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)]
        self._autocasts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds]
        self._saving = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._function_modes = torch.overrides._get_current_function_mode_stack()
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        """A thread of its own has the same."""
        torch.set_num_threads(self._num_threads)  # a new thread would take all cores
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad_enabled))
            for kind, dtype, caches in self._autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
            if self._saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saving))
            for mode in self._function_modes:  # pushed, not entered: to enter may begin to count anew
                torch.overrides._push_mode(mode)
                stack.callback(torch.overrides._pop_mode)
            for each in self._dispatch_modes:
                _python_dispatch._push_mode(each)
                stack.callback(_python_dispatch._pop_mode)
            yield
