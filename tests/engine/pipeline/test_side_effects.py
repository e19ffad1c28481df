"""What placed modules do beside returning values is done on all ranks, or refused; never lost without a word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import shardwise as sw
from tests.engine.expected import seeded
from tests.engine.pipeline.models import Block, square, vectors
from tests.engine.pipeline.oracle import Case, adamw
from tests.engine.pipeline.stages import assert_equals_one_process

BATCHES = [vectors(seed) for seed in range(3)]
STAGES = {"first": 0, "one": 0, "two": 1, "last": 1}


class Two(nn.Module):
    """Two blocks, on two stages, which do what the test says."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.one, self.two = block(), block()
        self.last = nn.Linear(7, 3)


def assert_equal(make: Callable[[], nn.Module], **layout: Any) -> None:
    case = Case(make=seeded(make), batches=BATCHES, stages=STAGES, num_stages=2, loss=square)
    assert_equals_one_process(case, **{"schedule": "1f1b", "pp": 2, "k": 3, **layout})


def refusal(make: Callable[[], nn.Module]) -> str:
    plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages=STAGES), merge=sw.Merge(microbatches=2))

    def run(channel: sw.Channel) -> None:
        sw.parallelize(seeded(make)(), plan, optimizer=adamw, loss=square, channel=channel).step(vectors(0))

    with pytest.raises(sw.ShardwiseError) as caught:
        sw.simulate(2, run)
    return str(caught.value)


class Filling(Block):
    """Reads and fills a dict and a list that it is given."""

    def forward(self, x: torch.Tensor, seen: dict[str, Any], penalties: list[Any]) -> torch.Tensor:  # type: ignore[override]
        out = super().forward(x)
        if "before" in seen:
            out = out + seen["before"][0]
        seen["before"] = (out * 2, None)
        penalties.append(out.square().mean())
        penalties.append(0.25)
        return out


class Collecting(Two):
    def __init__(self) -> None:
        super().__init__(Filling)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: dict[str, Any] = {}
        penalties: list[Any] = []
        h = self.two(self.one(self.first(x), seen, penalties), seen, penalties)
        assert len(penalties) == 4
        out: torch.Tensor = self.last(h + 0.1 * seen["before"][0]) + penalties[0] + penalties[2] * penalties[3]
        return out


@pytest.mark.parametrize(("schedule", "k"), [("1f1b", 3), ("fthenb", 1)])
def test_lists_and_dicts_that_modules_fill_are_filled_on_all_ranks(schedule: str, k: int) -> None:
    assert_equal(Collecting, schedule=schedule, k=k)


class Taking(Block):
    def forward(self, x: torch.Tensor, items: list[int]) -> torch.Tensor:  # type: ignore[override]
        items.pop()
        return super().forward(x)


class TakingOut(Two):
    def __init__(self) -> None:
        super().__init__(Taking)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        items = [1, 2]
        out: torch.Tensor = self.last(self.two(self.one(self.first(x), items), items))
        return out


def test_a_module_that_takes_items_out_of_a_list_is_refused() -> None:
    assert "'one' takes items out of a list" in refusal(TakingOut)


class Parcel:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Changing(Block):
    def forward(self, parcel: Any) -> Any:
        parcel.x = super().forward(parcel.x)
        return parcel


class ChangingObjects(Two):
    def __init__(self) -> None:
        super().__init__(Changing)
        del self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parcel = Parcel(x.new_ones(len(x), 7) * x.sum(1, keepdim=True))
        out: torch.Tensor = self.last(self.two(self.one(parcel)).x)
        return out


def test_a_module_that_changes_an_object_is_refused() -> None:
    plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"one": 0, "two": 1, "last": 1}))

    def run(channel: sw.Channel) -> None:
        model = seeded(ChangingObjects)()
        sw.parallelize(model, plan, optimizer=adamw, loss=square, channel=channel).step(vectors(0))

    with pytest.raises(sw.ShardwiseError, match="writes a tensor to an attribute of a Parcel"):
        sw.simulate(2, run)


