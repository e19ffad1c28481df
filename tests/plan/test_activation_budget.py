"""The cheapest choice within a budget of saved bytes, against all choices."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.plan.activation_budget import Choice, Chosen, Measured, MeasuredCall, choose
from tests.properties import tried

SIZES = st.integers(0, 40)


@st.composite
def measurements(draw: st.DrawFn) -> Measured:
    """Few modules, some of them called twice, with any sizes."""
    calls = []
    for _ in range(draw(st.integers(1, 5))):
        saved = draw(SIZES)
        calls.append(
            MeasuredCall(
                module=draw(st.sampled_from("abcd")),
                before_bytes=draw(SIZES),
                saved_bytes=saved,
                inputs_bytes=draw(SIZES),
                again_bytes=draw(SIZES),
                fixed_bytes=draw(st.integers(0, saved)),
                seconds=draw(st.integers(0, 8)) / 4,
                choices=("keep", "recompute", "offload"),
            )
        )
    only = {each.module: draw(st.sampled_from([("keep", "recompute"), each.choices, ("keep",)])) for each in calls}
    return Measured(
        calls=tuple(replace(each, choices=only[each.module]) for each in calls),
        after_bytes=draw(SIZES),
        in_flight=draw(st.integers(1, 3)),
        bytes_per_second=draw(st.sampled_from([None, 20.0])),
    )


def simulated_peak(measured: Measured, choices: dict[str, Choice]) -> int:
    """The bytes at every moment of the forward and the backward of the last microbatch in flight, added up."""
    held: list[int] = []
    moments = [0]
    on_device = [0] * len(measured.calls)
    for at, call in enumerate(measured.calls):
        choice = choices[call.module]
        moved = call.saved_bytes - call.fixed_bytes
        held.append(
            call.before_bytes + {"keep": call.saved_bytes, "recompute": call.inputs_bytes}.get(choice, call.fixed_bytes)
        )
        if choice == "offload":
            on_device[at] = moved
        moments.append(sum(held) + sum(on_device))
        if choice == "offload":
            on_device = [each if other == at else 0 for other, each in enumerate(on_device)]
    moments.append(sum(held) + measured.after_bytes + sum(on_device))
    hosted = [at for at, call in enumerate(measured.calls) if choices[call.module] == "offload"]
    for at in reversed(range(len(measured.calls))):
        call = measured.calls[at]
        choice = choices[call.module]
        before = [each for each in hosted if each < at]
        now = sum(held[: at + 1])
        if choice == "offload":
            now += call.saved_bytes - call.fixed_bytes
        if choice == "recompute":
            now += call.again_bytes
        # Brought back ahead by the module on the host after it, or never gone.
        if before:
            now += measured.calls[before[-1]].saved_bytes - measured.calls[before[-1]].fixed_bytes
        moments.append(now)
    return (measured.in_flight - 1) * (sum(held) + measured.after_bytes) + max(moments)


def forced(measured: Measured, choices: dict[str, Choice]) -> Chosen:
    """What becomes of choices that leave nothing open."""
    calls = tuple(replace(call, choices=(choices[call.module],)) for call in measured.calls)
    return choose(replace(measured, calls=calls), 1 << 40)


def all_choices(measured: Measured) -> list[dict[str, Choice]]:
    options = {call.module: call.choices for call in measured.calls}
    return [dict(zip(options, picked, strict=True)) for picked in product(*options.values())]


@pytest.mark.quick
@tried(150)
@given(measured=measurements())
def test_the_peak_is_that_of_a_simulation(measured: Measured) -> None:
    for choices in all_choices(measured):
        assert forced(measured, choices).peak_bytes == simulated_peak(measured, choices)


@tried(150)
@given(measured=measurements(), budget=st.integers(1, 400))
def test_the_cheapest_choice_is_that_of_all_choices(measured: Measured, budget: int) -> None:
    fitting = [each for each in all_choices(measured) if simulated_peak(measured, each) <= budget]
    if not fitting:
        least = min(simulated_peak(measured, each) for each in all_choices(measured))
        with pytest.raises(PlanError, match=rf"{budget} asked; on stage 3 .* take {least} bytes at least"):
            choose(measured, budget, stage=3)
        if least:
            assert choose(measured, least).peak_bytes == least
        return
    chosen = choose(measured, budget)
    assert simulated_peak(measured, dict(chosen.choices)) == chosen.peak_bytes <= budget
    cost = min(forced(measured, each).seconds for each in fitting)
    assert chosen.seconds == pytest.approx(cost)
    assert forced(measured, dict(chosen.choices)).seconds == pytest.approx(cost)


def test_a_hundred_unlike_modules_are_chosen_within_a_percent_of_the_budget() -> None:
    calls = tuple(
        MeasuredCall(
            module=str(at),
            before_bytes=0,
            saved_bytes=1_000_000 + 7919 * at,
            inputs_bytes=100_000 + 13 * at,
            again_bytes=1_000_000 + 7919 * at,
            seconds=1 + (at * 37 % 100) / 1000,
            choices=("keep", "recompute", "offload"),
        )
        for at in range(100)
    )
    measured = Measured(calls=calls, after_bytes=500_000, in_flight=8, bytes_per_second=1e6)
    budget = 60_000_000 * 8
    chosen = choose(measured, budget)
    assert 0.97 * budget <= simulated_peak(measured, dict(chosen.choices)) <= budget
