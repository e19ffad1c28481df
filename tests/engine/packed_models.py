"""Frozen weights that are packed in ways that packages pack them, without the packages."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


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
