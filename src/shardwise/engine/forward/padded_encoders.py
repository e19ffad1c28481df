"""`nn.TransformerEncoder` in evaluation: torch lets its layers see nested tensors, without the padded places.

    torch      src, mask -> nested -> layers -> padded with zeros -> norm      only where all parameters are plain ones
    here       src, mask ->           layers -> places of padding zero -> norm

Layers that are cut over ranks, on other ranks or gathered one by one cannot take nested tensors. Padding has no effect
on other places, which the mask says to all layers.
"""

from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.engine.forward.aside import attributes_set
from shardwise.engine.forward.layers import OfEngine, Place, wrap
from shardwise.plan import Plan


def let_encoders_pad(model: nn.Module, plan: Plan) -> None:
    """Give encoders of torch the numbers of their way with nested tensors, where the plan does not let them go it."""
    if plan.mesh.tp == plan.mesh.pp == 1 and plan.sharding.stage < 3:
        return
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward:
            wrap(module, _ZeroPadding())


class _ZeroPadding(OfEngine):
    """The forward of a `TransformerEncoder`."""

    place = Place.CLASS

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, forward = self.module, self.forward
        assert isinstance(module, nn.TransformerEncoder)
        valid = _valid_places(module, *args, **kwargs)
        if valid is None:
            return forward(*args, **kwargs)
        norm = module.norm
        with attributes_set(module, {"use_nested_tensor": False, "norm": None}):
            output = forward(*args, **kwargs)
        output = output.masked_fill(valid.logical_not().unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)


def _valid_places(
    module: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> torch.Tensor | None:
    """The places without padding; None where torch takes no nested tensors. The conditions are those of its forward."""
    first = module.layers[0]
    if src_key_padding_mask is None or mask is not None or first.training or not module.use_nested_tensor:
        return None
    if src.dim() != 3 or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return None
    if torch.is_grad_enabled() and (src.requires_grad or any(each.requires_grad for each in first.parameters())):
        return None
    valid = src_key_padding_mask.logical_not()
    if module.mask_check and not torch.equal(valid.int().cummin(1).values, valid.int()):  # padding is not on the right
        return None
    return valid
