"""The fake device refuses and counts what an accelerator would."""

import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from shardwise.testing.accelerator import NAME, counted

FIRST = f"{NAME}:0"
SECOND = f"{NAME}:1"

pytestmark = pytest.mark.usefixtures("fake")


def test_kernels_give_the_bits_and_the_strides_of_the_cpu() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU())
    x = torch.randn(2, 5, 3).transpose(1, 2)
    expected = net(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    net.to(FIRST)
    got = net(x.to(FIRST))
    got.square().sum().backward()
    assert torch.equal(got.cpu(), expected)
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert str(parameter.grad.device) == FIRST
        assert parameter.grad.stride() == gradient.stride()
        assert torch.equal(parameter.grad.cpu(), gradient)


def test_ties_and_views_move_with_their_module() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    nn.Sequential(one, other).to(FIRST)
    assert other.weight is one.weight
    one.weight.detach()[2:].fill_(7.0)
    assert torch.equal(other.weight[2:].cpu(), torch.full((2, 4), 7.0))


def test_outputs_that_were_empty_get_their_size() -> None:
    assert torch.arange(3, device=FIRST).tolist() == [0, 1, 2]
    out = torch.empty(0, device=FIRST)
    torch.cat([torch.ones(2, device=FIRST), torch.zeros(1, device=FIRST)], out=out)
    assert out.tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("other", ["cpu", "fake:1"])
def test_tensors_of_several_devices_do_not_mix(other: str) -> None:
    here, there = torch.ones(2, device=FIRST), torch.ones(2, device=other)
    for mixes in (here.add, here.add_, here.mul, lambda each: torch.cat([here, each]), lambda each: each.add_(here)):
        with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
            mixes(there)
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        torch.zeros(()).add_(here.sum())
    assert torch.equal((here + torch.ones(())).cpu(), torch.full((2,), 2.0))  # a number
    assert here[torch.tensor([0])].device == torch.device(FIRST)  # indices may come from the host
    assert torch.equal(there.to(FIRST), here)


def test_a_host_that_reads_the_memory_of_a_device_ends() -> None:
    program = (
        "import ctypes, torch; from shardwise.testing.accelerator import load; load();"
        "x = torch.ones(4, device='fake'); print('before', flush=True);"
        "ctypes.string_at(x.data_ptr(), 4); print('after')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "before\n"
    assert done.returncode == -signal.SIGSEGV


def test_syncs_uploads_and_launches_are_counted_with_their_lines() -> None:
    x = torch.ones(4, device=SECOND)
    with counted("sync", "upload") as counts:
        y = (x * 2).sum()  # two launches
        y.item()
        y.cpu()
        torch.equal(x, x)  # a launch, and the host waits
        x[x > 0]  # two launches; how many elements there are depends on the data
        torch.accelerator.synchronize(SECOND)
        torch.ones(1).to(SECOND)
    of_device = counts[1]
    assert (of_device.syncs, of_device.uploads, of_device.launches) == (5, 1, 5)
    assert [line.partition(": ")[0] for line in of_device.lines] == [
        "sync aten::item", "sync aten::copy_", "sync aten::equal", "sync aten::index", "sync synchronize",
        "upload aten::copy_",
    ]  # fmt: skip
    assert all("test_accelerator.py" in line and "in test_syncs" in line for line in of_device.lines)
    assert counts[0] == type(of_device)()


def test_a_copy_into_pinned_memory_stops_the_host_only_where_it_is_asked_to() -> None:
    x = torch.ones(4, device=FIRST)
    pinned = torch.empty(4).pin_memory()
    assert pinned.is_pinned()
    with counted() as counts:
        pinned.copy_(x, non_blocking=True)
    assert counts[0].syncs == 0
    with counted() as counts:
        pinned.copy_(x)
        torch.empty(4).copy_(x, non_blocking=True)
    assert counts[0].syncs == 2


def test_lists_of_tensors_are_one_launch() -> None:
    many = [torch.ones(3, device=FIRST) for _ in range(5)]
    with counted() as counts:
        torch._foreach_add_(many, 1.0)
        squares = torch._foreach_norm(many)
    assert counts[0].launches == 2
    assert [float(each) for each in squares] == pytest.approx([12**0.5] * 5)


def test_backward_runs_in_the_thread_of_the_device() -> None:
    import threading

    seen = []
    x = torch.ones(2, device=SECOND, requires_grad=True)
    x.register_hook(lambda _: seen.append((threading.get_ident(), torch.accelerator.current_device_index())))
    (x * 2).sum().backward()
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1] == 1
