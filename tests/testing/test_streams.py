"""Streams of the fake device run behind the host: what is not waited for comes too late, under some seed."""

from collections.abc import Callable
from threading import Thread
from weakref import finalize

import pytest
import torch

from shardwise.testing.accelerator import LAST, NAME, behind, counted

FIRST = f"{NAME}:0"

pytestmark = pytest.mark.usefixtures("fake")


def copy_between_devices() -> list[float]:
    x = torch.ones(4, device=FIRST).add_(1.0)
    y = torch.zeros(4, device=f"{NAME}:1")
    y.add_(5.0)
    y.copy_(x)
    x.zero_()
    return y.tolist()


def look_on_the_host(*, waits: bool) -> list[float]:
    result = torch.zeros(2).pin_memory()
    x = torch.ones(2, device=FIRST)
    result.copy_(x.mul_(3.0), non_blocking=True)
    if waits:
        torch.accelerator.current_stream(FIRST).record_event().synchronize()
    return result.tolist()


def read_on_another_stream(*, waits: bool) -> list[float]:
    other = torch.Stream(FIRST)
    x = torch.zeros(2, device=FIRST)
    x.add_(1.0)
    done = torch.accelerator.current_stream(FIRST).record_event()
    with other:
        if waits:
            other.wait_event(done)
        return (x * 2.0).tolist()


def free_what_another_stream_reads(*, waits: bool) -> list[float]:
    """Memory is given away at once, unless the other stream is recorded."""
    own, other = torch.accelerator.current_stream(FIRST), torch.Stream(FIRST)
    x = torch.full((64,), 5.0, device=FIRST)
    other.wait_event(own.record_event())
    with other:
        y = x + 1.0
    if waits:
        x.record_stream(other)
    address = x.data_ptr()
    del x
    z = torch.full((64,), 7.0, device=FIRST)
    assert waits or z.data_ptr() == address
    with other:
        return y[:1].tolist()


def upload(*, waits: bool) -> list[float]:
    """Values of the host are those at the call, unless they are pinned and written again."""
    source = torch.ones(2) if waits else torch.ones(2).pin_memory()
    x = source.to(FIRST, non_blocking=True) * torch.tensor(2.0)
    source.zero_()
    return x.tolist()


def seen(program: Callable[[], list[float]]) -> set[tuple[float, ...]]:
    """What a program sees under any seed."""
    found = set()
    for seed in (*range(20), LAST):
        with behind(seed):
            found.add(tuple(program()))
    return found


def test_a_copy_to_another_device_comes_in_order() -> None:
    assert seen(copy_between_devices) == {(2.0,) * 4}


@pytest.mark.parametrize(
    ("program", "right"),
    [
        (look_on_the_host, (3.0, 3.0)),
        (read_on_another_stream, (2.0, 2.0)),
        (free_what_another_stream_reads, (6.0,)),
        (upload, (2.0, 2.0)),
    ],
)
def test_what_is_not_waited_for_may_come_too_late(
    program: Callable[..., list[float]], right: tuple[float, ...]
) -> None:
    assert seen(lambda: program(waits=True)) == {right}
    assert len(seen(lambda: program(waits=False))) > 1


def test_a_kernel_knows_nothing_of_the_state_of_the_thread_in_which_it_runs() -> None:
    """While shapes of fake tensors are worked out, calls of a kernel went to the meta device, and did nothing."""
    stream, numbers = torch.accelerator.current_stream(FIRST), torch.arange(36.0, device=FIRST)
    with behind(LAST):
        mean = numbers.mean()
        with torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)  # as for a fake tensor
            while not stream.query():  # time goes on, and the kernel runs here
                pass
        assert float(mean) == 17.5


@pytest.mark.parametrize("to_host", [False, True])
def test_tensors_of_a_job_are_let_go_while_other_threads_can_call_the_device(to_host: bool) -> None:
    # Where one thread lets go of them under the lock of the queues, and another waits for that lock with Python's, both
    # wait for ever, in C, where no timeout of a test ends them.
    others = []

    def call_from_another_thread() -> None:
        other = Thread(target=lambda: torch.ones(2, device=FIRST).add_(1.0), daemon=True)
        other.start()
        other.join(timeout=60.0)
        others.append(other)

    for seed in range(20):
        with behind(seed):
            room, pinned = torch.zeros(2, device=FIRST), torch.ones(2).pin_memory()
            torch.accelerator.synchronize(FIRST)
            view = pinned[:]
            finalize(view, call_from_another_thread)
            into, out_of = (view, room) if to_host else (room, view)
            into.copy_(out_of, non_blocking=True)
            del view, into, out_of
            is_late = not others
            torch.accelerator.synchronize(FIRST)
        if is_late:
            break
        others.clear()
    assert is_late
    assert not any(other.is_alive() for other in others)


def test_delays_change_no_count() -> None:
    def count() -> tuple[int, int, int]:
        with counted() as counts:
            x = torch.ones(4, device=FIRST).add_(1.0)
            (x * x).sum().item()
        return counts[0].syncs, counts[0].uploads, counts[0].launches

    expected = count()
    with behind(1):
        assert count() == expected == (1, 0, 4)


def test_a_late_job_draws_its_own_numbers_whoever_seeds_the_cpu_meanwhile() -> None:
    """Jobs run in any thread that waits, while others draw: native_dropout is given no generator."""
    with torch.library._scoped_library("late", "FRAGMENT") as late:
        late.define("draw(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

        def draw(x: torch.Tensor) -> torch.Tensor:
            first = torch.rand(4)
            another = Thread(target=torch.default_generator.manual_seed, args=(7,))
            another.start()
            another.join()
            return torch.cat([first, torch.rand(4), torch.nn.functional.dropout(x, 0.5)])

        late.impl("draw", draw, "CPU")

        def drawn(seed: int) -> list[float]:
            torch.get_device_module(NAME).manual_seed(5)
            with behind(seed):
                made = [torch.ops.late.draw(torch.ones(4, device=FIRST)) for _ in range(2)]
                found: list[float] = torch.cat(made).tolist()
            assert torch.equal(torch.default_generator.get_state(), torch.Generator().manual_seed(7).get_state())
            return found

        generator = torch.Generator().manual_seed(5)
        wanted = []
        for _ in range(2):
            wanted += torch.rand(8, generator=generator).tolist()
            wanted += (torch.empty(4).bernoulli_(0.5, generator=generator) * 2).tolist()
        assert drawn(-1) == drawn(LAST) == wanted
