"""Folders that the real DeepSpeed wrote, read without it: every bit, and training that goes on as there.

`deepspeed/write.py` wrote them, with the values of the live engines beside them.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.foreign.deepspeed_settings import loss_scale_of, optimizer_settings
from shardwise.cli import main
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.deepspeed.model import MORE_STEPS, STEPS, batch_of, groups_of, loss_of, words_model

FOLDERS = Path(__file__).with_name("deepspeed") / "folders"
NAMES = sorted(each.name for each in FOLDERS.iterdir() if each.is_dir())
SAME = {
    "z2-bf16-2-round-robin": "z2-bf16-2",
    "universal-z3-bf16-3": "z3-bf16-3",
    "universal-z2-bf16-4": "z2-bf16-4",
}
"""Folders with the values of others: the order in vectors changes no bit, and neither does DeepSpeed's converter."""
TP = "z1-bf16-4-tp"

Tensors = dict[str, torch.Tensor]


def reference_of(name: str) -> tuple[Tensors, list[float]]:
    """What the live engine had at the save, and its next losses."""
    tensors = safetensors.torch.load_file(FOLDERS / f"{SAME.get(name, name)}.safetensors")
    return tensors, tensors.pop("losses").tolist()


def in_full_precision(catalogue: checkpoint.Catalogue, name: str) -> torch.Tensor:
    """A parameter as its optimizer has it."""
    stored = catalogue.contents.aliases.get(name, name)
    master = f"optimizer/{stored}/master"
    return catalogue.read(master if master in catalogue.tensors else stored)


@pytest.mark.parametrize("name", NAMES)
def test_weights_masters_and_moments_have_all_their_bits(name: str) -> None:
    catalogue = checkpoint.open(FOLDERS / name)
    expected, _ = reference_of(name)
    for each, tensor in expected.items():
        parameter, _, key = each.partition("/")
        read = catalogue.read(f"optimizer/{parameter}/{key}") if key else in_full_precision(catalogue, parameter)
        assert read.dtype == tensor.dtype, each
        assert torch.equal(read, tensor), each
    # All that is there is compared: what has no place in the reference is a copy in another dtype, or a count.
    parameters = {each.partition("/")[0] for each in expected}
    for each in catalogue.tensors:
        if each in parameters:
            stored = catalogue.read(each)
            assert torch.equal(stored, in_full_precision(catalogue, each).to(stored.dtype)), each
        else:
            owner, key = each.removeprefix("optimizer/").rsplit("/", 1)
            assert owner in parameters
            assert key in ("master", "step", "exp_avg", "exp_avg_sq")
    # Without ZeRO, the optimizer for 16 bits makes its state by an update with gradients of 0.
    made = 1 if name.startswith("z0") and "fp32" not in name else 0
    steps = {float(catalogue.read(each)) for each in catalogue.tensors if each.endswith("/step")}
    assert steps == {STEPS + made}
    assert (catalogue.step, catalogue.contents.format) == (STEPS, "deepspeed")
    # Without ZeRO parameters have numbers, and the order of the model is a guess.
    assert bool(catalogue.contents.notes) == (name == TP or name.startswith("z0"))


@pytest.mark.parametrize("name", ["z0-fp32-1", "z2-bf16-4", "z3-bf16-3", "z1-bf16-4-pipe", "universal-z3-bf16-3"])
def test_the_folder_of_one_save_is_read_by_its_name(name: str) -> None:
    whole = checkpoint.open(FOLDERS / name).contents
    one = checkpoint.open(next(each for each in (FOLDERS / name).iterdir() if each.is_dir())).contents
    assert whole.tensors.keys() == one.tensors.keys()
    assert (whole.settings, whole.extra, whole.aliases) == (one.settings, one.extra, one.aliases)


