"""Parameters that are DTensors already: the user ran `parallelize_module`, or loaded with a plan of tensor parallelism.

Their modules expect DTensors, so they stay what they are. What lies in flat buffers and goes to owners are the local
tensors: a DTensor is a shell around a view of a buffer, and its gradient is taken out of such a shell.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwise.comm.local_tensors import is_dtensor, local_stretches, local_tensor, with_local_tensor
from shardwise.engine.inventory import Inventory
from shardwise.errors import CheckpointError, ModelError
from shardwise.plan import Plan
from shardwise.space import Portion


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter, outside of autograd."""
    return local_tensor(parameter) if is_dtensor(parameter) else parameter.detach()


def put_on(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter have its local values in the memory of `values`, which has their shape."""
    if not is_dtensor(parameter):
        parameter.data = values
        return
    shell = nn.Parameter(with_local_tensor(parameter, values), requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, shell)


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of what this rank has of a parameter, dense; the parameter does not keep it."""
    with torch._C.DisableTorchFunctionSubclass():  # at rest or not
        gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return None
    if is_dtensor(gradient):
        if is_dtensor(parameter) and gradient.placements != parameter.placements:  # summands, say
            gradient = gradient.redistribute(placements=parameter.placements)
        return local_tensor(gradient)
    return gradient.to_dense() if gradient.layout != torch.strided else gradient


def portions_of_dtensors(inventory: Inventory, plan: Plan, rank: int) -> Mapping[str, Portion]:
    """The portions of parameters that are cut DTensors. Raises ModelError for DTensors that the plan cannot hold.

    rank: of the world, whose ranks the meshes of the DTensors name.
    """
    given = {name: each for name, each in inventory.parameters.items() if is_dtensor(each)}
    if not given:
        return {}
    problems = []
    if plan.sharding.stage == 3:
        problems.append("stage 3 frees parameters between uses, which their modules do not bear; use stage 2")
    if plan.mesh.pp > 1:
        problems.append(f"pp={plan.mesh.pp} infers the outputs of foreign modules, which is not known of DTensors")
    peers = list(plan.mesh.peers(rank, ("tp",)))
    portions = {}
    for name, tensor in given.items():
        ranks = tensor.device_mesh.mesh.flatten().tolist()
        if ranks != peers:
            problems.append(f"{name!r} lies on the ranks {ranks}, but those of this rank along tp are {peers}")
            continue
        try:
            held = local_stretches(name, tensor)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        cut = [dim for dim, stretches in enumerate(held) if stretches != [(0, tensor.shape[dim])]]
        if len(cut) > 1:
            problems.append(f"{name!r} is cut along the dims {cut}; one is known")
        elif cut:
            portions[name] = Portion(tuple(tensor.shape), cut[0], tuple(held[cut[0]]))
    if problems:
        raise ModelError(_refusal(list(given), problems))
    return portions


def _refusal(names: Sequence[str], problems: Sequence[str]) -> str:
    return (
        f"{len(names)} parameters are DTensors, among them {names[0]!r}, and the plan cannot take them: "
        + "; ".join(problems)
        + ". Give a mesh whose tp ranks are theirs, or the model as it was built, with "
        "sw.Tensor(rules=...) (tensor.rules)"
    )
