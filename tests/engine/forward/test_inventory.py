"""What no plan can hold is refused before anything moves."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.engine.forward.inventory import take_inventory
from shardwise.errors import ModelError


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_a_model_that_torch_has_cut_is_refused_with_what_cuts_it_here() -> None:
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with pytest.raises(ModelError, match=r"'0\.weight' is a DTensor.* before parallelize_module, with sw\.Tensor"):
        take_inventory(model, sw.Precision())
