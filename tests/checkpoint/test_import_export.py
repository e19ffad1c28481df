"""`import_hf` and `export_hf`: models of transformers go in, through a rewrite, and come out as they were."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from shardwise import checkpoint
from shardwise.checkpoint import Contents, LocalStore, conversion, export_hf, import_hf
from shardwise.checkpoint.foreign import read_foreign
from shardwise.checkpoint.saves import read_save
from shardwise.errors import CheckpointError, RewriteError
from shardwise.rewrite import Rewrite
from shardwise.rewrite.rewrites import shipped
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.faulty import Counting, FailingAt
from tests.checkpoint.hugging_face_models import build, loaded, save
from tests.checkpoint.small_states import bits, same

REWRITES = {
    "llama": ["llama-qkv", "llama-gate-up"],
    "qwen2": ["llama-qkv", "llama-gate-up"],
    "qwen3": ["llama-qkv", "llama-gate-up"],
    "gemma": ["llama-qkv", "llama-gate-up"],
    "mixtral": ["llama-qkv", "expert-stacking-w123"],
    "qwen3_moe": ["llama-qkv", "expert-stacking"],
    "gpt2": ["gpt2-conv1d"],
    "bert": [],
    "t5": [],
}

TEXTS = {
    "bert": """
        bert.encoder.layer.$L.attention.self.query.weight, bert.encoder.layer.$L.attention.self.key.weight,
            bert.encoder.layer.$L.attention.self.value.weight -> layers.$L.qkv.weight, axis=0
        bert.encoder.layer.$L.attention.self.query.bias, bert.encoder.layer.$L.attention.self.key.bias,
            bert.encoder.layer.$L.attention.self.value.bias -> layers.$L.qkv.bias, axis=0
        bert.encoder.layer.$L.output.dense.weight^T -> layers.$L.down
        bert.embeddings.word_embeddings.weight -> words
    """,
    "t5": """
        encoder.block.$L.layer.0.SelfAttention.q.weight, encoder.block.$L.layer.0.SelfAttention.k.weight,
            encoder.block.$L.layer.0.SelfAttention.v.weight -> encoder.$L.qkv, stack=0
        decoder.block.$L.layer.1.EncDecAttention.k.weight, decoder.block.$L.layer.1.EncDecAttention.v.weight
            -> decoder.$L.kv, axis=0
        decoder.block.*.layer.2.DenseReluDense.wi.weight -> decoder.wi, stack=0
    """,
}


PARTED = """
    model.layers.$L.self_attn.qkv_proj.weight -> model.layers.$L.self_attn.q_proj.weight,
        model.layers.$L.self_attn.k_proj.weight, model.layers.$L.self_attn.v_proj.weight,
        fused_qkv, num_heads={num_attention_heads}, num_key_value_groups={num_key_value_heads}, axis=0
    model.layers.$L.mlp.gate_up_proj.weight
        -> model.layers.$L.mlp.gate_proj.weight, model.layers.$L.mlp.up_proj.weight, axis=0
