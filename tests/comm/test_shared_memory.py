"""The slot pool: hot slots first, growth only when asked for, and idle segments given back."""

from pathlib import Path

import torch

from shardwise.comm.process.shared_memory import BASE_SLOTS, RETAINED_SLOTS, SlotPool


def test_the_slot_given_back_last_is_taken_first() -> None:
    pool = SlotPool()
    slots = [pool.take(grow=0) for _ in range(4)]
    for slot in (slots[2], slots[0], slots[3]):
        assert slot is not None
        pool.give_back(slot)
    assert [pool.take(grow=0) for _ in range(3)] == [slots[3], slots[0], slots[2]]
    pool.close()


def test_a_pool_grows_only_when_asked_and_by_what_was_asked() -> None:
    pool = SlotPool()
    taken = [pool.take(grow=0) for _ in range(BASE_SLOTS)]
    assert None not in taken
    assert pool.take(grow=0) is None
    assert pool.take(grow=3) is not None
    assert pool.num_slots == BASE_SLOTS + 3
    assert [pool.take(grow=0) is None for _ in range(3)] == [False, False, True]
    pool.close()


def test_idle_segments_beyond_the_retained_are_given_back_and_slots_in_use_stay() -> None:
    pool = SlotPool()
    for _ in range(BASE_SLOTS):
        pool.take(grow=0)
    used = pool.take(grow=RETAINED_SLOTS)
    idle = [pool.take(grow=8) for _ in range(RETAINED_SLOTS)]
    assert used is not None
    for slot in idle:
        assert slot is not None
        pool.give_back(slot)
    released = pool.release_idle()
    assert released
    assert used.segment.number not in released
    assert pool.num_slots <= BASE_SLOTS + RETAINED_SLOTS + 8
    assert pool.find(used.segment.number, used.index) is used
    assert pool.release_idle() == ()
    pool.close()


def test_lent_memory_is_located_by_its_views_and_given_back_with_the_last_one() -> None:
    pool = SlotPool()
    first, second = pool.lend(1000), pool.lend(5000)
    assert not first.any()
    located = pool.locate(second[128:256])
    assert located is not None
    assert (located[0].num_bytes, located[1]) == (5000, 128)
    other = pool.locate(first)
    assert other is not None
    assert other[0] is not located[0]
    assert pool.locate(torch.zeros(100, dtype=torch.uint8)) is None
    view = second[4000:].view(torch.float32)
    number = located[0].number
    del second, located, other
    assert pool.release_idle() == ()
    del view
    assert pool.release_idle() == (number,)
    assert pool.locate(first) is not None
    del first
    pool.close()
    assert "memfd:shardwise" not in Path("/proc/self/maps").read_text()


def test_lent_memory_is_not_taken_for_what_was_at_its_address_before() -> None:
    pool = SlotPool()
    addresses, numbers = [], []
    for _ in range(100):
        now = pool.lend(1 << 20)
        found = pool.locate(now)
        assert found is not None
        addresses.append(now.data_ptr())
        numbers.append(found[0].number)
        del now, found
    assert len(set(addresses)) < len(addresses), "the kernel gives no address a second time"
    assert len(set(numbers)) == len(numbers)
    pool.close()
