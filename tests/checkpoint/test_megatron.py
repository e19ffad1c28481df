"""Folders that the real megatron-core wrote, read without it: every bit, forward, and training that goes on as there.

`megatron/write.py` wrote them, and beside them what Megatron's own loader makes of them in one process.
"""

import argparse
import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import dcp_folders
from shardwise.checkpoint.foreign import dcp
from shardwise.checkpoint.stores import store_of
from shardwise.cli import main
from shardwise.errors import CheckpointError
from shardwise.rewrite import shipped
from tests.checkpoint.megatron.cases import (
    CASES,
    DECAY,
    LR,
    MODELS,
    MORE_STEPS,
    PADDED,
    ROWS,
    STEPS,
    VOCABULARY,
    batch_of,
)
from tests.checkpoint.megatron.folders import folders
from tests.properties import tried

FOLDERS = folders()
IN_BUCKETS = "llama-bf16-3-dp-reshardable"

Tensors = dict[str, torch.Tensor]


def reference_of(name: str) -> Tensors:
    """What Megatron's loader gives, by the names of the state dict that a model of its local layers has."""
    return safetensors.torch.load_file(FOLDERS / f"{name}.safetensors")


def in_files(name: str, found: Iterable[str]) -> str:
    """The name in a file of a value of the reference: there a norm before a linear layer has the layer's name."""
    parameter, _, key = name.partition("/")
    parameter = re.sub(r"(layers\.\d+\.)input_layernorm\.", r"\1self_attention.linear_qkv.layer_norm_", parameter)
    dense = re.sub(r"(layers\.\d+\.)pre_mlp_layernorm\.", r"\1mlp.linear_fc1.layer_norm_", parameter)
    parameter = dense if dense in found else parameter
    return f"optimizer/{parameter}/{key}" if key else parameter


@pytest.mark.parametrize("name", CASES)
def test_weights_masters_and_moments_have_all_their_bits(name: str) -> None:
    catalogue = checkpoint.open(FOLDERS / name)
    expected = reference_of(name)
    del expected["logits"], expected["losses"]
    if name == IN_BUCKETS or CASES[name].kind == "legacy":
        expected = {each: tensor for each, tensor in expected.items() if "/" not in each}
    named = {in_files(each, catalogue.tensors): tensor for each, tensor in expected.items()}
    steps = {each for each in catalogue.tensors if each.endswith("/step")}
    assert catalogue.tensors.keys() - steps == named.keys()
    for each, tensor in named.items():
        read = catalogue.read(each)
        assert read.dtype == tensor.dtype, each
        assert torch.equal(read, tensor), each
    trained = {each.split("/")[1] for each in named if each.startswith("optimizer/")}
    assert steps == {f"optimizer/{each}/step" for each in trained}
    assert {float(catalogue.read(each)) for each in steps} == ({float(STEPS)} if trained else set())
    assert (catalogue.step, catalogue.contents.format) == (STEPS, "megatron")


def test_the_folder_of_one_save_is_read_by_its_name() -> None:
    whole = checkpoint.open(FOLDERS / "llama-1").contents
    one = checkpoint.open(FOLDERS / "llama-1" / f"iter_{STEPS:07d}").contents
    assert whole.tensors.keys() == one.tensors.keys()
    assert (whole.settings, whole.extra, whole.step) == (one.settings, one.extra, one.step)


def test_groups_arguments_and_what_is_left_out_are_said() -> None:
    contents = checkpoint.open(FOLDERS / "llama-bf16-2-fully-reshardable").contents
    (optimizer,) = contents.settings["optimizers"]
    assert optimizer["kind"] == "AdamW"
    settings = [group["settings"] for group in optimizer["groups"]]
    assert [(each["lr"], each["weight_decay"]) for each in settings] == [(LR, DECAY), (LR, 0.0)]
    assert settings[0].keys() == {
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    }
    shapes = {name: len(contents.tensors[name].shape) for name in contents.tensors}
    assert all(shapes[each] > 1 for each in optimizer["groups"][0]["parameters"])
    assert all(shapes[each] == 1 for each in optimizer["groups"][1]["parameters"])
    values = contents.extra["objects"]
    assert values["iteration"] == STEPS
    assert values["args"]["state"]["padded_vocab_size"] == PADDED
    assert values["opt_param_scheduler"]["max_lr"] == LR
    assert any("which parameters each group of the optimizer has" in note for note in contents.notes)
    assert any("_extra_state/shard_0_2 and so on are left out" in note for note in contents.notes)
    (note,) = [note for note in checkpoint.open(FOLDERS / IN_BUCKETS).contents.notes if "optimizer" in note]
    assert "flat buckets that do not name their parameters" in note
    assert "--dist-ckpt-optim-fully-reshardable" in note


