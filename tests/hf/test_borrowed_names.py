"""Names of other libraries that ours stand in for: for one thread, for a while, and never for good."""

import itertools
import sys
import threading
import types
import warnings
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.hf.borrowed_names import instead, original
from shardwise.hf.streamed_model import save_model
from tests.hf.tiny_trainers import build

LIBRARIES = {"torch", "transformers", "accelerate", "trl", "peft", "safetensors", "lightning", "numpy", "torchmetrics"}


def is_ours(value: Any) -> bool:
    kinds = (getattr(value, "__module__", None), type(value).__module__)
    return any(isinstance(each, str) and each.partition(".")[0] == "shardwise" for each in kinds)


def ours_in_other_libraries() -> list[str]:
    """Every name in a module of another library, or in one of its classes, that is of this one.

    An engine of an earlier test may have replaced functions for good (`see_transformations`).
    """
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            with warnings.catch_warnings(action="ignore"):  # some names say that they are old
                inside = vars(value) if isinstance(value, type) and value.__module__ == name else {}
                held = [f"{name}.{key}.{each}" for each, part in list(inside.items()) if is_ours(part)]
                found += [*([f"{name}.{key}"] if is_ours(value) else []), *held]
    return found


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


def test_nothing_of_ours_stays_in_other_libraries_after_saves_that_overlap(tmp_path: Path) -> None:
    before = ours_in_other_libraries()
    begun = {each: threading.Event() for each in "AB"}
    is_over = threading.Event()

    def saved(each: str) -> None:
        engine: Any = sw.parallelize(build(), sw.Plan(), optimizer=lambda own: torch.optim.SGD(own, lr=0.1))

        def save() -> None:
            begun[each].set()
            # The first that began is the first that is over: what it found in place is not what the second found.
            assert begun["B"].wait(60)
            assert each == "A" or is_over.wait(60)
            engine.model.save_pretrained(tmp_path / each)

        assert each == "A" or begun["A"].wait(60)
        save_model(engine, save)
        is_over.set()

    threads = [threading.Thread(target=saved, args=(each,)) for each in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours_in_other_libraries() == before
    one, other = ((tmp_path / each / "model.safetensors").read_bytes() for each in "AB")
    assert len(one) == len(other)
    assert repr(torch.empty(1, device="meta")).startswith("tensor(")
