"""Models with adapters on frozen weights that are packed in the ways that packages pack them, without the packages."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH = 16


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes, and a scale for each row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Codes(torch.Tensor):
    """A tensor around two others, as torchao has them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> "Codes":
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> "Codes":
        return Codes(inner["codes"], inner["scale"], dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return F.linear(x, weight.codes.to(x.dtype) * weight.scale.to(x.dtype), bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            (of,) = args
            given = {key: value for key, value in (kwargs or {}).items() if key == "device"}
            return Codes(func(of.codes, **given), func(of.scale, **given), of.dtype)
        raise NotImplementedError(f"{func} of packed codes")


class StatefulWeight(nn.Parameter):
    """Codes with an object that has their scales, as 4-bit weights of bitsandbytes are."""

    state: "Scales"


class Scales:
    """Of codes; what it holds is nested."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.shape = scale.shape
        self.inner = {"scale": scale}

    def to(self, device: torch.device) -> None:
        self.inner["scale"] = self.inner["scale"].to(device)


class KernelState:
    """To which the first forward moves what the weight had, as 8-bit layers of bitsandbytes do."""

    CB: torch.Tensor | None = None
    SCB: torch.Tensor | None = None
    outliers: torch.Tensor | None = None


class StatefulLinear(nn.Module):
    """Codes that are stored as bfloat16; in evaluation mode its kernel packs them in another way, for good."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        codes, scale = packed(weight)
        stored = codes.view(torch.bfloat16).reshape(-1, 1)
        self.weight = torch.Tensor._make_subclass(StatefulWeight, stored, False)
        self.weight.state = Scales(scale)
        self.bias = nn.Parameter(torch.linspace(-1, 1, len(weight)))
        self.is_anew = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.weight.state
        if not self.training and "turned" not in state.inner:
            self.weight.data = self.weight.detach().flip(0)
            state.inner = {"scale": state.inner["scale"], "turned": torch.ones(1)}
        stored = self.weight.detach().flip(0) if "turned" in state.inner else self.weight.detach()
        codes = stored.reshape(len(self.bias), -1).view(torch.int8)
        if self.bias.dtype != torch.bfloat16:
            self.bias.data = self.bias.data.to(torch.bfloat16)
        if self.training:  # another object around the same memory, as what dequantises a weight may make it
            self.weight = torch.Tensor._make_subclass(StatefulWeight, self.weight.data, False)
            self.weight.state = state
        return F.linear(x, codes.to(x.dtype) * state.inner["scale"].to(x.dtype), self.bias.to(x.dtype))


class MovingLinear(nn.Module):
    """Its first forward moves scales, and a view of the codes, to a state of the module."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        codes, scale = packed(weight)
        self.weight = torch.Tensor._make_subclass(Int8Weight, codes, False)
        self.weight.CB, self.weight.SCB = self.weight.data, scale
        self.state = KernelState()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        assert self.state.CB is not None
        assert self.state.SCB is not None
        self.state.outliers = (x.abs() > 2).sum().reshape(1)
        out: torch.Tensor = _Matmul.apply(x, self.state)  # type: ignore[no-untyped-call]
        self.weight.data = self.state.CB
        return out


class Int8Weight(nn.Parameter):
    """See `MovingLinear`."""

    CB: torch.Tensor | None
    SCB: torch.Tensor | None


class _Matmul(torch.autograd.Function):
    """Reads the state again in its backward, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: Any) -> torch.Tensor:
        ctx.state = state
        return F.linear(x, state.CB.to(x.dtype) * state.SCB.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ (ctx.state.CB.to(gradient.dtype) * ctx.state.SCB.to(gradient.dtype)), None


class Float8Linear(nn.Module):
    """Frozen float8 with scales that are parameters, and codes as buffers, of another part."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        half = len(weight) // 2
        codes, scale = packed(weight[half:])
        self.weight = nn.Parameter((weight[:half] * 16).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale_inv = nn.Parameter(torch.full((1,), 1 / 16), requires_grad=False)
        self.register_buffer("qweight", codes.view(torch.uint8))
        self.register_buffer("scales", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale_inv.dtype == torch.float32
        first = self.weight.to(x.dtype) * self.scale_inv.to(x.dtype)
        assert isinstance(self.qweight, torch.Tensor)
        assert isinstance(self.scales, torch.Tensor)
        second = self.qweight.view(torch.int8).to(x.dtype) * self.scales.to(x.dtype)
        return F.linear(x, torch.cat([first, second]))


def shell(weight: torch.Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight = nn.Parameter(Codes(*packed(weight), torch.float32), requires_grad=False)
    return linear


KINDS: dict[str, Callable[[torch.Tensor], nn.Module]] = {
    "a tensor around others": shell,
    "attributes": StatefulLinear,
    "a state of the module": MovingLinear,
    "float8 and buffers": Float8Linear,
}


class Adapted(nn.Module):
    """A frozen map with an adapter; the batch's rows stay apart."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(WIDTH, 4, bias=False)
        self.b = nn.Linear(4, WIDTH, bias=False)
        nn.init.normal_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        assert isinstance(out, torch.Tensor)
        added: torch.Tensor = self.b(self.a(x.to(self.a.weight.dtype)))
        return x + torch.tanh(out + added.to(out.dtype))


class PackedNet(nn.Module):
    """One block of each kind; among its frozen parameters one of whole numbers, and one in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(make(torch.randn(WIDTH, WIDTH) / 4)) for make in KINDS.values())
        self.head = nn.Linear(WIDTH, 4)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def packed_net(seed: int = 0) -> PackedNet:
    torch.manual_seed(seed)
    return PackedNet()