def configuration(model: str) -> Any:
    """The configuration of transformers for a model of Megatron."""
    import transformers

    of = MODELS[model]
    if model == "gpt":
        return transformers.GPT2Config(
            vocab_size=PADDED,
            n_embd=of["hidden_size"],
            n_inner=of["ffn_hidden_size"],
            n_layer=of["num_layers"],
            n_head=of["num_attention_heads"],
            n_positions=6,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    kinds: dict[str, Any] = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mixtral": transformers.MixtralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }
    experts: dict[str, Any] = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": of.get("moe_ffn_hidden_size")},
            "norm_topk_prob": True,
        },
    }
    return kinds[model](
        vocab_size=PADDED,
        hidden_size=of["hidden_size"],
        intermediate_size=of["ffn_hidden_size"],
        num_hidden_layers=of["num_layers"],
        num_attention_heads=of["num_attention_heads"],
        num_key_value_heads=of["num_query_groups"],
        head_dim=of.get("kv_channels", 2),
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        **experts.get(model, {}),
    )


def untrained(model: str) -> Any:
    """A model of transformers."""
    import transformers

    maker: Any = transformers.AutoModelForCausalLM
    return maker.from_config(configuration(model))


REWRITES = {
    "llama": "megatron-llama",
    "qwen2": "megatron-llama",
    "qwen3": "megatron-llama",
    "mixtral": "megatron-mixtral",
    "qwen3_moe": "megatron-qwen-moe",
    "gpt": "megatron-gpt2",
}


def run(*words: object) -> tuple[int, str]:
    """What `shardwise ckpt` answers."""
    result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
    return result.exit_code, result.output


def converted(name: str, folder: Path) -> Path:
    """A folder as files of Hugging Face."""
    configuration(CASES[name].model).save_pretrained(folder / "config")
    code, shown = run(
        *("convert", FOLDERS / name, folder / "hf", "--to", "hf", "--config", folder / "config"),
        *("--rewrite", REWRITES[CASES[name].model], "--certify"),
    )
    assert code == 0, shown
    return folder / "hf"


FLOATS = [name for name, case in CASES.items() if not case.bf16]


@pytest.mark.parametrize("name", FLOATS)
def test_transformers_computes_what_megatron_does(tmp_path: Path, name: str) -> None:
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    # Kernels of grouped products want rows of 16 bytes.
    experts = {"experts_implementation": "eager"} if "_moe" in CASES[name].model else {}
    model, found = loader.from_pretrained(converted(name, tmp_path), output_loading_info=True, **experts)
    assert not any(found.values()), found
    with torch.no_grad():
        logits = model(batch_of(0)["input"][:2]).logits
    # The same products in another order of sums.
    torch.testing.assert_close(logits, reference_of(name)["logits"], rtol=1e-5, atol=1e-6)


def test_a_vocabulary_loses_its_padding(tmp_path: Path) -> None:
    sizes = f"axis=0, sizes='[{VOCABULARY},{PADDED - VOCABULARY}]'"
    cropped = sw.Rewrite(
        f"""
        embedding.word_embeddings.weight -> words, unused.0, {sizes}
        output_layer.weight -> words_out, unused.1, {sizes}
        words -> embedding.word_embeddings.weight; words_out -> output_layer.weight; unused.$N -> _
        """
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rewrite = cropped >> shipped("megatron-llama", parameters=heads)
    checkpoint.convert(FOLDERS / "llama-1", tmp_path / "save", rewrite=rewrite)
    made, expected = checkpoint.open(tmp_path / "save"), reference_of("llama-1")
    words = "embedding.word_embeddings.weight"
    assert torch.equal(made.read("model.embed_tokens.weight"), expected[words][:VOCABULARY])
    moment = made.read("optimizer/model.embed_tokens.weight/exp_avg_sq")
    assert torch.equal(moment, expected[f"{words}/exp_avg_sq"][:VOCABULARY])
    assert torch.equal(made.read("lm_head.weight"), expected["output_layer.weight"][:VOCABULARY])


PLANS = {
    "one rank": sw.Plan(),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
}


def loss_of(output: Any, batch: Tensors) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits.float().flatten(0, 1), batch["target"].flatten())


