"""Digests of calls: their shares sum up to nothing where ranks call alike, and the first call that differs is known."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.call_log import KEPT_CALLS, CallLog, Calls, LoggedCall, first_difference, packed_calls, parsed_calls
from shardwise.comm.channel import Signature
from shardwise.comm.process.messages import Stamp
from tests.properties import tried

STAMPS = {name: Stamp.of(Signature(operation="all_gather", purpose=name)) for name in "abcde"}


def logs_of(calls: Sequence[str], members: tuple[int, ...]) -> list[CallLog]:
    """One log per rank; calls[r] has a letter for each call of the r-th."""
    logs = [CallLog(7, members, rank) for rank in members]
    for log, letters in zip(logs, calls, strict=True):
        for letter in letters:
            log.add(STAMPS[letter])
    return logs


def found_by_all(logs: Sequence[CallLog], even: int = -1) -> list[dict[int, str] | None]:
    """What each rank finds, which exchanges with the others."""
    barrier = threading.Barrier(len(logs))
    given: dict[int, Mapping[int, Sequence[LoggedCall]]] = {}

    def find(log: CallLog, rank: int) -> dict[int, str] | None:
        def exchange(calls: Calls) -> dict[int, Calls]:
            given[rank] = parsed_calls(packed_calls(calls))
            barrier.wait(20)
            said: dict[int, Calls] = dict(given)
            barrier.wait(20)
            return said

        return first_difference([log], exchange, even=even)

    with ThreadPoolExecutor(len(logs)) as ranks:
        return list(ranks.map(find, logs, logs[0].members))


letters = st.text("abcde", max_size=6)


@tried(25)
@given(st.lists(letters, min_size=2, max_size=5))
def test_shares_sum_up_to_nothing_where_all_have_called_alike_and_only_there(calls: list[str]) -> None:
    logs = logs_of(calls, tuple(range(3, 3 + len(calls))))
    assert (sum(log.share for log in logs) % (1 << 64) == 0) == (len(set(calls)) == 1)


@tried(15)
@given(st.lists(letters, min_size=2, max_size=4))
def test_the_first_calls_that_differ_are_those_of_a_plain_comparison(calls: list[str]) -> None:
    # A rank without calls has nothing to compare; the others can be compared as far as all of them have come.
    have = [rank for rank, made in enumerate(calls) if made]
    expected = None
    for at in reversed(range(min((len(calls[rank]) for rank in have), default=0))):
        if others := [rank for rank in have if calls[rank][at] != calls[have[0]][at]]:
            expected = {rank: STAMPS[calls[rank][at]].text for rank in (have[0], others[0])}
    assert found_by_all(logs_of(calls, tuple(range(len(calls))))) == [expected] * len(calls)


@tried(25)
@given(letters, letters, st.data())
def test_a_rank_that_is_told_calls_finds_the_first_that_differs_before_or_after_it_makes_its_own(
    mine: str, theirs: str, data: st.DataObject
) -> None:
    other, own = logs_of([theirs, ""], (0, 1))
    made_before = data.draw(st.integers(0, len(mine)))
    found = []
    for at, letter in enumerate(mine + "."):
        if at == made_before:
            found.append(own.hear(0, parsed_calls(packed_calls({7: other.last()}))[7]))
        if letter != ".":
            found.append(own.add(STAMPS[letter]))
    expected = next((at for at in range(min(len(mine), len(theirs))) if mine[at] != theirs[at]), None)
    first = next((texts for texts in found if texts is not None), None)
    if expected is None:
        assert first is None
    else:
        assert first == {1: STAMPS[mine[expected]].text, 0: STAMPS[theirs[expected]].text}


@pytest.mark.parametrize("skipped", [1, 70, 1_000])
def test_a_rank_that_leaves_out_many_calls_is_found_with_the_first_of_them(skipped: int) -> None:
    steps = "ab" * 600
    logs = logs_of([steps, steps[:7] + "c" * 3 + steps[7 + skipped :], steps], (0, 1, 2))
    assert found_by_all(logs) == [{0: STAMPS["b"].text, 1: STAMPS["c"].text}] * 3


def test_ranks_that_have_to_be_equally_far_differ_even_where_all_calls_in_common_are_forgotten() -> None:
    logs = logs_of(["a" * 2 * KEPT_CALLS, "a" * (KEPT_CALLS - 1)], (0, 1))
    assert found_by_all(logs) == [None] * 2
    text = f"{STAMPS['a'].text}, after an earlier call that differs"
    assert found_by_all(logs, even=7) == [{0: text, 1: text}] * 2


def test_a_rank_that_is_told_only_later_calls_does_not_call_them_the_first() -> None:
    other, own = logs_of(["abcde" * 3, "bbcde" * 3], (0, 1))
    texts = own.hear(0, other.last())
    assert texts is not None
    assert all(
        text.endswith(("if no earlier call differs", "after an earlier call that differs")) for text in texts.values()
    )