"""


def rewrite_for(name: str) -> Rewrite:
    if name in TEXTS:
        return Rewrite(TEXTS[name])
    first, *others = map(shipped, REWRITES[name])
    for each in others:
        first = first >> each
    return first


def digests(state: Any) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest())
        for name, tensor in state.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 6000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", REWRITES)
def test_a_model_comes_back_as_it_was(tmp_path: Path, name: str, max_shard_bytes: int, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    source = save(model, tmp_path / "hf", max_shard_bytes)
    rewrite = rewrite_for(name)
    taken = import_hf(source, tmp_path / "save", rewrite)
    given = export_hf(tmp_path / "save", tmp_path / "out", rewrite.inverse(), max_shard_bytes=max_shard_bytes)
    for report in (taken, given):
        assert report.certificate is not None
        assert report.certificate.lossy == ()
    assert digests(tensors_of(tmp_path / "out")) == digests(tensors_of(source))
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_shard_bytes == 6000)
    again = loaded(name, tmp_path / "out")
    assert type(again) is type(model)
    assert digests(again.state_dict()) == digests(model.state_dict())
    assert dict(again.named_parameters()).keys() == dict(model.named_parameters()).keys()  # tied as before
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_the_certificate_names_every_tensor_with_its_digest_on_both_sides(tmp_path: Path) -> None:
    model = build("llama")
    save(model, tmp_path / "hf", 1 << 30)
    rewrite = rewrite_for("llama")
    import_hf(tmp_path / "hf", tmp_path / "save", rewrite)
    export_hf(tmp_path / "save", tmp_path / "out", rewrite.inverse())
    taken = json.loads((tmp_path / "save/save-00000001/round-trip.json").read_text())
    given = json.loads((tmp_path / "out/round-trip.json").read_text())
    assert (taken["source"], taken["destination"]) == (str(tmp_path / "hf"), str(tmp_path / "save/save-00000001"))
    assert (given["source"], given["destination"]) == (str(tmp_path / "save/save-00000001"), str(tmp_path / "out"))
    assert any("fused_qkv" in line for line in taken["rewrite"])
    for certificate, tensors in ((taken, tensors_of(tmp_path / "hf")), (given, tensors_of(tmp_path / "save"))):
        assert [row["name"] for row in certificate["tensors"]] == list(tensors)
        for row in certificate["tensors"]:
            dtype, shape, digest = digests(tensors)[row["name"]]
            assert (f"torch.{row['dtype']}", tuple(row["shape"])) == (dtype, shape)
            assert (row["sha256"], row["returned_sha256"], row["verdict"]) == (digest, digest, "equal")


def test_the_certificate_says_what_it_proves_and_compares_with_an_original(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 2), "b": torch.randn(4, 2), "c": torch.ones(3), "d": torch.ones(2).bfloat16()}
    checkpoint.save(tmp_path / "hub", tensors)
    checkpoint.save(tmp_path / "trained", {**tensors, "b": tensors["b"] + 1, "d": torch.ones(2), "e": torch.ones(1)})
    alone = export_hf(tmp_path / "trained", tmp_path / "alone", Rewrite("c -> C")).certificate
    both = export_hf(tmp_path / "trained", tmp_path / "out", Rewrite("c -> C"), original=tmp_path / "hub").certificate
    assert alone is not None
    assert both is not None
    assert str(alone) == "round trip: all 5 tensors come back to the bit; compared with no original"
    assert {each.name: each.verdict for each in both.differing} == {
        "b": "differs",
        "c": "not written",
        "d": "differs",  # in dtype
        "C": "not in the original",
        "e": "not in the original",
    }
    assert str(both).startswith("round trip: all 5 tensors come back to the bit; 1 of 6 are as in ")
    assert str(both).endswith(
        "hub/save-00000001; not: b (differs); c (not written); d (differs); e (not in the original); "
        "C (not in the original)"
    )
    written = json.loads((tmp_path / "out/round-trip.json").read_text())
    digest = {name: of for name, (_, _, of) in digests(tensors).items()}
    rows = {row["name"]: row for row in written["compared"]}
    assert written["original"] == str(tmp_path / "hub/save-00000001")
    assert "as in the original if its verdict in the comparison is equal" in written["proves"]
    assert (rows["a"]["sha256"], rows["a"]["original_sha256"], rows["a"]["verdict"]) == (*[digest["a"]] * 2, "equal")
    assert (rows["c"]["sha256"], rows["c"]["original_sha256"]) == (None, digest["c"])
    with pytest.raises(CheckpointError, match="original= is compared in the certificate"):
        export_hf(tmp_path / "trained", tmp_path / "new", certify=False, original=tmp_path / "hub")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.convert(tmp_path / "trained", tmp_path / "new", certify=True, original=tmp_path / "nothing")
    assert not (tmp_path / "new").exists()


def test_the_certificate_says_what_was_lost(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(9, 3), "whole": torch.ones(4), "y": torch.randn(2), "z": torch.ones(3)}
    checkpoint.save(tmp_path / "a", tensors)
    text = "x -> x, dtype='bfloat16'; whole -> whole, dtype='bfloat16'; y -> _; z -> z, dtype='float64'"
    report = checkpoint.convert(tmp_path / "a", tmp_path / "b", rewrite=Rewrite(text), certify=True)
    assert report.certificate is not None
    verdicts = {each.name: (each.verdict, each.why) for each in report.certificate.tensors}
    assert verdicts == {
        "x": ("lossy", "cast from float32 to bfloat16"),
        "whole": ("equal", ""),  # the cast may lose something, but did not
        "y": ("lossy", "dropped"),
        "z": ("equal", ""),
    }
    assert str(report.certificate) == (
        "round trip: 2 of 4 tensors come back to the bit; lossy: x (cast from float32 to bfloat16); y (dropped); "
        "compared with no original"
    )
    row = json.loads((tmp_path / "b/save-00000001/round-trip.json").read_text())["tensors"][2]
    assert (row["name"], row["returned_sha256"], row["verdict"], row["why"]) == ("y", None, "lossy", "dropped")


def test_what_does_not_come_back_is_an_error_and_leaves_neither_folder_nor_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.arange(6.0), "y": torch.zeros(3)})
    checkpoint.convert(tmp_path / "a", tmp_path / "hf", to="hf")

    def damaged(read: Callable[..., Contents]) -> Callable[..., Contents]:
        """Reads what was written, after its last byte was changed."""

        def reading(store: LocalStore, *others: Any) -> Contents:
            file = max(Path(store.location).rglob("*.safetensors"), key=lambda each: each.stat().st_mtime_ns)
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            return read(store, *others)

        return reading

    monkeypatch.setattr(conversion, "read_foreign", damaged(read_foreign))
    with pytest.raises(CheckpointError, match=r"not to be trusted.*: y \(float32 \[3\]\) does not come back out of"):
        export_hf(tmp_path / "hf", tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "hf"]
    monkeypatch.setattr(conversion, "read_save", damaged(read_save))
    with pytest.raises(CheckpointError, match="damaged"):
        import_hf(tmp_path / "hf", tmp_path / "a")
    assert [each.name for each in (tmp_path / "a").iterdir()] == ["save-00000001"]


def test_a_certificate_is_no_stray_file_and_goes_with_its_save(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "hf", 1 << 30)
    for _ in range(3):
        import_hf(tmp_path / "hf", tmp_path / "saves")
    assert len(list(tmp_path.glob("saves/*/round-trip.json"))) == 3
    assert checkpoint.verify(tmp_path / "saves").good
    checkpoint.prune(tmp_path / "saves", keep=1)
    assert [each.name for each in (tmp_path / "saves").iterdir()] == ["save-00000003"]
    assert (tmp_path / "saves/save-00000003/round-trip.json").exists()


def test_numbers_of_heads_come_from_the_configuration_and_explicit_ones_win(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "hf", 1 << 30)
    import_hf(tmp_path / "hf", tmp_path / "a", shipped("llama-qkv"))
    given = {"num_attention_heads": 2, "num_key_value_heads": 1}
    import_hf(tmp_path / "hf", tmp_path / "b", shipped("llama-qkv", parameters=given))
    one, other = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    q, k, v = (tensors_of(tmp_path / "hf")[name.replace("qkv", each)] for each in "qkv")
    assert torch.equal(other[name], torch.cat([q, k, v]))
    assert torch.equal(one[name], torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]]))
    # of an export, from what the import has kept
    export_hf(tmp_path / "a", tmp_path / "out", shipped("llama-qkv").inverse())
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def test_a_configuration_is_looked_into_for_its_text_part_and_for_what_is_equal(tmp_path: Path) -> None:
    save(build("llama"), tmp_path / "hf", 1 << 30)
    nested = {"model_type": "both", "text_config": {"num_attention_heads": 4}}
    (tmp_path / "hf/config.json").write_text(json.dumps(nested))
    with pytest.raises(RewriteError, match=r"k_proj"):  # 4 key-value heads, where it has half as many elements
        import_hf(tmp_path / "hf", tmp_path / "x", shipped("llama-qkv"))
    nested["text_config"] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "hf/config.json").write_text(json.dumps(nested))
    import_hf(tmp_path / "hf", tmp_path / "a", shipped("llama-qkv"))
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(
        RewriteError, match=r"needs num_attention_heads, num_key_value_heads, which config\.json does not"
    ):
        import_hf(tmp_path / "hf", tmp_path / "b", shipped("llama-qkv"))
    (tmp_path / "hf/config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        import_hf(tmp_path / "hf", tmp_path / "b")


def test_an_export_takes_the_configuration_and_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    model = build("llama")
    checkpoint.save(tmp_path / "a", checkpoint.TorchState(model))
    folder = tmp_path / "original"
    save(model, folder, 1 << 30)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text(f'{{"name": "{name}"}}')
    (folder / "README.md").write_text("not this")
    report = export_hf(tmp_path / "a", tmp_path / "out", config=folder)
    assert sorted(report.files) == [
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in report.files:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "out/README.md").exists()
    assert digests(loaded("llama", tmp_path / "out").state_dict()) == digests(model.state_dict())
    export_hf(tmp_path / "a", tmp_path / "file", config=folder / "config.json")
    assert digests(loaded("llama", tmp_path / "file").state_dict()) == digests(model.state_dict())
    with pytest.raises(CheckpointError, match=r"holds neither config\.json nor files of a tokenizer; config"):
        export_hf(tmp_path / "a", tmp_path / "x", config=tmp_path)
    (tmp_path / "half").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/half is not JSON"):  # by the name that it was given under
        export_hf(tmp_path / "a", tmp_path / "x", config=tmp_path / "half")
    assert not (tmp_path / "x").exists()


def test_a_model_in_training_is_exported_under_the_names_of_hugging_face(tmp_path: Path) -> None:
    """Its state is in the fused form, with an optimizer; the files have neither."""
    model = build("llama")
    save(model, tmp_path / "hf", 1 << 30)
    rewrite = rewrite_for("llama")
    import_hf(tmp_path / "hf", tmp_path / "fused", rewrite)
    state = tensors_of(tmp_path / "fused")
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in state.items()}
    moments = {f"optimizer/{name}/exp_avg": torch.ones_like(tensor) for name, tensor in state.items()}
    checkpoint.save(tmp_path / "trained", {**parameters, **moments})
    report = export_hf(tmp_path / "trained", tmp_path / "out", Rewrite(PARTED), config=tmp_path / "hf")
    assert len(report.left_out) == len(moments)
    assert digests(loaded("llama", tmp_path / "out").state_dict()) == digests(model.state_dict())


def test_only_hugging_face_files_are_imported(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    with pytest.raises(
        CheckpointError, match="is a shardwise checkpoint; give a folder of safetensors files, or use convert"
    ):
        import_hf(tmp_path / "a", tmp_path / "b")
    with pytest.raises(
        CheckpointError, match="holds no checkpoint: it does not exist; give a folder of safetensors files"
    ):
        import_hf(tmp_path / "none", tmp_path / "b")


def test_the_files_say_that_they_are_of_torch(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(200), "y": torch.ones(200)})
    export_hf(tmp_path / "a", tmp_path / "out", max_shard_bytes=800)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"x": files[0].name, "y": files[1].name}


def test_a_save_whose_certificate_cannot_be_written_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    checkpoint.convert(tmp_path / "a", tmp_path / "hf", to="hf")
    counting = Counting(LocalStore(tmp_path / "counted"))
    import_hf(tmp_path / "hf", counting)
    writing = max(number for number, each in enumerate(counting.operations, 1) if each.name.endswith("round-trip.json"))
    failing = FailingAt(LocalStore(tmp_path / "b"), writing, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(
        CheckpointError,
        match=r"round-trip\.json cannot be written: No space left on device; without its certificate the save",
    ):
        import_hf(tmp_path / "hf", failing)
    assert not list((tmp_path / "b").rglob("*.json"))


@pytest.mark.parametrize("name", REWRITES)
def test_without_a_rewrite_a_model_keeps_its_names(tmp_path: Path, name: str) -> None:
    model = build(name)
    source = save(model, tmp_path / "hf", 1 << 30)
    import_hf(source, tmp_path / "save")
    assert digests(tensors_of(tmp_path / "save")) == digests(tensors_of(source))
    export_hf(tmp_path / "save", tmp_path / "out")
    assert digests(loaded(name, tmp_path / "out").state_dict()) == digests(model.state_dict())
