"""What this room takes from torch by private names does what it needs of it: what fails here says what breaks."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.utils import parametrizations, parametrize

from shardwise.comm import torch_private as private

SECONDS = timedelta(seconds=60)


@pytest.fixture
def world_of_one() -> Iterator[Store]:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def test_the_store_is_the_one_through_which_the_ranks_have_met(world_of_one: Store) -> None:
    private.default_store().set("word", "said")
    names = {private.default_store().get("word")}
    assert names == {b"said"}


def test_parts_of_all_ranks_travel_in_one_tensor_and_are_summed() -> None:
    """As the fake backend: it takes the calls, and moves nothing."""
    group: Any = private.gloo_group(HashStore(), 0, 1, private.gloo_device("127.0.0.1"), timeout=SECONDS)
    output = torch.zeros(3)
    private.all_gather_equal(group, output, torch.arange(3.0)).wait()
    assert output.tolist() == [0.0, 1.0, 2.0]
    private.reduce_scatter_equal(group, output, torch.ones(3)).wait()
    assert output.tolist() == [1.0, 1.0, 1.0]


def test_a_pair_of_gloo_at_an_address_moves_what_its_ends_send() -> None:
    """Otherwise no large tensor comes to another host."""
    store, device, got = HashStore(), private.gloo_device("127.0.0.1"), torch.zeros(4)

    def send() -> None:
        private.gloo_group(store, 0, 2, device, timeout=SECONDS).send([torch.arange(4.0)], 1, 7).wait()

    sender = threading.Thread(target=send)
    sender.start()
    private.gloo_group(store, 1, 2, device, timeout=SECONDS).recv([got], 0, 7).wait()
    sender.join()
    assert got.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("extended", [True, False])
def test_backends_of_other_packages_are_made_without_a_process_group(
    monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    made: list[tuple[object, ...]] = []

    def make(*given: Any) -> str:
        options = given[0]
        made.append((options.store, options.group_rank, options.group_size, options.timeout) if extended else given)
        return "made"

    monkeypatch.setattr(dist.Backend, "_plugins", dict(dist.Backend._plugins))
    monkeypatch.setattr(dist.Backend, "backend_capability", dict(dist.Backend.backend_capability))
    dist.Backend.register_backend("shelf", make, extended_api=extended, devices=["cpu"])
    assert private.can_make_backend("shelf")
    assert private.made_backend("shelf", store := HashStore(), 1, 3, SECONDS) == "made"
    assert made == [(store, 1, 3, SECONDS)]
    assert not private.can_make_backend("no such")


def test_backends_of_torch_take_their_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL, which most builds of torch have not: a class with options of its own."""

    class ProcessGroupXYZ:
        Options = SimpleNamespace

        def __init__(self, *given: Any) -> None:
            self.given = given

    monkeypatch.setattr(dist, "ProcessGroupXYZ", ProcessGroupXYZ, raising=False)
    assert private.can_make_backend("xyz")
    store, rank, size, options = private.made_backend("xyz", HashStore(), 0, 2, SECONDS).given
    assert (type(store), rank, size, options._timeout) == (HashStore, 0, 2, SECONDS)


def test_the_options_of_nccl_have_a_time_limit() -> None:
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is not None:
        options = nccl.Options()
        options._timeout = SECONDS
        assert options._timeout == SECONDS


def test_placements_cut_as_torch_distributes(world_of_one: Store) -> None:
    """Otherwise the pieces of a DTensor would be others than the elements that its ranks hold."""
    from torch.distributed.tensor.placement_types import _StridedShard

    lengths = [len(part) for part in private.cut_by_placement(Shard(0), torch.arange(5), 3)]
    assert lengths == [2, 2, 1]
    strided = _StridedShard(0, split_factor=2)
    assert [part.tolist() for part in private.cut_by_placement(strided, torch.arange(8), 2)] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    assert private.is_strided_cut(strided)
    assert not private.is_strided_cut(Shard(0))
    assert not private.is_strided_cut(Replicate())
    mesh = init_device_mesh("cpu", (1, 1))
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        orders = private.orders_of_cuts(distribute_tensor(torch.ones(4, 4), mesh, placements))
        assert all([*order] == sorted(order) for order in orders)


def test_sparse_tensors_show_their_parts_before_they_are_coalesced() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    indices, values = private.sparse_parts(twice)
    assert (indices.tolist(), values.tolist()) == ([[0, 0]], [1.0, 2.0])


def test_weights_that_a_block_has_cached_are_taken_out_and_put_back() -> None:
    linear = parametrizations.weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        kept, state = linear.weight, private.cached_weights()
        private.restore_cached_weights((1, {}))
        assert linear.weight is not kept
        private.restore_cached_weights(state)
        assert linear.weight is kept
    assert private.cached_weights() == (0, {})


def test_the_guard_of_cuda_is_made_where_torch_has_one() -> None:
    private.guard_cuda_devices()


def test_forward_mode_is_seen_inside_it_alone() -> None:
    assert not private.is_in_forward_mode()
    with forward_ad.dual_level():
        assert private.is_in_forward_mode()
    assert not private.is_in_forward_mode()
