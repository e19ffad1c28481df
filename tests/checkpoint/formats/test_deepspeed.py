"""Folders that the real DeepSpeed wrote, read without it: every bit, and training that goes on as there."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.formats.deepspeed.universal import loss_scale_of
from shardwise.checkpoint.formats.optimizer_settings import optimizer_settings
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.deepspeed.model import STEPS
from tests.checkpoint.formats.known_formats import DEEPSPEED, of_deepspeed
from tests.contracts.format_cases import check_tensors
from tests.refusals import Refusals

NAMES = sorted(each.name for each in DEEPSPEED.iterdir() if each.is_dir())
TP = "z1-bf16-4-tp"


@pytest.mark.parametrize("name", NAMES)
def test_weights_masters_and_moments_have_all_their_bits(name: str) -> None:
    catalogue = checkpoint.open(DEEPSPEED / name)
    expected = of_deepspeed(DEEPSPEED / name)
    check_tensors(DEEPSPEED / name, expected, has_more=True)
    # What has no place in the reference is a copy in another dtype, or a count.
    for each in catalogue.tensors.keys() - expected.keys() - {f"optimizer/{name}/step" for name in catalogue.tensors}:
        stored = catalogue.read(each)
        assert torch.equal(stored, expected[f"optimizer/{each}/master"].to(stored.dtype)), each
    # Without ZeRO, the optimizer for 16 bits makes its state by an update with gradients of 0.
    made = 1 if name.startswith("z0") and "fp32" not in name else 0
    steps = {float(catalogue.read(each)) for each in catalogue.tensors if each.endswith("/step")}
    assert (steps, catalogue.step) == ({STEPS + made}, STEPS)
    # Without ZeRO parameters have numbers, and the order of the model is a guess.
    assert bool(catalogue.contents.notes) == (name == TP or name.startswith("z0"))
    one = checkpoint.open(next(each for each in (DEEPSPEED / name).iterdir() if each.is_dir())).contents
    whole = catalogue.contents
    assert (whole.settings, whole.extra, whole.aliases) == (one.settings, one.extra, one.aliases)
    assert whole.tensors.keys() == one.tensors.keys()


def test_the_values_of_a_save_are_its_extra_and_its_settings() -> None:
    found = checkpoint.open(DEEPSPEED / "z1-fp16-3")
    values = found.extra["objects"]
    assert values["lr_scheduler"] == {"last_batch_iteration": 2}
    assert (values["global_steps"], values["global_samples"], values["skipped_steps"]) == (3, 36, 0)
    assert values["ds_config"]["zero_optimization"] == {"stage": 1}
    assert found.contents.settings["loss_scale"]["scale"] == 256.0
    groups = checkpoint.open(DEEPSPEED / "z3-fp32-4").contents.settings["optimizers"][0]["groups"]
    assert [each["settings"]["weight_decay"] for each in groups] == [0.1, 0.0]


OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def damaged(name: str, *changes: Callable[[Path], object], opens: str = "global_step3") -> Callable[[Path], object]:
    """A copy of one save, with changes in it."""

    def call(folder: Path) -> object:
        shutil.copytree(DEEPSPEED / name, folder / name)
        (saved,) = (each for each in (folder / name).iterdir() if each.is_dir())
        for change in changes:
            change(saved)
        return checkpoint.open(saved if opens else folder / name)

    return call


def without(*patterns: str) -> Callable[[Path], object]:
    def remove(saved: Path) -> None:
        for each in [file for pattern in patterns for file in saved.glob(pattern)]:
            each.unlink()

    return remove


def writing(name: str, data: bytes = b"") -> Callable[[Path], object]:
    def write(saved: Path) -> None:
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_bytes(data)

    return write


def of_another(saved: Path) -> None:
    for rank in range(3):
        shutil.copy(DEEPSPEED / "z3-bf16-2" / "global_step3" / OPTIM.format(rank % 2), saved / OPTIM.format(rank))


def another_step(saved: Path) -> None:
    """The count of updates of this rank, 3.0, becomes 4.0 in the file."""
    part = saved / OPTIM.format(1)
    part.write_bytes(part.read_bytes().replace(b"\x00\x00@@", b"\x00\x00\x80@"))


REFUSED = Refusals(
    "checkpoint.deepspeed",
    {
        "the part of a rank": damaged("z2-bf16-4", without(OPTIM.format(2))),
        "the file of the model": damaged("z2-bf16-4", without("mp_rank_00_model_states.pt")),
        "a latest that is not there": damaged("z2-bf16-4", writing("../latest", b"global_step7"), opens=""),
        "parts for other numbers of ranks": damaged("z3-bf16-3", of_another),
        "parts with other groups": damaged("z3-bf16-3", of_another, without(OPTIM.format(2))),
        "weights that are in no file": damaged("z3-bf16-3", without("*_optim_states.pt")),
        "parts of a universal one": damaged(
            "universal-z2-bf16-4", without("zero/layers.0.up.bias/exp_avg.pt", "zero/layers.1.up.weight/*")
        ),
        "parts of different saves": damaged("z2-bf16-2", another_step),
        "experts": damaged("z1-fp32-1", writing("layer_0_expert_1_mp_rank_00_model_states.pt")),
        "a layer of a pipeline": damaged("z1-bf16-4-pipe", without("layer_01*")),
        "all layers of a pipeline": damaged("z1-fp32-2-pipe", without("layer_*")),
        "swapped to disks": damaged("z2-fp32-2", writing("offloaded_tensors/rank00/0.swp")),
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_does_not_belong_together_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_a_layer_of_which_nothing_tells_is_noted_where_its_file_is_missing(tmp_path: Path) -> None:
    """ZeRO names what is trained, and this layer of the pipeline is not."""
    shutil.copytree(DEEPSPEED / "z1-bf16-4-pipe", tmp_path / "save")
    without("layer_02*")(tmp_path / "save" / "global_step3")
    (note,) = checkpoint.open(tmp_path / "save").contents.notes
    assert note.startswith("no file is of layer 2: functions have none")


GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2, "bias_correction": True, "params": [0]}


def write_small(folder: Path, weights: dict[str, torch.Tensor], vector: torch.Tensor, gaps: list[int]) -> None:
    """A save of one rank. Its optimizer counts in Python's numbers, as FusedAdam and DeepSpeedCPUAdam do."""
    state = {"step": 7, "exp_avg": vector + 1, "exp_avg_sq": torch.full_like(vector, 2.0)}
    parts = {
        "base_optimizer_state": {"state": {0: state}, "param_groups": [GROUP]},
        "single_partition_of_fp32_groups": [vector],
        **{"partition_count": [1], "param_alignment_paddings": [gaps]},
    }
    shapes = [{name: each.shape for name, each in weights.items()}]
    model = {"module": weights, "buffer_names": [], "param_shapes": shapes, "global_steps": 7}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": parts}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_optimizers_that_count_in_python_numbers_give_their_steps(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    write_small(tmp_path, {"w": weight}, weight.flatten(), [0])
    linear = torch.nn.Linear(3, 2, bias=False)
    named = torch.nn.ParameterDict({"w": linear.weight})
    adamw = torch.optim.AdamW(named.parameters(), lr=0.5)
    sw.load(tmp_path, checkpoint.TorchState(named, adamw), channel=alone())
    assert torch.equal(linear.weight, weight)
    held = adamw.state[linear.weight]
    assert (held["step"].item(), held["step"].dtype) == (7, torch.float32)
    assert torch.equal(held["exp_avg_sq"], torch.full((2, 3), 2.0))
    assert (adamw.param_groups[0]["lr"], adamw.param_groups[0]["weight_decay"]) == (0.1, 0.2)

    def read_step(channel: sw.Channel) -> float:
        target = {"w": torch.zeros(2, 3), "optimizer/w/step": torch.zeros(())}
        sw.load(tmp_path, target, strict=False, channel=channel)
        return target["optimizer/w/step"].item()

    # The value goes to other ranks, and into saves, as any tensor does.
    assert sw.simulate(2, read_step) == [7.0, 7.0]
    checkpoint.convert(tmp_path, tmp_path / "saves")
    assert checkpoint.open(tmp_path / "saves").read("optimizer/w/step").item() == 7


