"""Engines of transformers models, saved and exported: `from_pretrained` gives the engine's numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import export_hf
from tests.checkpoint.hugging_face_models import build, configs, loaded, model_class
from tests.checkpoint.small_states import same

BF16 = sw.Precision(compute="bfloat16")


LAYOUTS: dict[str, tuple[sw.Plan, int]] = {
    "one in bfloat16": (sw.Plan(precision=BF16), 1),
    "stage 3": (sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3, units=(".",)), precision=BF16), 2),
    "pp": (sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)), 2),
    "tp": (sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")), 2),
}


def tied(name: str) -> Any:
    """The model, with its head tied to its embedding where it can have that."""
    torch.manual_seed(0)
    config = configs()[name]
    if hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = True
    return model_class(name).from_config(config)


def trained(path: Path, name: str, layout: str, make: Any = tied) -> dict[str, torch.Tensor]:
    """Save an engine after an update; its weights, as it computes with them."""
    plan, ranks = LAYOUTS[layout]
    words = torch.arange(32).view(4, 8) % 32

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = sw.parallelize(
            make(name), plan, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), channel=channel
        )
        at = plan.mesh.coordinates(channel.rank)["dp_shard"]
        share = words.chunk(plan.mesh.dp_shard)[at]
        engine.step({"input_ids": share, "labels": share})
        sw.save(path, engine, step=1, channel=channel)
        return dict(sw.full(engine, channel=channel))

    return sw.simulate(ranks, run)[0]


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "tp"), ("mixtral", "pp"), ("gpt2", "stage 3"), ("t5", "one in bfloat16")]
)
def test_an_exported_engine_is_loaded_by_transformers(tmp_path: Path, name: str, layout: str) -> None:
    weights = trained(tmp_path / "save", name, layout)
    report = export_hf(tmp_path / "save", tmp_path / "out")
    assert report.missing == ()
    assert "config.json" in report.files
    again = loaded(name, tmp_path / "out")
    assert same(again.state_dict(), weights)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [type(again).__name__]


def test_masters_are_exported_where_their_dtype_is_asked_for(tmp_path: Path) -> None:
    trained(tmp_path / "save", "llama", "stage 3")
    catalogue = sw.checkpoint.open(tmp_path / "save")
    masters = {name: catalogue.read(f"optimizer/{name}/master") for name in catalogue.tensors if "/" not in name}
    for dtype in ("float32", "bfloat16", "float16", None):
        report = export_hf(tmp_path / "save", tmp_path / str(dtype), dtype=dtype)
        state = loaded("llama", tmp_path / str(dtype)).state_dict()
        wanted = getattr(torch, dtype or "bfloat16")
        for name, master in masters.items():
            assert torch.equal(state[name], master.to(wanted)), (dtype, name)
            assert state[name].dtype == wanted
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()  # a tie stays one
        from_masters = dtype not in ("bfloat16", None)
        assert len(report.from_masters) == (len(masters) if from_masters else 0)
        assert report.num_masters == (0 if from_masters else len(masters))
        assert report.certificate is not None
        lossy = {"cast from float32 to float16"} if dtype == "float16" else set()
        assert {each.why for each in report.certificate.lossy} == lossy


def test_what_has_no_configuration_is_said_in_the_report_and_takes_a_given_one(tmp_path: Path) -> None:
    model = build("llama")
    state = dict(model.state_dict())
    sw.save(tmp_path / "plain", state)
    assert export_hf(tmp_path / "plain", tmp_path / "without").missing == ("config.json",)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/tokenizer.json").write_text("{}")
    report = export_hf(tmp_path / "plain", tmp_path / "tokens only", config=tmp_path / "tokens")
    assert (report.missing, report.files) == (("config.json",), ("tokenizer.json",))
    sw.save(tmp_path / "known", sw.checkpoint.TorchState(model))
    report = export_hf(tmp_path / "known", tmp_path / "both", config=tmp_path / "tokens")
    assert sorted(report.files) == ["config.json", "generation_config.json", "tokenizer.json"]
    model.config.save_pretrained(tmp_path / "config")
    sw.checkpoint.convert(tmp_path / "plain", tmp_path / "kept", config=tmp_path / "config")
    export_hf(tmp_path / "kept", tmp_path / "late")
    assert all(
        torch.equal(tensor, state[key]) for key, tensor in loaded("llama", tmp_path / "late").state_dict().items()
    )


def test_a_configuration_of_another_dtype_is_corrected_and_else_left_to_the_byte(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "hf")
    given = tmp_path / "hf/config.json"
    sw.save(tmp_path / "save", sw.checkpoint.TorchState(model))
    export_hf(tmp_path / "save", tmp_path / "same", config=given)
    assert (tmp_path / "same/config.json").read_bytes() == given.read_bytes()
    export_hf(tmp_path / "save", tmp_path / "narrow", config=given, dtype="bfloat16")
    assert json.loads((tmp_path / "narrow/config.json").read_text())["dtype"] == "bfloat16"
    assert loaded("llama", tmp_path / "narrow").dtype == torch.bfloat16


def test_a_model_whose_configuration_cannot_be_written_is_saved_all_the_same(tmp_path: Path) -> None:
    class Broken:
        def to_json_string(self) -> str:
            raise KeyError("what it is made of")

    class Large:
        def to_json_string(self) -> str:
            return json.dumps({"labels": "x" * (2 << 20)})

    for config in (Broken(), Large(), {"hidden_size": 3}, None):
        model: Any = torch.nn.Linear(2, 2)
        model.config = config
        engine = sw.parallelize(
            model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters()), loss=lambda output, _: output.sum()
        )
        sw.save(tmp_path / "save", engine)
        assert "model_files" not in sw.checkpoint.open(tmp_path / "save").contents.settings
    assert (tmp_path / "save/save-00000004/manifest.json").stat().st_size < 10_000
