"""What torch names per kind of device: random numbers that go on, and products that may be rounded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.comm.accelerators import (
    random_numbers_kept,
    random_sources,
    random_states,
    rounds_convolutions,
    set_random_states,
)

CPU, OTHER = torch.device("cpu"), torch.device("hpu", 1)


class Module:
    """A module of a device that keeps its generators to itself, as torch asks for at least."""

    def __init__(self) -> None:
        self.generators = [torch.Generator() for _ in range(2)]
        self.current = 0

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generators[self.current].manual_seed(seed)

    def device_index(self, index: int) -> Any:
        module = self

        class Inside:
            def __enter__(self) -> None:
                module.current, self.before = index, module.current

            def __exit__(self, *_: object) -> None:
                module.current = self.before

        return Inside()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(torch.accelerator, "device_index", made.device_index)
    return made


def test_generators_of_a_device_are_taken_where_its_module_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [torch.Generator() for _ in range(2)]
    begun: list[None] = []
    shown = SimpleNamespace(default_generators=own, init=lambda: begun.append(None))
    monkeypatch.setattr(torch, "get_device_module", lambda device: shown)
    assert random_sources(OTHER) == {"cpu": torch.default_generator, "hpu": own[1]}
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert random_sources(torch.device("hpu"))["hpu"] is own[0]
    assert len(begun) == 2


def test_a_device_without_generators_gives_states_and_takes_seeds(module: Module) -> None:
    source = random_sources(OTHER)["hpu"]
    source.manual_seed(5)
    assert module.generators[1].initial_seed() == 5
    assert module.current == 0  # the device of the program is as it was
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(3, generator=module.generators[1]), expected)
    assert not torch.equal(module.generators[0].get_state(), module.generators[1].get_state())


def test_what_is_drawn_inside_changes_no_later_number(module: Module) -> None:
    def drawn() -> tuple[float, float]:
        return float(torch.rand(())), float(torch.rand((), generator=module.generators[1]))

    torch.manual_seed(0)
    module.generators[1].manual_seed(1)
    states = random_states(OTHER)
    with random_numbers_kept(OTHER):
        first = drawn()
    assert drawn() == first
    set_random_states(OTHER, states)
    assert drawn() == first
    second = drawn()
    assert second != first
    set_random_states(OTHER, states)

    def fail() -> None:
        with random_numbers_kept(OTHER):
            drawn()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (drawn(), drawn()) == (first, second)


def test_convolutions_are_rounded_as_the_backend_of_the_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert not rounds_convolutions(CPU)
    assert rounds_convolutions(torch.device("hpu"))  # nothing is known
    for precision, allowed, rounds in (
        ("ieee", True, False),
        ("tf32", False, True),
        ("none", False, False),  # then the older setting holds
        ("none", True, True),
    ):
        settings = SimpleNamespace(conv=SimpleNamespace(fp32_precision=precision), allow_tf32=allowed)
        monkeypatch.setattr(torch.backends, "cudnn", settings)
        assert rounds_convolutions(cuda) is rounds