def test_the_values_of_a_save_are_its_extra_and_its_settings() -> None:
    found = checkpoint.open(FOLDERS / "z1-fp16-3")
    values = found.extra["objects"]
    assert values["lr_scheduler"] == {"last_batch_iteration": 2}
    assert (values["global_steps"], values["global_samples"], values["skipped_steps"]) == (3, 36, 0)
    assert values["ds_config"]["zero_optimization"] == {"stage": 1}
    assert found.contents.settings["loss_scale"]["scale"] == 256.0
    groups = checkpoint.open(FOLDERS / "z3-fp32-4").contents.settings["optimizers"][0]["groups"]
    assert [each["settings"]["weight_decay"] for each in groups] == [0.1, 0.0]


PLANS = {
    "one rank": sw.Plan(),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"layers.*.up": "column", "layers.*.down": "row"})),
}
COMPUTE = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.filterwarnings("ignore::shardwise.errors.UnderflowWarning")
@pytest.mark.parametrize(
    ("name", "layout", "has"),
    [
        ("z0-fp32-1", "stage 3", ""),
        ("z1-fp32-1", "pp", "tied groups"),
        ("z2-fp32-2", "one rank", ""),
        ("z3-fp32-4", "tp", "tied frozen groups"),
        ("z0-bf16-2", "one rank", "frozen"),
        ("z1-bf16-2-fp32-sums", "stage 3", "frozen groups"),
        ("z1-fp16-3", "stage 3", "tied frozen"),
        ("z2-bf16-4", "pp", "tied frozen groups"),
        ("z3-bf16-2", "one rank", "frozen"),
        ("universal-z3-bf16-3", "one rank", "frozen groups"),
    ],
)
def test_training_goes_on_with_the_losses_of_deepspeed(name: str, layout: str, has: str) -> None:
    dtype = next(each for each in name.split("-") if each in COMPUTE)
    plan = replace(PLANS[layout], precision=sw.Precision(compute=COMPUTE[dtype]))

    def go_on(channel: sw.Channel) -> list[float]:
        model = words_model(tied="tied" in has, frozen="frozen" in has, seed=5)

        def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
            given = groups_of(model) if "groups" in has else [each for each in parameters if each.requires_grad]
            return torch.optim.AdamW(given, lr=0.5, weight_decay=0.7)  # of the save are others

        engine = sw.parallelize(model, plan, optimizer=adamw, loss=loss_of, channel=channel)
        # What is frozen was saved in 16 bits, and is kept in 32 here.
        report = sw.load(FOLDERS / name, engine, cast=dtype != "fp32", channel=channel).report
        assert all("frozen" in each for each in report.casts)
        assert report.step == STEPS
        ranks = plan.mesh.dp_shard
        return [
            engine.step({key: each.chunk(ranks)[channel.rank % ranks] for key, each in batch_of(step).items()}).loss
            for step in range(STEPS, STEPS + MORE_STEPS)
        ]

    _, expected = reference_of(name)
    losses = torch.tensor(sw.simulate(plan.mesh.size, go_on)[0], dtype=torch.float64)
    # In float32 a difference is in the order of sums. In 16 bits DeepSpeed rounds sums of gradients, and under stage 3
    # a product before its bias is added.
    tolerance = 1e-6 if dtype == "fp32" else 1e-3
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=0)
    if (name, layout) == ("z2-fp32-2", "one rank"):
        assert losses.tolist() == expected


def copy_of(name: str, folder: Path) -> Path:
    """A copy of one save, to be damaged; its folder."""
    shutil.copytree(FOLDERS / name, folder / name)
    return folder / name / "global_step3"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open(path)
    return str(caught.value)


OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def test_what_is_missing_or_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    saved = copy_of("z2-bf16-4", tmp_path)
    (saved / OPTIM.format(2)).unlink()
    assert "4 data ranks wrote the optimizer of mp_rank_00, but the files of rank 2 are missing" in refusal(saved)
    (saved / "mp_rank_00_model_states.pt").unlink()
    assert "parts of the optimizer of mp_rank_00, and no file of its model" in refusal(saved)
    (tmp_path / "z2-bf16-4" / "latest").write_text("global_step7")
    assert "latest names the save 'global_step7', which is not there" in refusal(tmp_path / "z2-bf16-4")

    saved = copy_of("z3-bf16-3", tmp_path)
    for rank in range(3):
        shutil.copy(FOLDERS / "z3-bf16-2" / "global_step3" / OPTIM.format(rank % 2), saved / OPTIM.format(rank))
    assert "2 data ranks wrote the optimizer of mp_rank_00, but it has 3" in refusal(saved)
    (saved / OPTIM.format(2)).unlink()
    assert "another number of groups than the model" in refusal(saved)

    saved = copy_of("z2-fp32-2", tmp_path)
    part = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = (saved / part).read_bytes()
    (saved / part).write_bytes(data[: len(data) // 2])
    assert f"{saved}/{part}" in refusal(saved)


def test_weights_that_are_in_no_file_are_refused(tmp_path: Path) -> None:
    saved = copy_of("z3-bf16-3", tmp_path)
    for rank in range(3):
        (saved / OPTIM.format(rank)).unlink()
    assert "weights of mp_rank_00 in files of the optimizer (*_optim_states.pt), and none is there" in refusal(saved)
    saved = copy_of("universal-z2-bf16-4", tmp_path).with_name("global_step3_universal")
    (saved / "zero" / "layers.0.up.bias" / "exp_avg.pt").unlink()
    shutil.rmtree(saved / "zero" / "layers.1.up.weight")
    missing = {line.partition(": ")[2].partition(";")[0] for line in refusal(saved).splitlines()[1:]}
    assert missing == {f"zero/layers.{each}.pt is missing" for each in ("0.up.bias/exp_avg", "1.up.weight/fp32")}


def test_parts_of_different_saves_are_refused(tmp_path: Path) -> None:
    saved = copy_of("z2-bf16-2", tmp_path)
    part = saved / OPTIM.format(1)
    assert checkpoint.open(saved).step == STEPS
    # The count of updates of this rank, 3.0, becomes 4.0 in the file.
    data = part.read_bytes()
    part.write_bytes(data.replace(b"\x00\x00@@", b"\x00\x00\x80@"))
    assert "parts are of different saves" in refusal(saved)


def test_kinds_of_saves_that_are_not_read_are_named(tmp_path: Path) -> None:
    experts = copy_of("z1-fp32-1", tmp_path)
    (experts / "layer_0_expert_1_mp_rank_00_model_states.pt").write_bytes(b"")
    assert "experts of DeepSpeed-MoE, which are not read yet" in refusal(experts)
    swapped = copy_of("z2-fp32-2", tmp_path)
    (swapped / "offloaded_tensors" / "rank00").mkdir(parents=True)
    (swapped / "offloaded_tensors" / "rank00" / "0.swp").write_bytes(b"")
    assert "NVMe swap files" in refusal(swapped)


def test_tensor_parallel_ranks_are_joined_by_a_rewrite() -> None:
    rewrite = sw.Rewrite(["tp0.embed.weight, tp1.embed.weight -> embed.weight, axis=0"])
    target = {"embed.weight": torch.zeros(22, 6)}
    sw.load(FOLDERS / TP, target, rewrite=rewrite, strict=False, channel=alone())
    expected, _ = reference_of(TP)
    assert torch.equal(target["embed.weight"], torch.cat([expected[f"tp{rank}.embed.weight"] for rank in range(2)]))


def test_commands_take_a_folder(tmp_path: Path) -> None:
    def run(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
        return result.exit_code, result.output

    code, shown = run("ls", FOLDERS / "z3-bf16-3")
    assert code == 0
    assert "deepspeed, step 3" in shown
    code, shown = run("diff", FOLDERS / "z2-bf16-2", FOLDERS / "z2-bf16-2-round-robin", "--model-only")
    assert (code, "same" in shown or "equal" in shown) == (0, True), shown
    code, shown = run("convert", FOLDERS / "z3-bf16-3", tmp_path / "hf", "--to", "hf")
    assert code == 0, shown
    expected, _ = reference_of("z3-bf16-3")
    written = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    weights = {name: tensor for name, tensor in expected.items() if "/" not in name}
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    code, shown = run("convert", FOLDERS / "z2-bf16-4", tmp_path / "saves")
    assert code == 0, shown
    code, shown = run("diff", FOLDERS / "z2-bf16-4", tmp_path / "saves")
    assert code == 0, shown
    code, shown = run("verify", FOLDERS / "z2-bf16-4")
    assert (code, "is as it was written" in shown) == (0, True)


def test_optimizers_that_count_in_python_numbers_give_their_steps(tmp_path: Path) -> None:
    """As FusedAdam and DeepSpeedCPUAdam do: their files have no tensor for the count of updates."""
    weight = torch.arange(6.0).view(2, 3)
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2, "bias_correction": True, "params": [0]}
    state = {"step": 7, "exp_avg": torch.ones(6), "exp_avg_sq": torch.full((6,), 2.0)}
    parts = {
        "base_optimizer_state": {"state": {0: state}, "param_groups": [group]},
        "single_partition_of_fp32_groups": [weight.flatten()],
        **{"partition_count": [1], "param_alignment_paddings": [[0]]},
    }
    model = {"module": {"w": weight}, "buffer_names": [], "param_shapes": [{"w": weight.shape}], "global_steps": 7}
    torch.save(model, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": parts}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    found = checkpoint.open(tmp_path)
    assert found.read("optimizer/w/step").item() == 7
    linear = torch.nn.Linear(3, 2, bias=False)
    named = torch.nn.ParameterDict({"w": linear.weight})
    adamw = torch.optim.AdamW(named.parameters(), lr=0.5)
    sw.load(tmp_path, checkpoint.TorchState(named, adamw), channel=alone())
    assert torch.equal(linear.weight, weight)
    held = adamw.state[linear.weight]
    assert (held["step"].item(), held["step"].dtype) == (7, torch.float32)
    assert torch.equal(held["exp_avg_sq"], torch.full((2, 3), 2.0))
    assert (adamw.param_groups[0]["lr"], adamw.param_groups[0]["weight_decay"]) == (0.1, 0.2)
    # The value goes to other ranks, and into saves, as any tensor does.
    assert sw.simulate(2, lambda channel: read_step(tmp_path, channel)) == [7.0, 7.0]
    checkpoint.convert(tmp_path, tmp_path / "saves")
    assert checkpoint.open(tmp_path / "saves").read("optimizer/w/step").item() == 7


def read_step(path: Path, channel: sw.Channel) -> float:
    target = {"w": torch.zeros(2, 3), "optimizer/w/step": torch.zeros(())}
    sw.load(path, target, strict=False, channel=channel)
    return target["optimizer/w/step"].item()


def test_the_kind_of_the_optimizer_follows_from_groups_and_configuration() -> None:
    own = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True, "params": [0]}

    def kind(group: dict[str, object], optimizer: object = None) -> str:
        found: str = optimizer_settings([group], [["w"]], {"optimizer": optimizer})["kind"]
        return found

    assert kind(own) == "AdamW"
    assert kind(own, {"type": "Adam", "params": {}}) == "AdamW"
    assert kind(own, {"type": "Adam", "params": {"adam_w_mode": False}}) == "Adam"
    assert kind({**own, "bias_correction": False}) == ""
    older = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "params": [0]}
    assert kind(older) == ""
    assert kind({**older, "weight_decay": 0.0}) == kind(older, {"type": "AdamW"}) == "AdamW"
    assert kind({**older, "decoupled_weight_decay": False}) == "Adam"
    assert kind({"lr": 0.1, "momentum": 0.9, "params": [0]}) == ""
    settings = optimizer_settings([own], [["w"]], {})["groups"][0]["settings"]
    assert settings.keys() == {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"}
    state = {"cur_scale": 64.0, "cur_iter": 12, "last_overflow_iter": 4, "scale_window": 5, "dynamic_loss_scale": True}
    assert loss_scale_of(state) == {"loss_scale": {"scale": 64.0, "in_a_row": 2}}
    assert loss_scale_of({"cur_scale": 64.0, "dynamic_loss_scale": False}) == {}
