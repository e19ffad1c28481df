"""Folders that the real megatron-core wrote, read without it: every bit, forward, and training that goes on."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.formats.dcp import reading as dcp
from shardwise.checkpoint.stores import store_of
from shardwise.cli import main
from shardwise.errors import CheckpointError
from tests.checkpoint.formats import MEGATRON, megatron_reference, of_megatron
from tests.checkpoint.megatron.cases import (
    CASES,
    DECAY,
    ROWS,
    STEPS,
    batch_of,
)
from tests.checkpoint.megatron.hub import REWRITES, configuration
from tests.contracts.format_cases import check_tensors
from tests.refusals import Refusals

IN_BUCKETS = "llama-bf16-3-dp-reshardable"


@pytest.mark.parametrize("name", CASES)
def test_weights_masters_and_moments_have_all_their_bits(name: str) -> None:
    catalogue = checkpoint.open(MEGATRON / name)
    expected = of_megatron(MEGATRON / name)
    check_tensors(MEGATRON / name, expected, has_more=True)
    trained = {each.split("/")[1] for each in expected if each.startswith("optimizer/")}
    assert bool(trained) == (name != IN_BUCKETS and CASES[name].kind != "legacy")
    steps = {f"optimizer/{each}/step" for each in trained}
    assert catalogue.tensors.keys() - expected.keys() == steps
    assert {float(catalogue.read(each)) for each in steps} == ({float(STEPS)} if trained else set())
    one, whole = checkpoint.open(MEGATRON / name / f"iter_{STEPS:07d}").contents, catalogue.contents
    assert whole.tensors.keys() == one.tensors.keys()
    assert (whole.settings, whole.extra, whole.step) == (one.settings, one.extra, one.step)


def run(*words: object) -> tuple[int, str]:
    """What `shardwise ckpt` answers."""
    result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
    return result.exit_code, result.output


def converted(name: str, folder: Path) -> Path:
    """A folder as files of Hugging Face."""
    configuration(CASES[name].model).save_pretrained(folder / "config")
    code, shown = run(
        *("convert", MEGATRON / name, folder / "hf", "--to", "hf", "--config", folder / "config"),
        *("--rewrite", REWRITES[CASES[name].model], "--certify"),
    )
    assert code == 0, shown
    return folder / "hf"


@pytest.mark.parametrize("name", ["llama-1", "gpt-1", "mixtral-2-ep", "qwen3_moe-1"])
def test_transformers_computes_what_megatron_does_and_gives_it_back(tmp_path: Path, name: str) -> None:
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    files = converted(name, tmp_path)
    # Kernels of grouped products want rows of 16 bytes.
    experts = {"experts_implementation": "eager"} if "_moe" in CASES[name].model else {}
    model, found = loader.from_pretrained(files, output_loading_info=True, **experts)
    assert not any(found.values()), found
    with torch.no_grad():
        logits = model(batch_of(0)["input"][:2]).logits
    # The same products in another order of sums.
    torch.testing.assert_close(logits, megatron_reference(name)["logits"], rtol=1e-5, atol=1e-6)
    if "ep" in name:
        return
    code, shown = run(
        *("convert", files, tmp_path / "out", "--to", "megatron"),
        *("--rewrite", REWRITES[CASES[name].model], "--inverse"),
    )
    assert code == 0, shown
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    source, made = checkpoint.open(MEGATRON / name), checkpoint.open(tmp_path / "out")
    assert made.tensors.keys() == {each for each in source.tensors if "/" not in each}
    assert all(torch.equal(made.read(each), source.read(each)) for each in made.tensors)


def settings_in(contents: Any) -> dict[str, dict[str, Any]]:
    """The settings of the group of each parameter: experts on several ranks have one of their own."""
    (optimizer,) = contents.settings["optimizers"]
    return {name: group["settings"] for group in optimizer["groups"] for name in group["parameters"]}


@pytest.mark.parametrize("name", ["gpt-1", "qwen2-2-pp", "llama-bf16-2-tp", "mixtral-2-ep"])
def test_what_is_written_has_the_names_and_shapes_that_megatron_has_written(tmp_path: Path, name: str) -> None:
    """`megatron/load.py` loads such folders with Megatron, and goes on with the losses of the reference."""
    code, shown = run("convert", MEGATRON / name, tmp_path / "out", "--to", "megatron")
    assert code == 0, shown
    source, made = checkpoint.open(MEGATRON / name), checkpoint.open(tmp_path / "out")
    theirs = dcp.read_metadata(store_of(MEGATRON / name), f"iter_{STEPS:07d}/")
    ours = dcp.read_metadata(store_of(tmp_path / "out"), f"iter_{STEPS:07d}/")
    assert {each: ours.tensors[each].shape for each in theirs.tensors} == {
        each: tensor.shape for each, tensor in theirs.tensors.items()
    }
    assert set(theirs.objects) <= set(ours.objects)
    parameters = {each for each in source.tensors if "/" not in each}
    for each in source.tensors.keys() - {f"optimizer/{parameter}/master" for parameter in parameters}:
        # Weights are masters. Megatron makes the working copies of them.
        master = f"optimizer/{each}/master"
        assert torch.equal(made.read(each), source.read(master if master in source.tensors else each)), each
    assert made.tensors.keys() == {each for each in source.tensors if not each.endswith("/master")}
    assert settings_in(made.contents) == settings_in(source.contents)
    assert (made.step, made.contents.format) == (STEPS, "megatron")


def test_common_values_are_where_each_optimizer_of_megatron_looks_for_them(tmp_path: Path) -> None:
    checkpoint.convert(MEGATRON / "llama-1", tmp_path / "out", to="megatron")
    (path,) = (tmp_path / "out").glob("iter_*/common.pt")
    common = torch.load(path, weights_only=True)
    outer, inner = common["optimizer"], common["optimizer"]["optimizer"]
    for each in (outer, inner):
        assert each["state"] == {"common_step": torch.tensor(float(STEPS))}
        assert [group["step"] for group in each["param_groups"]] == [STEPS, STEPS]
        assert [group["wd_mult"] for group in each["param_groups"]] == [1.0, 0.0]
        assert [group["weight_decay"] for group in each["param_groups"]] == [DECAY, 0.0]
        assert [group["betas"] for group in each["param_groups"]] == [(0.9, 0.999)] * 2
    assert outer["param_state_sharding_type"] == "fully_reshardable"
    assert common["iteration"] == STEPS
    assert common["opt_param_scheduler"]["num_steps"] == STEPS * ROWS
    assert json.loads((path.parent / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


LAYER = "decoder.layers.{}.mlp.linear_fc1.weight"
EXPERT = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"


def test_layers_that_differ_stay_on_their_own(tmp_path: Path) -> None:
    weights = {LAYER.format(0): torch.randn(6, 4), LAYER.format(1): torch.randn(8, 4)}
    weights |= {EXPERT.format(2, each): torch.randn(6, 4) for each in range(2)}
    sw.save(tmp_path / "save", weights)
    checkpoint.convert(tmp_path / "save", tmp_path / "out", to="megatron")
    written = dcp.read_metadata(store_of(tmp_path / "out"), "release/")
    assert {name: each.shape for name, each in written.tensors.items()} == {
        LAYER.format(0): (6, 4),
        LAYER.format(1): (8, 4),
        "decoder.layers.2.mlp.experts.experts.linear_fc1.weight": (2, 6, 4),
    }
    assert "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_1_2" in written.objects
    check_tensors(tmp_path / "out", weights)


def written(state: dict[str, tuple[int, ...]]) -> Callable[[Path], object]:
    """A save of zeros, which becomes a folder of Megatron."""

    def call(folder: Path) -> object:
        sw.save(folder / "save", {name: torch.zeros(shape) for name, shape in state.items()})
        return checkpoint.convert(folder / "save", folder / "out", to="megatron")

    return call


def trained(rates: tuple[float, float], steps: int) -> Callable[[Path], object]:
    """A norm whose two parameters have rates of their own, and perhaps another number of updates."""

    def call(folder: Path) -> object:
        model = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"final_layernorm": torch.nn.LayerNorm(2)})})
        groups = [{"params": [each], "lr": lr} for each, lr in zip(model.parameters(), rates, strict=True)]
        optimizer = torch.optim.AdamW(groups)
        for each in model.parameters():
            each.grad = torch.ones(2)
        optimizer.step()
        next(iter(optimizer.state.values()))["step"] += steps
        sw.save(folder / "save", checkpoint.TorchState(model, optimizer))
        return checkpoint.convert(folder / "save", folder / "out", to="megatron")

    return call


def copy_of(name: str, folder: Path) -> Path:
    """A copy of one save, to be damaged; its folder."""
    shutil.copytree(MEGATRON / name, folder / name)
    return folder / name / f"iter_{STEPS:07d}"


def damaged(name: str, file: str, text: str | None) -> Callable[[Path], object]:
    """A file has another text, or is missing."""

    def call(folder: Path) -> object:
        saved = copy_of(name, folder)
        (saved / file).unlink()
        if text is not None:
            (saved / file).write_text(text)
        return checkpoint.open(saved.parent if file.startswith("../") else saved)

    return call


STAGE, OTHER = (f"mp_rank_{rank}/model_optim_rng.pt" for rank in ("01_001", "00_001"))


def legacy(*files: str, **values: Any) -> Callable[[Path], object]:
    """A folder of the older format, in whose files values are others; `model` has more tensors, or another name."""

    def call(folder: Path) -> object:
        saved = copy_of("legacy-qwen3-4-tp-pp", folder)
        for file in files:
            held = torch.load(saved / file, weights_only=False)
            more = values.get("more", {})
            model = {"model": {**held["model"], **more}} if "model" not in values else values["model"](held["model"])
            args = argparse.Namespace(**{**vars(held["args"]), **values.get("args", {})})
            torch.save(
                {**{key: each for key, each in held.items() if key != "model"}, **model, "args": args}, saved / file
            )
        if not files:
            (saved / STAGE).unlink()
        return checkpoint.open(saved)

    return call


MIXER = {"decoder.layers.0.mixer.weight": torch.zeros(2)}
REFUSED = Refusals(
    "checkpoint.megatron",
    {
        "no names of Megatron": written({"model.embed_tokens.weight": (2, 2)}),
        "state without settings": written({LAYER.format(0): (2,), f"optimizer/{LAYER.format(0)}/exp_avg": (2,)}),
        "layers that are trained in part": written(
            {LAYER.format(0): (2,), LAYER.format(1): (2,), f"optimizer/{LAYER.format(0)}/exp_avg": (2,)}
        ),
        "an expert that is missing": written({EXPERT.format(0, 0): (2,), EXPERT.format(0, 2): (2,)}),
        "groups with other settings": trained((0.1, 0.2), 0),
        "other numbers of updates": trained((0.1, 0.1), 1),
        "data": damaged("llama-1", "__0_1.distcp", None),
        "the save that is the latest": damaged("llama-1", "../latest_checkpointed_iteration.txt", "7"),
        "values of all": damaged("gpt-1", "common.pt", None),
        "another backend": damaged("qwen2-2-pp", "metadata.json", '{"sharded_backend": "zarr"}'),
        "virtual stages": legacy(STAGE, model=lambda model: {"model0": model, "model1": model}),
        "a model before megatron-core": legacy(STAGE, model=lambda model: {"model": {"language_model": {}}}),
        "a tensor of one rank": legacy(STAGE, more=MIXER),
        "a tensor that is cut in an unknown way": legacy(STAGE, OTHER, more=MIXER),
        "experts of several ranks": legacy(STAGE, args={"expert_model_parallel_size": 2}),
        "a rank that is missing": legacy(),
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_and_what_megatron_has_no_place_for_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_a_folder_without_the_name_of_its_backend_is_one_of_torch(tmp_path: Path) -> None:
    saved = copy_of("gpt-1", tmp_path)
    (saved / "common.pt").unlink()
    (saved / "metadata.json").write_text("{}")
    assert checkpoint.open(saved).contents.format == "dcp"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"param_groups": [{"wd_mult": [], "decoupled_weight_decay": [], "step": 1 << 99999}]}, ""),
        ({"param_groups": "none", "state": {"common_step": float("nan")}}, ""),
        ({0: {"optimizer": {"param_groups": [{"wd_mult": 1.0}, {"wd_mult": 1.0}]}}, 1: {}}, "no rule of Megatron"),
    ],
)
def test_common_values_that_make_no_sense_leave_the_optimizer_without_settings(
    tmp_path: Path, changed: Any, said: str
) -> None:
    saved = copy_of("llama-1", tmp_path)
    common = torch.load(saved / "common.pt", weights_only=False)
    torch.save({**common, "optimizer": changed}, saved / "common.pt")
    found = checkpoint.open(saved)
    assert any(said in note for note in found.contents.notes)
    assert torch.equal(found.read("output_layer.weight"), megatron_reference("llama-1")["output_layer.weight"])
    assert not any(each.endswith("/step") for each in found.tensors)
