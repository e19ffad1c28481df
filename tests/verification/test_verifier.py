"""Right layouts are equal to one process, or within rounding, whatever they are made of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.train.verified_program import configured
from shardwise.verification.report import VerificationReport
from shardwise.verification.verifier import verify_simulated
from tests.oracle.batches import word_loss
from tests.refusals import Refusals
from tests.train.row_kinds import run_of
from tests.verification.verified import Net, batches, compared, plan, tied, verified

OUTPUTS, PER_MICROBATCH, MEANS, UPDATED = (
    "outputs of modules",
    "gradients per microbatch",
    "mean gradients",
    "updated tensors",
)


@pytest.mark.parametrize(
    "asked",
    [plan(pp=2, clip_grad_norm=0.3), plan(3, pp=2, pipeline=sw.Pipeline(schedule="interleaved"), bf16=True)],
    ids=["two stages", "four stages on two ranks"],
)
def test_stages_are_equal_to_one_process(asked: sw.Plan) -> None:
    report = verified(asked, make_model=lambda: Net(dropout=0.2), steps=2)
    assert report.verdict == "equal", report.text()
    k = asked.merge.microbatches
    assert compared(report, OUTPUTS) == (2 * 7 * k, 2 * 7 * k)
    assert compared(report, PER_MICROBATCH) == (2 * 8 * k, 2 * 8 * k)
    assert compared(report, MEANS) == (16, 16)
    assert compared(report, UPDATED)[0] >= 2 * 4 * 8


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (3, True)])
def test_data_ranks_compute_the_same_and_round_the_sum(stage: int, bf16: bool) -> None:
    report = verified(plan(stage=stage, dp_shard=2, bf16=bf16, clip_grad_norm=0.3), make_model=tied)
    # Four gradients in bfloat16 may be added in float32 without a rounding at all.
    assert report.verdict in (("rounding", "equal") if bf16 else ("rounding",)), report.text()
    for kind in (OUTPUTS, PER_MICROBATCH, UPDATED):
        total, equal = compared(report, kind)
        assert total == equal > 0
    assert compared(report, MEANS)[0] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "make_model"),
    [
        (plan(pp=2, dp_replicate=2, stage=0), tied),
        (plan(pp=2, dp_shard=2, tp=2, stage=3, bf16=True, clip_grad_norm=0.3), Net),
    ],
    ids=["tied stages and replicas", "all at once"],
)
def test_other_orders_of_additions_are_rounding_and_all_ranks_get_one_report(asked: sw.Plan, make_model: Any) -> None:
    def run(channel: sw.Channel) -> VerificationReport:
        return verified(asked, make_model=make_model, steps=2, channel=channel)

    report, *others = sw.simulate(asked.mesh.size, run)
    assert all(each == report for each in others)
    assert report.verdict == "rounding", report.text()
    total, equal = compared(report, UPDATED)
    assert total == equal
    assert len(report.steps) == 2


def test_gradients_of_scaled_losses_are_compared_without_the_scale() -> None:
    """Of updates that are skipped for a scale that is too large, nothing is compared."""
    precision = sw.Precision(compute="float16", loss_scale="dynamic")
    report = verified(plan(dp_shard=2, precision=precision), make_model=tied, steps=3)
    assert report.verdict == "equal", report.text()  # few terms in float16 are added in float32 without a rounding
    assert len(report.steps) == 3
    assert 0 < compared(report, MEANS)[0] < 3 * 7
    assert "not compared: updates 0, 1. The loss or gradient is not finite" in report.text()


def test_a_model_of_transformers_under_the_plan_that_it_carries() -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "use_cache": False,
    }
    config = transformers.Qwen2Config(**sizes, **heads)  # the gradient of its biases of keys is zero but for rounding
    tokens = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(0))
    report = sw.verify(
        lambda: transformers.Qwen2ForCausalLM(config),
        plan(1, pp=2, tp=2, dp_shard=2, bf16=True, tensor=sw.Tensor(rules="auto")),
        [{"input_ids": tokens, "labels": tokens}],
        optimizer=torch.optim.AdamW,
    )
    assert report.verdict == "rounding", report.text()
    assert compared(report, PER_MICROBATCH)[0] > 2 * 26  # those of cut parameters in parts


def test_what_batches_count_and_how_they_are_merged_is_that_of_the_plan() -> None:
    def count(batch: Any) -> float:
        return float((batch["words"][0, 0] > 4).item() * 3)

    weighed = verified(plan(4, dp_shard=2, average=False), loss_weight=count, steps=2)
    assert weighed.verdict in ("rounding", "equal"), weighed.text()
    computed = compared(weighed, OUTPUTS)[0]
    assert 0 < computed < 2 * 8 * 7
    assert computed % 7 == 0


def test_where_no_update_is_finite_nothing_can_be_said() -> None:
    def lost(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return word_loss(output, batch) * torch.inf

    report = verified(plan(dp_shard=2), loss=lost, steps=2)
    assert report.verdict == "inconclusive", report.text()
    assert report.divergence is None
    assert compared(report, MEANS) == (0, 0)
    assert "not compared: updates 0, 1. The loss or gradient is not finite" in report.text()
    assert VerificationReport.unpacked(report.packed()).text() == report.text()


def test_buffers_of_several_data_ranks_are_left_out_and_told() -> None:
    def make_model() -> Net:
        return Net(has_statistics=True)

    assert verified(plan(pp=2), make_model=make_model).verdict == "equal"
    report = verified(plan(dp_shard=2), make_model=make_model)
    assert report.verdict == "rounding", report.text()
    told = [each.split("'")[1].removeprefix("statistics.") for each in report.remarks]
    assert told == ["running_mean", "running_var", "num_batches_tracked"]


def test_what_ranks_along_tp_have_parts_of_is_counted_and_told() -> None:
    report = verified(plan(tp=2))
    # The columns of `wide`, of two microbatches on two ranks.
    told = "not compared: 4 outputs of modules per update: ranks along tp have parts, or none"
    assert report.remarks == (told,)
    assert compared(report, OUTPUTS)[0] == 2 * 2 * 7 - 4


def test_what_an_earlier_verification_left_in_a_folder_is_not_read(tmp_path: Path) -> None:
    def run(steps: int) -> VerificationReport:
        folder = tmp_path / "new"
        ranks = sw.simulate(2, lambda channel: verified(plan(dp_shard=2), channel=channel, folder=folder, steps=steps))
        return ranks[0]

    assert len(run(2).steps) == 2
    assert len(run(1).steps) == 1
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "new").rmdir()
    (tmp_path / "new").write_text("")
    with pytest.raises(FileExistsError):
        run(1)


def test_clips_and_averages_that_are_left_out_are_said() -> None:
    clipped = plan(dp_shard=2, clip_grad_norm={"*": 1e-3}, clip_grad_value=1e-4)
    report = verified(replace(clipped, average=sw.Average()))
    assert report.verdict == "rounding"
    assert report.remarks[0] == (
        "not compared: clips by norms of parts (clip_grad_norm), the clip by value (clip_grad_value), averages of the "
        "weights (average). Both sides ran without"
    )
    assert not verified(plan(dp_shard=2, clip_grad_norm=1.0)).remarks


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.ndim == 2], lr=0.02)


def matrices_alone() -> Net:
    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    return model


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


def test_matrices_that_an_optimizer_takes_whole_and_schedulers_are_those_of_both_sides() -> None:
    asked = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=2), sharding=sw.Sharding(partition="whole"))
    report = verified(asked, make_model=matrices_alone, optimizer=muon, steps=2)
    assert report.verdict == "rounding", report.text()
    assert verified(plan(pp=2), scheduler=halved, steps=3).verdict == "equal"


def test_ranks_on_devices_are_compared_as_those_of_the_host(on_fake: None) -> None:
    assert verified(plan(pp=2, clip_grad_norm=0.3), steps=2).verdict == "equal"
    assert verified(plan(stage=3, dp_shard=2), make_model=tied).verdict == "rounding"


@pytest.mark.parametrize("place", ["cpu", "fake", "arrays"])
def test_what_has_no_weight_is_computed_on_no_side_wherever_batches_are(fake: str, place: str) -> None:
    (batch,) = batches(1, 8)
    batch["targets"][2:4] = -100
    batch = {name: each.numpy() if place == "arrays" else each.to(place) for name, each in batch.items()}

    def on_rank(channel: sw.Channel) -> VerificationReport:
        return sw.verify(
            Net, plan(dp_shard=2), [batch], optimizer=sgd, loss=word_loss, loss_weight=num_targets, channel=channel
        )

    report = sw.simulate(2, on_rank, device=fake)[0]
    assert report.verdict == "rounding", report.text()
    assert compared(report, OUTPUTS) == (3 * 7, 3 * 7)


@pytest.mark.slow
def test_rows_groups_and_schedules_of_a_configuration_hold(tmp_path: Path) -> None:
    groups = "train.groups=[{parameters=['*norm*'], frozen=true}, {parameters=['lm_head'], learning_rate=0.1}]"
    schedule = ["train.schedule=polynomial", "train.decay=null", "train.warmup_steps=1"]
    config = run_of(tmp_path, "words", groups, *schedule, "mesh.pp=2", "mesh.dp_shard=2")
    assert verify_simulated(configured(config, steps=2)).verdict in ("equal", "rounding")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


def num_targets(batch: Any) -> torch.Tensor:
    counted: torch.Tensor = batch["targets"].ne(-100).sum()
    return counted


def asked(**given: Any) -> None:
    arguments = {"make_model": Net, "plan": plan(dp_shard=2), "batches": batches(1, 4), "optimizer": sgd, **given}
    model, layout, rows = (arguments.pop(name) for name in ("make_model", "plan", "batches"))
    sw.verify(model, layout, rows, loss=word_loss, **arguments)


REFUSED = Refusals(
    "verification.verifier",
    {
        "a model": lambda: asked(make_model=Net()),
        "no plan": lambda: asked(plan={"tp": 2}),
        "an optimizer": lambda: asked(optimizer=sgd(Net().parameters())),
        "one batch": lambda: asked(batches=batches(1, 4)[0]),
        "rows that are not cut evenly": lambda: asked(batches=batches(1, 6)),
        "no batches": lambda: asked(batches=[]),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_of_another_kind_are_refused_in_words(case: str) -> None:
    REFUSED.check(case)
