"""Random programs on values of stages train to the numbers of one process, and see of every value what it sees.

Thousands of them were run by hand; a run of the tests takes few, and those that failed once.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given
from hypothesis import strategies as st

import shardwise as sw
from tests.engine.pipeline.value_programs import CALLS, MODULES, Program, Seen, Step, programs
from tests.oracle.program import adamw
from tests.properties import tried

ROWS = 4
LARGEST = 1 << 20
"""Sums of smaller whole numbers are exact in float32."""

KINDS = [each.__name__ for each in MODULES]
REFUSED = r"rite to a copy|Write to the tensor itself|return the new values|its stage is not known|which is on stage"
"""What has to be refused: writes that only one rank, or only one of two copies, would show."""


def rows() -> torch.Tensor:
    return torch.arange(ROWS * 12.0).reshape(ROWS, 3, 4) % 5 - 2


def one_process(program: Program, k: int) -> tuple[float, dict[str, torch.Tensor], list[Seen]]:
    """The mean loss, the mean gradients and what was seen in each microbatch."""
    losses, seen = [], []
    for part in rows().chunk(k):
        try:
            loss, of_part = program(part)
            loss.backward()
        except RuntimeError:  # a view without gradients, or something saved for backward, was written to
            assume(False)
        losses.append(loss.item())
        seen.append(of_part)
    gradients = {
        name: torch.zeros(1) if each.grad is None else each.grad / k for name, each in program.named_parameters()
    }
    assume(all(abs(each) < LARGEST for each in (*losses, *map(float, gradients.values()))))
    return sum(losses) / k, gradients, seen


def on_stages(
    channel: sw.Channel, program: Program, k: int, chunks: int, order: list[int]
) -> tuple[float, dict[str, torch.Tensor], list[Seen]]:
    """The same on one rank; of gradients it has those of its stages, as AdamW's first moments."""
    seen: dict[int, Seen] = {}

    def loss_of(output: Any, batch: Any) -> torch.Tensor:
        loss, seen[int(batch["row"][0])] = output
        return loss  # type: ignore[no-any-return]

    plan = sw.Plan(
        mesh=sw.Mesh(pp=channel.size),
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(
            schedule="1f1b" if chunks == 1 else "interleaved",
            stages=dict(zip([*(f"blocks.{at}" for at in range(4)), "last"], order, strict=True)),
        ),
    )
    engine = sw.parallelize(program, plan, optimizer=adamw, loss=loss_of, channel=channel)
    loss = engine.step({"x": rows(), "row": torch.arange(ROWS)}).loss
    moments = {piece.name: each.clone() for piece, each in engine.state().items() if piece.name.endswith("exp_avg")}
    return loss, moments, [seen[at] for at in sorted(seen)]


def assert_as_one_process(steps: list[Step], kinds: list[int], k: int, chunks: int, order: list[int]) -> None:
    steps = Program(steps, kinds).valid(rows().chunk(k)[0])
    loss, gradients, seen = one_process(Program(steps, kinds), k)
    try:
        ranks = sw.simulate(2, lambda channel: on_stages(channel, Program(steps, kinds), k, chunks, order))
    except sw.ShardwiseError as error:
        pytest.fail(str(error)) if not any(each in str(error) for each in REFUSED.split("|")) else assume(False)
    moments: dict[str, torch.Tensor] = {}
    for of_rank, moments_of_rank, seen_by_rank in ranks:
        assert of_rank == loss
        assert seen_by_rank == seen
        moments |= moments_of_rank
    for name, gradient in gradients.items():
        moment = moments.get(f"optimizer/{name}/exp_avg", torch.zeros(1))
        assert torch.equal(moment, torch.zeros(1).lerp(gradient, 1 - 0.9))


def step(name: str, first: int = 0, second: int = 0, number: int = 1, *, has_no_grad: bool = False) -> Step:
    return Step(name, first, second, number, has_no_grad)


def kinds(*names: str) -> list[int]:
    return [KINDS.index(name) for name in names]


PLAIN = kinds("Affine", "Affine", "Affine", "Affine")
orders = st.permutations([0, 1, 2, 3]).flatmap(lambda order: st.integers(0, 3).map(lambda last: [*order, last]))
some_kinds = st.lists(st.integers(0, len(MODULES) - 1), min_size=4, max_size=4)
calls = st.builds(Step, st.sampled_from(CALLS), *[st.integers(0, 3)] * 3, st.booleans())
called_again = st.lists(calls, min_size=1, max_size=10)
"""Modules in any order, partly without gradient."""

FAILED_ONCE: list[tuple[list[Step], list[int], int, int, list[int]]] = [
    ([step("shift"), step("contiguous"), step("view"), step("module 1")], PLAIN, 2, 1, [0, 1, 0, 1, 0]),
    ([step("slice"), step("contiguous"), step("mul_"), step("add", 1, 2)], PLAIN, 1, 1, [0, 1, 0, 1, 1]),
    ([step("expand"), step("contiguous"), step("add_"), step("module 1")], PLAIN, 1, 1, [0, 1, 0, 1, 0]),
    (
        [step("module 1"), step("write a slice", 1), step("module 0", 0)],
        *(kinds("Affine", "Turning", "Affine", "Affine"), 2, 1, [1, 0, 0, 1, 0]),
    ),
    ([step("transpose"), step("module 0")], kinds("Copying", "Affine", "Affine", "Affine"), 2, 1, [1, 0, 0, 1, 0]),
    (
        [step("module 0", 1), step("add_", 2), step("add", 1, 0)],
        *(kinds("Returning", "Affine", "Affine", "Affine"), 1, 1, [1, 0, 0, 1, 0]),
    ),
    ([step("module 0"), step("module 1", 1)], kinds("Hiding", "Affine", "Affine", "Affine"), 1, 1, [0, 1, 0, 1, 0]),
    *(
        ([step(name), step("module 0")], kinds("Looking", "Affine", "Affine", "Affine"), 1, 1, [1, 0, 0, 1, 0])
        for name in ("requires_grad", "unfold")
    ),
    ([step("shift"), step("contiguous"), step("view"), step("module 3")], PLAIN, 4, 2, [0, 1, 2, 3, 0]),
    ([step("slice"), step("module 1"), step("mul_", 1), step("add", 0, 1)], PLAIN, 2, 2, [0, 1, 2, 3, 2]),
    ([step("module 0", has_no_grad=True)], PLAIN, 1, 2, [3, 0, 2, 1, 1]),
    ([step("module 0"), step("module 1", has_no_grad=True), step("module 0", 1)], PLAIN, 2, 2, [2, 1, 0, 3, 0]),
]


def test_any_program_sees_and_trains_what_it_does_in_one_process() -> None:
    @tried(8, *HealthCheck)
    @given(programs() | called_again, some_kinds, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), orders)
    def run(steps: list[Step], kinds: list[int], k: int, chunks: int, order: list[int]) -> None:
        assert_as_one_process(steps, kinds, k, chunks, [stage % (2 * chunks) for stage in order])

    for each in FAILED_ONCE:
        run = example(*each)(run)
    run()
