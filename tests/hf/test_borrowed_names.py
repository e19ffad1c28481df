"""Names of other libraries that ours stand in for: for one thread, for a while, and never for good."""

import itertools
import types
from contextvars import copy_context
from typing import Any

import pytest

from shardwise.hf.borrowed_names import instead, original


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("AABBC"))))
def test_a_name_means_in_each_thread_what_that_one_asked_for(order: tuple[str, ...]) -> None:
    def own() -> str:
        return "its own"

    owner: Any = types.ModuleType("owner")
    owner.name = own
    contexts = {each: copy_context() for each in "ABC"}
    borrowings = {each: instead({(owner, "name"): lambda own, each=each: f"{each}, not {own()}"}) for each in "AB"}
    inside: set[str] = set()
    for each in order:
        if each in inside:
            contexts[each].run(borrowings[each].__exit__, None, None, None)
            inside.remove(each)
        elif each in borrowings:
            contexts[each].run(borrowings[each].__enter__)
            inside.add(each)
        for one, context in contexts.items():
            meant = f"{one}, not its own" if one in inside else "its own"
            assert context.run(lambda: owner.name()) == meant
        assert original((owner, "name")) is own
    assert owner.name is own
    assert original((owner, "another")) is None
