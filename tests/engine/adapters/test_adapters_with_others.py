"""Adapters with averages of weights, with dropout, and several of them in turns with saves between."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from tests.engine.adapters.peft_models import adamw, adapted, base, batch
from tests.engine.adapters.test_adapter_files import logits
from tests.engine.adapters.test_adapter_training import LAYOUTS, TURNS, share, two_adapters


def averaging(layout: str) -> sw.Plan:
    return replace(LAYOUTS[layout], average=sw.Average(decay=0.5))


@pytest.mark.parametrize(
    ("before", "after"),
    [("stage 3", "pp"), *(pytest.param(*each, marks=pytest.mark.stress) for each in (("pp", "tp"), ("tp", "stage 1")))],
)
def test_averages_of_adapters_are_evaluated_saved_and_merged(before: str, after: str, tmp_path: Path) -> None:
    from peft import PeftModel

    given = batch("llama")
    plain = adapted("llama", "dora").train()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = adamw(list(plain.parameters()))
    for _ in range(4):
        optimizer.zero_grad()
        plain(**given).loss.backward()
        optimizer.step()
        average.update_parameters(plain)
    average.eval()
    with torch.no_grad():
        expected = average.module(**given).loss.item()

    def first(channel: sw.Channel) -> None:
        plan = averaging(before)
        engine = sw.parallelize(adapted("llama", "dora").train(), plan, optimizer=adamw, channel=channel)
        for _ in range(2):
            engine.step(share(given, plan, channel.rank))
        sw.save(tmp_path / "run", engine)

    def second(channel: sw.Channel) -> tuple[float, float]:
        plan = averaging(after)
        engine = sw.parallelize(adapted("llama", "dora").train(), plan, optimizer=adamw, channel=channel)
        sw.load(tmp_path / "run", engine)
        own = share(given, plan, channel.rank)
        for _ in range(2):
            engine.step(own)
        with engine.averaged():
            found = engine.evaluate(own).loss
            sw.save_adapters(engine, tmp_path / "adapters")
            sw.save_merged(engine, tmp_path / "merged")
        return found, engine.evaluate(own).loss

    sw.simulate(2, first)
    for found, of_weights in sw.simulate(2, second):
        assert found == pytest.approx(expected, rel=1e-6)
        assert of_weights != pytest.approx(expected, rel=1e-6)
    read = PeftModel.from_pretrained(base("llama"), tmp_path / "adapters").double()
    torch.testing.assert_close(logits(read, "llama"), logits(average.module, "llama"), rtol=1e-5, atol=1e-6)
    whole = read.merge_and_unload()
    made = type(whole).from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert all(torch.equal(each, made.state_dict()[name]) for name, each in whole.state_dict().items())


def with_dropout() -> Any:
    from peft import LoraConfig, get_peft_model

    model = base("llama")
    torch.manual_seed(1)
    lora = LoraConfig(
        r=3,
        target_modules=["q_proj", "o_proj", "up_proj"],
        lora_dropout=0.5,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora).double().train()


def losses_of(plan: sw.Plan, seed: int = 5) -> list[float]:
    def run(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(with_dropout(), plan, optimizer=adamw, channel=channel, seed=seed)
        return [engine.step(share(batch("llama"), plan, channel.rank)).loss for _ in range(3)]

    return sw.simulate(plan.mesh.size, run)[0]


def test_dropout_of_adapters_draws_alike_under_every_layout() -> None:
    """With as many microbatches of the same rows; tp without a map whose inputs are cut."""
    two = sw.Merge(microbatches=2)
    expected = losses_of(sw.Plan(merge=two))
    assert expected != losses_of(sw.Plan(merge=two), seed=7)
    rules = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
    for plan in (
        sw.Plan(mesh=sw.Mesh(dp_shard=2)),
        sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
        sw.Plan(mesh=sw.Mesh(pp=2), merge=two),
        sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), sharding=sw.Sharding(stage=2)),
        sw.Plan(mesh=sw.Mesh(tp=2), merge=two, tensor=sw.Tensor(rules=rules)),
    ):
        assert losses_of(plan) == pytest.approx(expected, rel=1e-6), plan


def test_adapters_take_turns_around_a_save(tmp_path: Path) -> None:
    """Each has the state of its own steps, whichever is active where it is loaded."""
    given = batch("llama")
    plain = two_adapters().train()
    optimizer, expected = adamw(list(plain.parameters())), []
    for name in [*TURNS, "two", "one"]:
        plain.set_adapter(name)
        optimizer.zero_grad()
        loss = plain(**given).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    def turns(channel: sw.Channel, layout: str, names: list[str], load: bool) -> list[float]:
        model, plan = two_adapters().train(), LAYOUTS[layout]
        model.base_model.set_adapter(["one", "two"])  # both have a place for their state
        engine = sw.parallelize(model, plan, optimizer=adamw, channel=channel)
        if load:
            sw.load(tmp_path / layout, engine)
        found = []
        for name in names:
            model.set_adapter(name)
            found.append(engine.step(share(given, plan, channel.rank)).loss)
        if not load:
            for target in ("pp", "tp"):
                sw.save(tmp_path / target, engine)
        return found

    assert sw.simulate(2, lambda channel: turns(channel, "stage 3", TURNS, False))[0] == pytest.approx(
        expected[:4], rel=1e-6
    )
    for layout in ("pp", "tp"):
        for found in sw.simulate(2, partial(turns, layout=layout, names=["two", "one"], load=True)):
            assert found == pytest.approx(expected[4:], rel=1e-6)