class Counting(Block):
    """Returns numbers and texts that change from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        return super().forward(x), 1.0 / self.num_calls, ("odd", "even")[self.num_calls % 2]


class CountingTwo(Two):
    def __init__(self) -> None:
        super().__init__(Counting)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, factor, parity = self.one(self.first(x))
        h, _, _ = self.two(h * factor)
        out: torch.Tensor = self.last(h if parity == "odd" else h * 3)
        return out


def test_numbers_and_texts_that_modules_return_are_those_of_the_call() -> None:
    assert_equal(CountingTwo, k=5)
    four = {"first": 0, "one": 1, "two": 2, "last": 3}
    case = Case(make=seeded(CountingTwo), batches=BATCHES, stages=four, loss=square)
    assert_equals_one_process(case, schedule="interleaved", pp=2, k=4)


class Plain(Two):
    """Blocks alike, with a hook inside one of them."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.features: list[torch.Tensor] = []
        inner = self.two.inner
        assert isinstance(inner, nn.Module)
        inner.register_forward_hook(lambda module, args, output: self.features.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features.clear()
        h = self.two(self.one(self.first(x)))
        out: torch.Tensor = self.last(h) + self.features[0].mean()
        return out


def test_a_hook_in_one_of_several_layers_alike() -> None:
    assert_equal(Plain)


class InView(Two):
    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__(Block)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(self.first(x))
        memory = torch.zeros(len(x), 7)
        read = self.write(memory, h)
        out: torch.Tensor = self.last(self.two(h) + memory + (0 if read is None else read))
        return out


def put_into_the_whole(memory: torch.Tensor, h: torch.Tensor) -> None:
    memory[:, :3] = h[:, :3]


def put_through_a_view(memory: torch.Tensor, h: torch.Tensor) -> None:
    memory[:, :3].copy_(h[:, :3])


def read_through_an_old_view(memory: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    old = memory[:, :1]
    memory[:, :3] = h[:, :3]
    return old


def test_a_plain_tensor_takes_values_of_a_stage() -> None:
    assert_equal(lambda: InView(put_into_the_whole))


@pytest.mark.parametrize("write", [put_through_a_view, read_through_an_old_view])
def test_values_of_a_stage_behind_the_back_of_a_plain_tensor_are_refused(write: Callable[..., Any]) -> None:
    assert "through another view" in refusal(lambda: InView(write))


class Scaled(Two):
    """Writes without gradients, through a view that torch follows no more afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(self.first(x))
        with torch.no_grad():
            h.view(-1).mul_(0.5)
        out: torch.Tensor = self.last(self.two(h))
        return out


def test_a_write_without_gradients_through_a_view_is_that_of_one_process() -> None:
    assert_equal(lambda: Scaled(Block))


class Centre(Two):
    """A running mean of what a stage made, in the model's own buffer."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_buffer("centre", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.two(self.one(self.first(x)))
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * h.mean(0))
        out: torch.Tensor = self.last(h)
        return out


class Momentum(Two):
    """A frozen block follows one of a later stage."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.one.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.one.parameters(), self.two.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        out: torch.Tensor = self.last(self.two(self.one(self.first(x))))
        return out


def test_values_of_a_stage_written_into_a_buffer_of_all_ranks_are_refused() -> None:
    assert "to a buffer of a module of all ranks" in refusal(Centre)


def test_values_of_a_stage_written_into_a_parameter_of_another_are_refused() -> None:
    assert "which is on stage 0" in refusal(Momentum)


class Borrowing(Block):
    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        out = super().forward(x)
        return out if other is None else out @ other.weight[:, :1].expand(7, 7)


class KeepingBorrowed(Borrowing):
    others: tuple[nn.Module, ...] = ()

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return super().forward(x, self.others[0] if self.others else None)


class BorrowingTwo(Two):
    def __init__(self) -> None:
        super().__init__(Borrowing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.two(self.one(self.first(x)), self.first))
        return out


class KeepingTwo(Two):
    def __init__(self) -> None:
        super().__init__(KeepingBorrowed)
        vars(self.two)["others"] = (self.first,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.two(self.one(self.first(x))))
        return out


@pytest.mark.parametrize(("schedule", "k"), [("1f1b", 3), ("interleaved", 2)])
def test_a_module_that_is_handed_to_one_of_another_stage_brings_its_parameters_along(schedule: str, k: int) -> None:
    stages = {"first": 0, "one": 1, "two": 2, "last": 3}
    case = Case(make=seeded(BorrowingTwo), batches=BATCHES, stages=stages, loss=square)
    assert_equals_one_process(case, schedule=schedule, pp=2, k=k)


def test_a_module_that_keeps_one_of_another_stage_is_refused() -> None:
    assert "a parameter or a buffer of a module on another stage" in refusal(KeepingTwo)


class Packed(nn.Module):
    """A packed sequence between two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.one = nn.GRU(7, 7, batch_first=True)
        self.two = nn.GRU(7, 7, batch_first=True)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).unsqueeze(1).expand(-1, 3, -1)
        lengths = torch.arange(len(x)) % 3 + 1
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.one(packed)
        packed, _ = self.two(packed)
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        out: torch.Tensor = self.last(padded.sum(1))
        return out


def test_packed_sequences_cross_stages() -> None:
    assert_equal(Packed, k=2)


class Weighing(Block):
    """Gives a number along, and a shape that depends on values."""

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out[out.sum(1) > -1e9], 0.5


class CheckpointedTwo(Two):
    def __init__(self) -> None:
        super().__init__(Weighing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in (self.one, self.two):
            with set_checkpoint_early_stop(False):  # so that a module is computed again to its end
                given, factor = checkpoint(block, h, use_reentrant=False)
            h = given * factor
        out: torch.Tensor = self.last(h)
        return out


def test_a_recomputation_announces_nothing() -> None:
    assert_equal(CheckpointedTwo)