def test_parameters_may_have_padding_behind_them(tmp_path: Path) -> None:
    """As DeepSpeed says it where it aligns them."""
    weights = {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor([7.0, 8.0, 9.0])}
    write_small(tmp_path, weights, torch.cat([weights["w"].flatten(), torch.zeros(2), weights["b"]]), [2, 0])
    moments = {f"optimizer/{name}/exp_avg": each + 1 for name, each in weights.items()}
    check_tensors(tmp_path, weights | moments, has_more=True)


def test_the_kind_of_the_optimizer_follows_from_groups_and_configuration() -> None:
    def kind(group: dict[str, object], optimizer: object = None) -> str:
        found: str = optimizer_settings([group], [["w"]], {"optimizer": optimizer})["kind"]
        return found

    assert kind(GROUP) == "AdamW"
    assert kind(GROUP, {"type": "Adam", "params": {}}) == "AdamW"
    assert kind(GROUP, {"type": "Adam", "params": {"adam_w_mode": False}}) == "Adam"
    assert kind({**GROUP, "bias_correction": False}) == ""
    older = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "params": [0]}
    assert kind(older) == ""
    assert kind({**older, "weight_decay": 0.0}) == kind(older, {"type": "AdamW"}) == "AdamW"
    assert kind({**older, "decoupled_weight_decay": False}) == "Adam"
    assert kind({"lr": 0.1, "momentum": 0.9, "params": [0]}) == ""
    settings = optimizer_settings([GROUP], [["w"]], {})["groups"][0]["settings"]
    assert settings.keys() == {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"}
    state = {"cur_scale": 64.0, "cur_iter": 12, "last_overflow_iter": 4, "scale_window": 5, "dynamic_loss_scale": True}
    assert loss_scale_of(state) == {"loss_scale": {"scale": 64.0, "in_a_row": 2}}
    assert loss_scale_of({"cur_scale": 64.0, "dynamic_loss_scale": False}) == {}
