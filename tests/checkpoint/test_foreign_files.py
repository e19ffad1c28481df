"""Checkpoints that other libraries wrote: the bits that torch loads, and training that goes on as in their programs."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.cli import main
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.foreign_files.small_program import LATER, batch, loss_of, make_model
from tests.checkpoint.stored_values import same_bytes

FILES = Path(__file__).parent / "foreign_files"
LOSSES: dict[str, list[float]] = json.loads((FILES / "losses.json").read_text())

OF_LIGHTNING = sw.Rewrite("net.$PART.weight -> $PART.weight\nnet.$PART.bias -> $PART.bias")

KINDS: dict[str, sw.Rewrite | None] = {
    "single/plain.pt": None,
    "single/legacy.pth": None,
    "full_state.pt": None,
    "accelerate_bin": None,
    "lightning.ckpt": OF_LIGHTNING,
    "fsdp1_dcp": None,
    "fsdp2_dcp": None,
}
"""Those with state of optimizers under the names of parameters, and the way to the names of the model."""

PLANS = {
    "sharded": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pipeline": sw.Plan(mesh=sw.Mesh(pp=2)),
}


def loaded(name: str) -> Any:
    """What torch gives for a file here, which a script of this folder wrote."""
    return torch.load(FILES / name, weights_only=False)


def numbered(state: dict[Any, Any]) -> dict[int, Any]:
    """The state of an optimizer by number; FSDP has names in their place, in the same order."""
    return dict(enumerate(state.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_with_the_losses_of_the_program_that_saved(kind: str, plan: str) -> None:
    def go_on(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            make_model(),
            PLANS[plan],
            # Another rate than that of the file, which takes its place.
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1.0),
            loss=lambda output, rows: loss_of(output, rows["y"]),
            channel=channel,
        )
        sw.load(FILES / kind, engine, rewrite=KINDS[kind])
        losses = []
        for number in LATER:
            x, y = batch(number)
            count = len(x) // PLANS[plan].mesh.dp_shard
            mine = slice(channel.rank * count, (channel.rank + 1) * count) if count < len(x) else slice(None)
            losses.append(engine.step({"input": x[mine], "y": y[mine]}).loss)
        return losses

    for losses in sw.simulate(2, go_on):
        # Two ranks add two halves of a batch, where one process adds it whole, and the processor that wrote the losses
        # may round products in another way: a few roundings apart.
        assert losses == pytest.approx(LOSSES[kind], rel=4 * 2**-23)


@pytest.mark.parametrize("name", ["single/plain.pt", "single/legacy.pth", "full_state.pt", "lightning.ckpt"])
def test_single_files_have_the_bits_that_torch_loads(name: str) -> None:
    file, catalogue = loaded(name), checkpoint.open(FILES / name)
    model = file["state_dict"] if "state_dict" in file else file["model"]
    optimizer = file["optimizer_states"][0] if "optimizer_states" in file else file["optimizer"]
    for parameter, tensor in model.items():
        assert same_bytes(catalogue.read(parameter), tensor)
    for parameter, state in zip(model, numbered(optimizer["state"]).values(), strict=True):
        for key, tensor in state.items():
            assert same_bytes(catalogue.read(f"optimizer/{parameter}/{key}"), tensor)
    rest = {each for each in catalogue.tensors if each not in model and not each.startswith("optimizer/")}
    assert rest == ({"extra/rng"} if "single" in name else set())
    # FSDP has names in the file. Numbers are those of the optimizer, and the order of the model is a guess.
    has_names = isinstance(next(iter(optimizer["state"])), str)
    assert [("is a guess" in note) for note in catalogue.contents.notes] == [True] * (not has_names)


def test_values_of_lightning_stay_values() -> None:
    catalogue = checkpoint.open(FILES / "lightning.ckpt")
    file = loaded("lightning.ckpt")
    objects = catalogue.extra["objects"]
    assert catalogue.step == file["global_step"] == 3
    assert objects["lr_schedulers"] == file["lr_schedulers"]
    assert objects["pytorch-lightning_version"] == file["pytorch-lightning_version"]
    [optimizer] = catalogue.contents.settings["optimizers"]
    assert optimizer["groups"][0]["settings"]["lr"] == file["optimizer_states"][0]["param_groups"][0]["lr"]


def test_folders_of_accelerate_have_the_bits_that_torch_loads() -> None:
    whole, optimizer = loaded("accelerate_bin/pytorch_model.bin"), loaded("accelerate_bin/optimizer.bin")
    catalogue = checkpoint.open(FILES / "accelerate_bin")
    for number, (parameter, tensor) in enumerate(whole.items()):
        assert same_bytes(catalogue.read(parameter), tensor)
        for key, value in optimizer["state"][number].items():
            assert same_bytes(catalogue.read(f"optimizer/{parameter}/{key}"), value)
    random = loaded("accelerate_bin/random_states_0.pkl")
    assert same_bytes(catalogue.read("extra/random_states_0.torch_manual_seed"), random["torch_manual_seed"])
    objects = catalogue.extra["objects"]
    assert objects["scheduler"] == loaded("accelerate_bin/scheduler.bin")
    assert objects["random_states_0"]["step"] == random["step"]
    # The state of numpy's generator is an array, and no array is made here.
    assert objects["random_states_0"]["numpy_random_seed"][1]["class"] == "numpy._core.multiarray._reconstruct"


def test_safetensors_keep_no_order_so_state_keeps_its_numbers() -> None:
    folder = FILES / "accelerate_safetensors"
    catalogue = checkpoint.open(folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert same_bytes(catalogue.read(name), tensor)
    state = loaded("accelerate_safetensors/optimizer.bin")["state"]
    for number, entries in state.items():
        for key, value in entries.items():
            assert same_bytes(catalogue.read(f"optimizer/{number}/{key}"), value)
    [note] = catalogue.contents.notes
    assert "safetensors files do not keep the order of the model" in note
    shown = CliRunner().invoke(main, ["ckpt", "ls", str(folder)])
    assert note in shown.output
    weights = make_model().state_dict()
    sw.load(folder, weights, channel=alone())  # weights alone leave the state where it is
    assert torch.equal(weights["0.weight"], catalogue.read("0.weight"))


@pytest.mark.parametrize("name", ["fsdp1_dcp", "fsdp2_dcp", "flattened_dcp"])
def test_cut_state_of_fsdp_has_the_bits_of_the_whole(name: str) -> None:
    full, catalogue = loaded("full_state.pt"), checkpoint.open(FILES / name)
    for parameter, tensor in full["model"].items():
        assert len(catalogue.tensors[parameter].pieces) == 2
        assert same_bytes(catalogue.read(parameter), tensor)
    # Without a dict around the optimizer nothing says that these tensors are one.
    form = "state.{}.{}" if name == "flattened_dcp" else "optimizer/{}/{}"
    for parameter, state in full["optimizer"]["state"].items():
        for key, tensor in state.items():
            assert same_bytes(catalogue.read(form.format(parameter, key)), tensor)


def test_shards_with_an_index_are_one_model(tmp_path: Path) -> None:
    state = loaded("accelerate_bin/pytorch_model.bin")
    names = list(state)
    files = {"pytorch_model-00001-of-00002.bin": names[:2], "pytorch_model-00002-of-00002.bin": names[2:]}
    for file, held in files.items():
        torch.save({name: state[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"model_type": "small"}')
    catalogue = checkpoint.open(tmp_path)
    assert list(catalogue.tensors) == names
    assert all(same_bytes(catalogue.read(name), state[name]) for name in names)
    checkpoint.convert(tmp_path, tmp_path / "out", to="hf")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bytes(written[name], state[name]) for name in names)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "small"
    index.write_text(json.dumps({"weight_map": {**weight_map, names[0]: "pytorch_model-00002-of-00002.bin"}}))
    with pytest.raises(CheckpointError, match=f"the index says that tensor {names[0]} is in"):
        checkpoint.open(tmp_path)


def test_what_a_trainer_saved_is_one_checkpoint(tmp_path: Path) -> None:
    """The names of files of the trainer of transformers, with groups for decay and for none."""
    model = make_model()
    decay = [each for name, each in model.named_parameters() if "weight" in name]
    others = [each for name, each in model.named_parameters() if "weight" not in name]
    groups: list[dict[str, Any]] = [{"params": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7, "log_history": []}')
    catalogue = checkpoint.open(tmp_path)
    assert catalogue.step == 7
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert same_bytes(catalogue.read(f"optimizer/{name}/{key}"), value)
    decays = [group["settings"]["weight_decay"] for group in catalogue.contents.settings["optimizers"][0]["groups"]]
    assert decays == [0.01, 0.0]


def test_names_that_a_file_says_go_before_numbers(tmp_path: Path) -> None:
    model = make_model()
    # In another order than that of the model, which no shapes could tell.
    named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    optimizer = torch.optim.AdamW(named[::-1])
    loss_of(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    for name, parameter in model.named_parameters():
        assert same_bytes(catalogue.read(f"optimizer/{name}/exp_avg"), optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("why", ["several ways", "do not fit", "neither a tensor nor a number"])
def test_what_is_not_proven_keeps_its_number(tmp_path: Path, why: str) -> None:
    state: dict[str, torch.Tensor] = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(2)}
    shapes = {"several ways": [3, 2], "do not fit": [2, 3], "neither a tensor nor a number": [3, 3, 2]}[why]
    step: Any = b"1" if why == "neither a tensor nor a number" else torch.tensor(1.0)
    entries = {number: {"step": step, "exp_avg": torch.full((size,), number)} for number, size in enumerate(shapes)}
    optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": list(entries)}]}
    torch.save({"model": state, "optimizer": optimizer}, tmp_path / "x.pt")
    catalogue = checkpoint.open(tmp_path / "x.pt")
    assert catalogue.read("optimizer/1/exp_avg").tolist() == [1] * shapes[1]
    [note] = catalogue.contents.notes
    assert why in note
    with pytest.raises(CheckpointError, match="optimizer/1/exp_avg: unexpected"):
        sw.load(tmp_path / "x.pt", {**state, "optimizer/a/exp_avg": torch.zeros(3)}, channel=alone())


def test_commands_take_them(tmp_path: Path) -> None:
    run = CliRunner().invoke
    file = str(FILES / "single" / "plain.pt")
    assert "0.weight" in run(main, ["ckpt", "ls", file]).output
    assert run(main, ["ckpt", "convert", file, str(tmp_path / "saved")]).exit_code == 0
    assert run(main, ["ckpt", "verify", str(tmp_path / "saved")]).exit_code == 0
    assert run(main, ["ckpt", "diff", file, str(tmp_path / "saved")]).exit_code == 0
    verified = run(main, ["ckpt", "verify", file])
    assert (verified.exit_code, "is as it was written" in verified.output) == (0, True)
    assert checkpoint.open(tmp_path / "saved").extra["objects"]["step"] == 3


def test_numbers_of_gguf_have_their_values_and_quantised_ones_are_named(tmp_path: Path) -> None:
    catalogue = checkpoint.open(FILES / "small.gguf")
    expected = torch.arange(12).view(3, 4)
    assert len(catalogue.tensors) == 8
    for name in catalogue.tensors:
        assert same_bytes(catalogue.read(name), expected.to(getattr(torch, name)))
    assert catalogue.extra["metadata"]["general.name"] == "small"
    data = (FILES / "small.gguf").read_bytes()
    at = data.index(b"float16") + len("float16") + 4 + 16
    (tmp_path / "q.gguf").write_bytes(data[:at] + struct.pack("<I", 12) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"1 of its 8 tensors are quantised \(Q4_K\): float16.*llama-quantize"):
        checkpoint.open(tmp_path / "q.gguf")


def test_damaged_gguf_files_are_refused_or_change_values_alone(tmp_path: Path) -> None:
    data = (FILES / "small.gguf").read_bytes()
    file = tmp_path / "x.gguf"
    refused = 0
    for at in range(0, len(data), 3):
        for changed in (data[:at], data[:at] + b"\xff" + data[at + 1 :]):
            file.write_bytes(changed)
            try:
                catalogue = checkpoint.open(file)
            except CheckpointError:
                refused += 1
            else:
                assert sum(each.num_bytes for each in catalogue.tensors.values()) <= len(data)
    assert refused > 300


def test_several_optimizers_next_to_a_model_are_refused(tmp_path: Path) -> None:
    shutil.copytree(FILES / "accelerate_bin", tmp_path / "x")
    shutil.copy(FILES / "accelerate_bin" / "optimizer.bin", tmp_path / "x" / "optimizer_1.bin")
    with pytest.raises(CheckpointError, match=r"2 optimizers.* name a file of the model"):
        checkpoint.open(tmp_path / "x")
    assert "0.weight" in checkpoint.open(tmp_path / "x" / "pytorch_model.bin").tensors


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("numbered", [False, True])
def test_two_models_in_one_folder_do_not_become_one(tmp_path: Path, ending: str, numbered: bool) -> None:
    stem, other = ("model", "model_1") if ending == "safetensors" else ("pytorch_model", "pytorch_model_1")
    part = "-00001-of-00001" if numbered else ""
    write: Any = save_file if ending == "safetensors" else torch.save
    write({"w": torch.ones(2)}, tmp_path / f"{stem}{part}.{ending}")
    write({"v": torch.ones(2)}, tmp_path / f"{other}{part}.{ending}")
    with pytest.raises(CheckpointError, match=r"_1.*name (the file of one|one file)"):
        checkpoint.open(tmp_path)
    assert list(checkpoint.open(tmp_path / f"{other}{part}.{ending}").tensors) == ["v"]


def test_files_of_any_names_are_one_model_and_a_note_says_so(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "draft.safetensors")
    save_file({"v": torch.ones(2)}, tmp_path / "target.safetensors")
    assert ["read as one model" in note for note in checkpoint.open(tmp_path).contents.notes] == [True]


def test_scales_next_to_words_of_codes_keep_their_dtype(tmp_path: Path) -> None:
    model = {
        "up.qweight": torch.ones(4, 2, dtype=torch.int32),
        "up.scales": torch.full((1, 2), 1 / 3),
        "norm.weight": torch.ones(2),
        "window.index": torch.zeros(3, 3, dtype=torch.int64),
        "window.table": torch.ones(3, 2),
    }
    save_file(model, tmp_path / "model.safetensors")
    report = checkpoint.convert(tmp_path / "model.safetensors", tmp_path / "out", to="hf", dtype="bfloat16")
    assert report.uncast == ("up.scales",)
    written = checkpoint.open(tmp_path / "out")
    assert torch.equal(written.read("up.scales"), model["up.scales"])
    assert written.read("window.table").dtype == torch.bfloat16
