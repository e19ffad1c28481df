"""Streams of the fake device run behind the host: what is not waited for comes too late, under some seed."""

from collections.abc import Callable
from threading import Thread
from weakref import finalize

import pytest
import torch
from torch import nn

from shardwise.testing.accelerator import LAST, NAME, behind, counted

FIRST = f"{NAME}:0"
SEEDS = range(40)

pytestmark = pytest.mark.usefixtures("fake")


def seen_under(seeds: range, program: Callable[[], list[float]]) -> set[tuple[float, ...]]:
    """What a program sees, under any of the seeds."""
    found = set()
    for seed in seeds:
        with behind(seed):
            found.add(tuple(program()))
    return found


def test_one_stream_gives_what_no_delay_gives() -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 2)).to(FIRST)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = net(torch.arange(32.0, device=FIRST).view(4, 8)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    assert seen_under(range(10), train) == {tuple(train())}


def test_a_host_that_does_not_wait_sees_what_was_there_before() -> None:
    def look(waits: bool) -> list[float]:
        result = torch.zeros(2).pin_memory()
        x = torch.ones(2, device=FIRST)
        result.copy_(x.mul_(3.0), non_blocking=True)
        if waits:
            torch.accelerator.current_stream(FIRST).record_event().synchronize()
        return result.tolist()

    assert seen_under(SEEDS, lambda: look(True)) == {(3.0, 3.0)}
    assert seen_under(SEEDS, lambda: look(False)) == {(0.0, 0.0), (3.0, 3.0)}


def test_a_stream_that_does_not_wait_for_another_reads_early() -> None:
    def read(waits: bool) -> list[float]:
        other = torch.Stream(FIRST)
        x = torch.zeros(2, device=FIRST)
        x.add_(1.0)
        done = torch.accelerator.current_stream(FIRST).record_event()
        with other:
            if waits:
                other.wait_event(done)
            y = x * 2.0
        with other:
            return y.tolist()

    assert seen_under(SEEDS, lambda: read(True)) == {(2.0, 2.0)}
    assert len(seen_under(SEEDS, lambda: read(False))) > 1


def test_memory_that_another_stream_still_reads_is_given_away_unless_it_is_recorded() -> None:
    def read(records: bool) -> list[float]:
        own, other = torch.accelerator.current_stream(FIRST), torch.Stream(FIRST)
        x = torch.full((64,), 5.0, device=FIRST)
        other.wait_event(own.record_event())
        with other:
            y = x + 1.0
        if records:
            x.record_stream(other)
        address = x.data_ptr()
        del x
        z = torch.full((64,), 7.0, device=FIRST)
        assert records or z.data_ptr() == address
        with other:
            return y[:1].tolist()

    assert seen_under(SEEDS, lambda: read(True)) == {(6.0,)}
    assert len(seen_under(SEEDS, lambda: read(False))) > 1


def test_copies_of_lists_keep_their_place_on_the_stream() -> None:
    def copy() -> list[float]:
        x, y = torch.zeros(4, device=FIRST), torch.ones(2, device=FIRST)
        torch._foreach_copy_([x[:2], x[2:]], [y * 2.0, y * 3.0])
        return x.tolist()

    assert seen_under(SEEDS, copy) == {(2.0, 2.0, 3.0, 3.0)}


def test_copies_between_devices_wait_for_both() -> None:
    def copy() -> list[float]:
        x = torch.ones(4, device=FIRST).add_(1.0)
        y = torch.zeros(4, device=f"{NAME}:1")
        y.add_(5.0)
        y.copy_(x)
        x.zero_()
        return y.tolist()

    assert seen_under(SEEDS, copy) == {(2.0,) * 4}


def test_values_of_the_host_are_those_at_the_call_unless_they_are_pinned_and_left_alone() -> None:
    def upload(pinned: bool) -> list[float]:
        source = torch.ones(2)
        source = source.pin_memory() if pinned else source
        x = source.to(FIRST, non_blocking=True) * torch.tensor(2.0)
        source.zero_()
        return x.tolist()

    assert seen_under(SEEDS, lambda: upload(False)) == {(2.0, 2.0)}
    assert seen_under(SEEDS, lambda: upload(True)) == {(0.0, 0.0), (2.0, 2.0)}


@pytest.mark.parametrize("to_host", [False, True])
def test_tensors_of_a_job_are_let_go_while_other_threads_can_call_the_device(to_host: bool) -> None:
    # Where one thread lets go of them under the lock of the queues, and another waits for that lock with Python's, both
    # wait for ever, in C, where no timeout of a test ends them.
    others = []

    def call_from_another_thread() -> None:
        other = Thread(target=lambda: torch.ones(2, device=FIRST).add_(1.0), daemon=True)
        other.start()
        other.join(timeout=5.0)
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


def test_random_numbers_are_drawn_in_the_order_of_the_host() -> None:
    def draw() -> list[float]:
        torch.manual_seed(3)
        x, y = torch.rand(2, device=FIRST), nn.functional.dropout(torch.ones(4, device=FIRST), 0.5)
        return [*torch.randn(2, device=FIRST).tolist(), *x.tolist(), *y.tolist()]

    assert seen_under(range(5), draw) == {tuple(draw())}


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
