"""A vocabulary that is padded on the way into another layout, and cropped on the way back, with its optimizer state."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.errors import RewriteError
from tests.checkpoint.layouts import Whole
from tests.checkpoint.small_states import same_tensor
from tests.oracle.batches import NUM_WORDS, word_batch, word_loss

PADDED = NUM_WORDS + 5


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


KEPT = f"""
    embedding.weight -> embedding.weight, pad='[{PADDED},-1]', fill='kept'
    head.weight -> head.weight, pad='[{PADDED},-1]', fill='kept'
    head.bias -> head.bias, pad='[{PADDED}]', fill='kept'
"""


class Model(nn.Module):
    """Embedding and head apart, and a bias: words that nobody says have no probability."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.head = nn.Linear(6, num_words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(torch.tanh(self.up(self.embedding(words)))))
        return out


RULES = {"embedding": "vocab", "up": "column", "down": "row", "head": "vocab"}
BFLOAT16 = sw.Precision(compute="bfloat16")
LAYOUTS: Mapping[str, sw.Plan] = {
    "one": sw.Plan(),
    "runs": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=3), precision=BFLOAT16),
    "tp and runs": sw.Plan(mesh=sw.Mesh(dp_shard=2, tp=2), tensor=sw.Tensor(rules=RULES), precision=BFLOAT16),
}


def engine_of(layout: str, num_words: int, channel: sw.Channel) -> sw.Engine:
    """A fresh engine, the same for every caller."""
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(num_words)
    return sw.parallelize(model, LAYOUTS[layout], optimizer=optimizer, loss=word_loss, channel=channel)


@pytest.mark.parametrize("layout", ["runs", "tp and runs"])
def test_new_rows_of_a_larger_model_keep_their_values(tmp_path: Path, layout: str) -> None:
    def save(channel: sw.Channel) -> None:
        engine = engine_of("one", NUM_WORDS, channel)
        engine.step(word_batch(0, 4))
        sw.save(tmp_path, engine, channel=channel)

    def load(channel: sw.Channel) -> tuple[Whole, Whole]:
        engine = engine_of(layout, PADDED, channel)
        before = dict(sw.full(engine, optimizer=True))
        sw.load(tmp_path, engine, rewrite=sw.Rewrite(KEPT), channel=channel)
        return before, dict(sw.full(engine, optimizer=True))

    sw.simulate(1, save)
    before, after = sw.simulate(LAYOUTS[layout].mesh.size, load)[0]
    saved = sw.checkpoint.open(tmp_path)
    for name in ("embedding.weight", "head.weight", "head.bias"):
        master = f"optimizer/{name}/master"
        held = master if master in after else name
        assert torch.equal(after[held][NUM_WORDS:], before[held][NUM_WORDS:])
        assert torch.equal(after[held][:NUM_WORDS], saved.read(name))
        moments = after[f"optimizer/{name}/exp_avg"]
        assert torch.equal(moments[:NUM_WORDS], saved.read(f"optimizer/{name}/exp_avg"))
        assert not moments[NUM_WORDS:].any()


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