def groups_of(parameters: Iterable[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """As Megatron groups them; of the save are other numbers."""
    trained = list(parameters)
    return [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.7},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.6},
    ]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-1", "tp"),
        ("llama-4-tp-model-space", "stage 3"),
        ("gpt-1", "one rank"),
        ("qwen2-2-pp", "pp"),
        ("qwen3-4-tp-pp", "one rank"),
        ("llama-bf16-2-fully-reshardable", "one rank"),
        ("llama-bf16-2-tp", "stage 3"),
    ],
)
def test_training_goes_on_with_the_losses_of_megatron(name: str, layout: str) -> None:
    case, plan = CASES[name], PLANS[layout]
    rewrite = shipped(
        REWRITES[case.model],
        parameters={"n_head": 4} if case.model == "gpt" else {"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    plan = sw.Plan(
        mesh=plan.mesh,
        sharding=plan.sharding,
        merge=plan.merge,
        tensor=plan.tensor,
        precision=sw.Precision(compute="bfloat16" if case.bf16 else None),
    )

    def go_on(channel: sw.Channel) -> list[float]:
        model = untrained(case.model)
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(groups_of(parameters), lr=0.5),
            loss=loss_of,
            channel=channel,
        )
        report = sw.load(FOLDERS / name, engine, rewrite=rewrite, channel=channel).report
        assert report.step == STEPS
        ranks = plan.mesh.dp_shard
        losses = []
        for step in range(STEPS, STEPS + MORE_STEPS):
            batch = {key: each.chunk(ranks)[channel.rank % ranks] for key, each in batch_of(step).items()}
            losses.append(engine.step({"input_ids": batch["input"], "target": batch["target"]}).loss)
        return losses

    losses = torch.tensor(sw.simulate(plan.mesh.size, go_on)[0], dtype=torch.float64)
    # In float32 the difference is in the order of sums. In 16 bits Megatron rounds gradients and products otherwise.
    tolerance = 3e-4 if case.bf16 else 1e-6
    torch.testing.assert_close(losses, reference_of(name)["losses"], rtol=tolerance, atol=0)


def test_training_state_becomes_a_save_and_commands_take_a_folder(tmp_path: Path) -> None:
    code, shown = run("ls", FOLDERS / "llama-1")
    assert code == 0
    assert f"megatron, step {STEPS}" in shown
    assert "optimizer/decoder.layers.1.mlp.linear_fc2.weight/exp_avg_sq" in shown
    code, shown = run("convert", FOLDERS / "llama-4-tp-model-space", tmp_path / "saves")
    assert code == 0, shown
    code, shown = run("diff", FOLDERS / "llama-4-tp-model-space", tmp_path / "saves")
    assert code == 0, shown
    code, shown = run("verify", tmp_path / "saves")
    assert code == 0, shown
    code, shown = run("verify", FOLDERS / "llama-1")
    assert (code, "is as it was written" in shown) == (0, True)


def settings_in(contents: Any) -> dict[str, dict[str, Any]]:
    """The settings of the group of each parameter: experts on several ranks have one of their own."""
    (optimizer,) = contents.settings["optimizers"]
    return {name: group["settings"] for group in optimizer["groups"] for name in group["parameters"]}


NAMES_OF_MEGATRON = ["llama-1", "gpt-1", "qwen2-2-pp", "llama-bf16-2-tp", "mixtral-2-ep"]


@pytest.mark.parametrize("name", NAMES_OF_MEGATRON)
def test_what_is_written_has_the_names_and_shapes_that_megatron_has_written(tmp_path: Path, name: str) -> None:
    """`megatron/load.py` loads such folders with Megatron, and goes on with the losses of the reference."""
    code, shown = run("convert", FOLDERS / name, tmp_path / "out", "--to", "megatron")
    assert code == 0, shown
    source, made = checkpoint.open(FOLDERS / name), checkpoint.open(tmp_path / "out")
    theirs = dcp.read_metadata(store_of(FOLDERS / name), f"iter_{STEPS:07d}/")
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
    checkpoint.convert(FOLDERS / "llama-1", tmp_path / "out", to="megatron")
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


