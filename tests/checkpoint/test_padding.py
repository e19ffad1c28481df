"""A vocabulary that is padded on the way into another layout, and cropped on the way back, with its optimizer state."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise.errors import RewriteError
from tests.checkpoint.cut_tensors import Cut, tensors_of
from tests.checkpoint.rewritten_tensors import load_all, same_pieces, shares_of
from tests.checkpoint.small_states import same_tensor


def test_a_crop_comes_back_only_where_the_text_says_what_the_elements_were(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(12.0).view(4, 3), "b": torch.tensor([1.0, 2.0, -1.0, -1.0])}
    sw.save(tmp_path / "save", tensors)
    text = "w -> w, crop='[2,-1]'{}; b -> b, crop='[2]', fill='-1'"
    with pytest.raises(RewriteError, match=r"crops w from \[4, 3\] to \[2, 3\]: no fill= says"):
        sw.Rewrite(text.format("")).inverse(tensors)
    for fill in ("", ", fill=9"):
        report = sw.checkpoint.convert(
            tmp_path / "save", tmp_path / f"cropped{fill}", rewrite=sw.Rewrite(text.format(fill)), certify=True
        )
        assert report.certificate is not None
        assert {each.name: each.why for each in report.certificate.tensors} == {
            "w": "6 of 12 elements are cropped", "b": ""
        }  # fmt: skip
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
    sw.load(tmp_path / "cropped, fill=9", state, rewrite=sw.Rewrite(text.format(", fill=9")).inverse())
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5], [9, 9, 9], [9, 9, 9]]
    assert same_tensor(state["b"], tensors["b"])


@pytest.mark.parametrize("how", ["rows", "columns", "runs"])
def test_new_rows_of_a_larger_target_keep_their_values(tmp_path: Path, how: Cut) -> None:
    """Moments of new rows are zeros. A first rank that has the last rows has nothing to read."""
    names = ("w", "optimizer/w/exp_avg")
    sw.save(tmp_path, {name: torch.randn(6, 4) for name in names})
    saved = tensors_of(tmp_path)
    expected = {"optimizer/w/master": torch.randn(9, 4), "optimizer/w/exp_avg": torch.zeros(9, 4)}
    target = {name: torch.ones(9, 4) if "avg" in name else each.clone() for name, each in expected.items()}
    for each, name in zip(expected.values(), names, strict=True):
        each[:6] = saved[name]
    got = shares_of(target, how, 3)[::-1]
    load_all(tmp_path, got, rewrite=sw.Rewrite("w -> w, pad='[9,-1]', fill='kept'"))
    assert all(same_pieces(*pair) for pair in zip(got, shares_of(expected, how, 3)[::-1], strict=True))


@pytest.mark.parametrize("through", ["hf", "save"])
def test_a_configuration_has_the_size_of_the_vocabulary(tmp_path: Path, through: str) -> None:
    (tmp_path / "from").mkdir()
    save_file(
        {"embedding.weight": torch.ones(6, 2), "up.weight": torch.ones(6, 6)}, tmp_path / "from/model.safetensors"
    )
    config = {"vocab_size": 6, "hidden_size": 6, "text_config": {"vocab_size": 6}, "other_vocab_size": 5}
    (tmp_path / "from/config.json").write_text(json.dumps(config))
    pad = sw.Rewrite("embedding.weight -> embedding.weight, pad='[8,-1]'")
    there, source = tmp_path / "there", tmp_path / "from"
    if through == "save":
        sw.checkpoint.convert(source, tmp_path / "save", rewrite=pad)
        sw.checkpoint.convert(tmp_path / "save", there, to="hf")
    else:
        sw.checkpoint.convert(source, there, to="hf", rewrite=pad)
    found = json.loads((there / "config.json").read_text())
    assert found == {"vocab_size": 8, "hidden_size": 6, "text_config": {"vocab_size": 8}, "other_vocab_size": 5}
    crop = sw.Rewrite("embedding.weight -> embedding.weight, crop='[6,-1]', fill=0")
    sw.checkpoint.convert(there, tmp_path / "back", to="hf", rewrite=crop)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
