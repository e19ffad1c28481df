"""Checkpoints of several systems become folders from which FSDP2 and torch's loader go on with the same losses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise import checkpoint
from shardwise.comm import Channel
from tests.checkpoint.deepspeed import model as words
from tests.checkpoint.foreign_files import small_program as small
from tests.processes.pool import Pool

FILES = Path(__file__).parents[1] / "checkpoint"
LOSSES: dict[str, list[float]] = json.loads((FILES / "foreign_files" / "losses.json").read_text())


def go_on(channel: Channel, program: str, folder: Path, flatten: bool) -> list[float]:
    """Load under FSDP2, and make more updates; both ranks have the same rows, so that their mean is that of one."""
    torch.manual_seed(1)
    model: torch.nn.Module = small.make_model() if program == "small" else words.words_model(seed=5)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each))
    fully_shard(model, mesh=init_device_mesh("cpu", (channel.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.7)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": weights, "optim": moments}
    load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    losses = []
    for step in small.LATER:
        if program == "small":
            losses.append(small.update(model, optimizer, step))
            continue
        batch = words.batch_of(step)
        loss = words.loss_of(model(batch["input"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("source", "flatten"), [("lightning.ckpt", True), ("z2-fp32-2", False)])
def test_fsdp2_goes_on_with_the_losses_of_the_system_that_saved(
    pool: Pool, tmp_path: Path, source: str, flatten: bool
) -> None:
    rewrite, program = None, "small"
    if source == "lightning.ckpt":
        place, expected = FILES / "foreign_files" / source, LOSSES[source]
        rewrite = sw.Rewrite("net.$PART.weight -> $PART.weight\nnet.$PART.bias -> $PART.bias")
    else:
        from safetensors.torch import load_file

        program, place = "words", FILES / "deepspeed" / "folders" / source
        expected = load_file(f"{place}.safetensors")["losses"].tolist()
    checkpoint.convert(place, tmp_path / "dcp", to="dcp", rewrite=rewrite)
    for losses in pool.run(2, go_on, program, tmp_path / "dcp", flatten):
        assert losses == pytest.approx(expected, rel=4 * 2**-23)