@pytest.mark.parametrize("name", ["llama-1", "qwen3_moe-1", "gpt-1"])
def test_files_of_hugging_face_become_a_folder_of_megatron(tmp_path: Path, name: str) -> None:
    files = converted(name, tmp_path)
    code, shown = run(
        *("convert", files, tmp_path / "out", "--to", "megatron"),
        *("--rewrite", REWRITES[CASES[name].model], "--inverse"),
    )
    assert code == 0, shown
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    source, made = checkpoint.open(FOLDERS / name), checkpoint.open(tmp_path / "out")
    assert made.tensors.keys() == {each for each in source.tensors if "/" not in each}
    assert all(torch.equal(made.read(each), source.read(each)) for each in made.tensors)


def test_an_engine_goes_from_megatron_and_back_to_the_bit(tmp_path: Path) -> None:
    engine = sw.parallelize(
        untrained("llama"),
        sw.Plan(),
        optimizer=lambda parameters: torch.optim.AdamW(groups_of(parameters)),
        loss=loss_of,
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sw.load(FOLDERS / "llama-1", engine, rewrite=shipped("megatron-llama", parameters=heads))
    sw.save(tmp_path / "save", engine, extra={"step": STEPS})
    code, shown = run("convert", tmp_path / "save", tmp_path / "out", "--to", "megatron", "--inverse", "--certify")
    assert code == 0, shown
    source, made = checkpoint.open(FOLDERS / "llama-1"), checkpoint.open(tmp_path / "out")
    assert made.tensors.keys() == source.tensors.keys()
    assert all(torch.equal(made.read(name), source.read(name)) for name in source.tensors)
    assert settings_in(made.contents) == settings_in(source.contents)
    assert made.step == STEPS


def test_layers_that_differ_stay_on_their_own_and_large_ones_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_folders, "_MAX_CHUNK_BYTES", 64)
    weights = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(6, 4),
        "decoder.layers.1.mlp.linear_fc1.weight": torch.randn(8, 4),
        "decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight": torch.randn(6, 4),
        "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight": torch.randn(6, 4),
    }
    sw.save(tmp_path / "save", weights)
    checkpoint.convert(tmp_path / "save", tmp_path / "out", to="megatron")
    written = dcp.read_metadata(store_of(tmp_path / "out"), "release/")
    assert {name: (each.shape, len(each.chunks)) for name, each in written.tensors.items()} == {
        "decoder.layers.0.mlp.linear_fc1.weight": ((6, 4), 2),
        "decoder.layers.1.mlp.linear_fc1.weight": ((8, 4), 2),
        "decoder.layers.2.mlp.experts.experts.linear_fc1.weight": ((2, 6, 4), 4),
    }
    assert "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_1_2" in written.objects
    made = checkpoint.open(tmp_path / "out")
    assert made.tensors.keys() == weights.keys()
    assert all(torch.equal(made.read(name), tensor) for name, tensor in weights.items())


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.convert(path, path.parent / "refused", **options)
    assert not (path.parent / "refused").exists()
    return str(caught.value)


