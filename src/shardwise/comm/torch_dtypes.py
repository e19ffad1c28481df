"""Dtypes: torch's, by the names that plans and pieces give them."""

import torch

__all__ = ["dtype_name", "torch_dtype"]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that plans and pieces give a torch dtype: `torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a plan or a piece."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
