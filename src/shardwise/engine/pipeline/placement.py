"""Where the modules of a model go: their tree, their work, and the placement that all ranks agree on.

The placement itself is a pure function of the tree (`outline_of`), the work of each module and the order of their first
calls (`count_work`): `plan.stages.place`.
"""

import json
from typing import Any

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.agreement import agreed, json_as, understood
from shardwise.engine.forward.batches import Batch, LossOfModel, first_microbatch
from shardwise.engine.forward.outline import outline_of
from shardwise.engine.forward.trial_runs import count_work
from shardwise.errors import PlanError
from shardwise.plan import Placement, Plan
from shardwise.plan.stages import place

WHOLE = Placement(num_ranks=1, num_stages=1, modules={"": 0}, parameters={})
"""Of a model that is not cut."""


def agree_on_placement(
    model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch | None, channel: Channel
) -> Placement:
    """Place the modules of `model`, in the order in which `sample` runs through them where there is one.

    Where work decides, it is what rank 0 counts or measures on the sample.

    Raises PlanError, the same on all ranks.
    """
    if plan.mesh.pp * plan.pipeline.num_chunks == 1:
        return WHOLE
    purpose = "work of modules"
    with agreed(channel, purpose=purpose) as counted:
        measured: Any = [None, None]
        if plan.pipeline.stages is None:
            if sample is None and plan.pipeline.balance != "parameters":
                raise PlanError(
                    f"pipeline.balance: {plan.pipeline.balance!r} asked, which runs the model on a batch; give one: "
                    'parallelize(..., sample=batch), or balance by "parameters"'
                )
            if sample is not None and channel.rank == 0:
                measured = _measure(model, plan, loss, sample)
        counted.value = json.dumps(measured).encode()
    # Times differ from rank to rank: those of rank 0 hold.
    form = json_as(tuple[dict[str, float] | None, list[str] | None])
    ((work, order),) = understood(counted.values[:1], form, purpose=purpose)
    with agreed(channel, purpose="verdict on the placement"):
        return place(outline_of(model), plan.pipeline, num_ranks=plan.mesh.pp, work=work, order=order)


def _measure(
    model: nn.Module, plan: Plan, loss: LossOfModel, sample: Batch
) -> tuple[dict[str, float] | None, list[str]]:
    """Work and order of the modules, on one microbatch of the sample, on the device where the model was built."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    part = first_microbatch(sample, plan, device, loss.rows)
    balance = plan.pipeline.balance
    work, order = count_work(model, lambda: loss(part), kind="flops" if balance == "parameters" else balance)
    return None if balance == "parameters" else work, order