def test_what_megatron_has_no_place_for_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "named", {"model.embed_tokens.weight": torch.zeros(2, 2)})
    assert "no names of Megatron" in refusal(tmp_path / "named", to="megatron")
    layer = "decoder.layers.{}.mlp.linear_fc1.weight"
    sw.save(
        tmp_path / "state", {layer.format(0): torch.zeros(2), f"optimizer/{layer.format(0)}/exp_avg": torch.ones(2)}
    )
    assert "no settings of one, which Megatron needs" in refusal(tmp_path / "state", to="megatron")
    weights = {layer.format(number): torch.zeros(2) for number in range(2)}
    sw.save(tmp_path / "part", {**weights, f"optimizer/{layer.format(0)}/exp_avg": torch.ones(2)})
    assert "are trained in part" in refusal(tmp_path / "part", to="megatron")
    experts = {
        f"decoder.layers.0.mlp.experts.local_experts.{each}.linear_fc1.weight": torch.zeros(2) for each in (0, 2)
    }
    sw.save(tmp_path / "experts", experts)
    assert "it has experts 0, 2 of" in refusal(tmp_path / "experts", to="megatron")
    model = torch.nn.ModuleDict({"decoder": torch.nn.ModuleDict({"final_layernorm": torch.nn.LayerNorm(2)})})
    groups = [{"params": [each], "lr": lr} for each, lr in zip(model.parameters(), (0.1, 0.2), strict=True)]
    optimizer = torch.optim.AdamW(groups)
    for each in model.parameters():
        each.grad = torch.ones(2)
    optimizer.step()
    sw.save(tmp_path / "groups", checkpoint.TorchState(model, optimizer))
    assert "in groups with different settings" in refusal(tmp_path / "groups", to="megatron")
    optimizer.param_groups[1]["lr"] = 0.1
    next(iter(optimizer.state.values()))["step"] += 1
    sw.save(tmp_path / "steps", checkpoint.TorchState(model, optimizer))
    assert "were updated 1 and 2 times" in refusal(tmp_path / "steps", to="megatron")


def copy_of(name: str, folder: Path) -> Path:
    """A copy of one save, to be damaged; its folder."""
    shutil.copytree(FOLDERS / name, folder / name)
    return folder / name / f"iter_{STEPS:07d}"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    saved = copy_of("llama-1", tmp_path)
    (saved / "__0_1.distcp").unlink()
    assert "__0_1.distcp is missing" in refusal(saved)
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
    assert "names the save '7', which is not there" in refusal(saved.parent)
    saved = copy_of("gpt-1", tmp_path)
    (saved / "common.pt").unlink()
    assert "common.pt is missing, which Megatron writes; copy all of the save" in refusal(saved)
    (saved / "metadata.json").write_text("{}")
    assert checkpoint.open(saved).contents.format == "dcp"
    saved = copy_of("qwen2-2-pp", tmp_path)
    (saved / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "in the format 'zarr', and torch_dist is read" in refusal(saved)


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
    assert torch.equal(found.read("output_layer.weight"), reference_of("llama-1")["output_layer.weight"])
    assert not any(each.endswith("/step") for each in found.tensors)


@tried(40)
@given(st.data())
def test_damaged_files_are_refused_or_read(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llama-4-tp-model-space", "legacy-qwen3-4-tp-pp", "qwen3_moe-1"]))
    with tempfile.TemporaryDirectory() as place:
        saved = copy_of(name, Path(place))
        files = sorted(each for each in saved.rglob("*") if each.suffix != ".distcp" and each.is_file())
        file = data.draw(st.sampled_from(files))
        changed = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            checkpoint.open(saved)


def test_legacy_folders_that_cannot_be_joined_are_named(tmp_path: Path) -> None:
    saved = copy_of("legacy-qwen3-4-tp-pp", tmp_path)
    stage = saved / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = torch.load(stage, weights_only=False)

    def said(**changed: Any) -> str:
        torch.save({key: each for key, each in {**whole, **changed}.items() if each is not None}, stage)
        return refusal(saved)

    assert "2 virtual stages (model0, model1)" in said(model=None, model0=whole["model"], model1=whole["model"])
    assert "a model of Megatron-LM before megatron-core" in said(model={"language_model": {}})
    unknown = {**whole["model"], "decoder.layers.0.mixer.weight": torch.zeros(2)}
    assert "mp_rank_00_001/model_optim_rng.pt' has no decoder.layers.0.mixer.weight" in said(model=unknown)
    other = saved / "mp_rank_00_001" / "model_optim_rng.pt"
    kept = torch.load(other, weights_only=False)
    torch.save({**kept, "model": {**kept["model"], "decoder.layers.0.mixer.weight": torch.zeros(2)}}, other)
    assert "not known along which dim they cut it" in said(model=unknown)
    args = argparse.Namespace(**{**vars(whole["args"]), "expert_model_parallel_size": 2})
    assert "experts of one of several ranks, which are not joined" in said(args=args)
    stage.unlink()
    assert (
        "2 tensor-parallel ranks of 2 stages wrote it, in a file each, and that of mp_rank_01_001 is missing"
        in refusal(saved)
    )
