"""Folders that the real megatron-core wrote, read without it: every bit, forward, and training that goes on as there.

`megatron/write.py` wrote them, and beside them what Megatron's own loader makes of them in one process.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise import checkpoint
from shardwise.cli import main
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from shardwise.rewrite import shipped
from tests.checkpoint.megatron.cases import CASES, DECAY, LR, MODELS, MORE_STEPS, PADDED, STEPS, batch_of

FOLDERS = Path(__file__).with_name("megatron") / "folders"
NEW = [name for name, case in CASES.items() if case.kind == "torch_dist"]
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


@pytest.mark.parametrize("name", NEW)
def test_weights_masters_and_moments_have_all_their_bits(name: str) -> None:
    catalogue = checkpoint.open(FOLDERS / name)
    expected = reference_of(name)
    del expected["logits"], expected["losses"]
    if name == IN_BUCKETS:
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
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
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


FLOATS = [name for name in NEW if not CASES[name].bf16]


@pytest.mark.parametrize("name", FLOATS)
def test_transformers_computes_what_megatron_does(tmp_path: Path, name: str) -> None:
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    model, found = loader.from_pretrained(converted(name, tmp_path), output_loading_info=True)
    assert not any(found.values()), found
    with torch.no_grad():
        logits = model(batch_of(0)["input"][:2]).logits
    # The same products in another order of sums.
    torch.testing.assert_close(logits, reference_of(name)["logits"], rtol=1e-5, atol=1e-6)


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
        ("llama-1", "stage 3"),
        ("llama-4-tp-model-space", "tp"),
        ("gpt-1", "one rank"),
        ("gpt-2-tp", "stage 3"),
        ("qwen2-2-pp", "pp"),
        ("qwen3-4-tp-pp", "one rank"),
        ("llama-bf16-2-fully-reshardable", "one rank"),
        ("llama-bf16-2-tp", "stage 3"),
    ],
)
def test_training_goes_on_with_the_losses_of_megatron(name: str, layout: str) -> None:
    import transformers

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
        model = transformers.AutoModelForCausalLM.from_config(configuration(case.model))
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
    # In float32 the difference is in the order of sums. In 16 bits Megatron rounds gradients and probabilities otherwise.
    tolerance = 3e-3 if case.bf16 else 1e-5
    torch.testing.assert_close(losses, reference_of(name)["losses"], rtol=tolerance, atol=0)
