"""A vocabulary that is padded on the way into another layout, and cropped on the way back, with its optimizer state."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import CheckpointError, RewriteError
from tests.checkpoint.fused_models import Whole, model_of, wholes
from tests.checkpoint.small_states import same_tensor
from tests.checkpoint.test_matrix import masters_of
from tests.engine.models import NUM_WORDS, word_batch, word_loss
from tests.engine.oracle import share_of

PADDED = NUM_WORDS + 5
PAD = f"""
    embedding.weight -> embedding.weight, pad='[{PADDED},-1]', fill='0.25'
    head.weight -> head.weight, pad='[{PADDED},-1]'
    head.bias -> head.bias, pad='[{PADDED}]', fill='-1e4'
"""
FILLS = {"embedding.weight": 0.25, "head.weight": 0.0, "head.bias": -1e4}


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
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=RULES)),
    "runs": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=3), precision=BFLOAT16),
    "tp and runs": sw.Plan(mesh=sw.Mesh(dp_shard=2, tp=2), tensor=sw.Tensor(rules=RULES), precision=BFLOAT16),
}


def engine_of(layout: str, num_words: int, channel: sw.Channel) -> sw.Engine:
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    model = model_of(partial(Model, num_words))
    return sw.parallelize(model, LAYOUTS[layout], optimizer=optimizer, loss=word_loss, channel=channel)


def train(engine: sw.Engine, updates: range) -> list[float]:
    mesh = engine.plan.mesh
    ranks = mesh.dp_shard
    rank = engine.channel.rank // mesh.tp
    return [engine.step(share_of(word_batch(update, 6), rank, ranks)).loss for update in updates]


def saved(layout: str, path: Path, rewrite: sw.Rewrite | None = None) -> tuple[Whole, list[float]]:
    """Make two updates, and save; the whole state then, and the losses of two more updates."""
    return _run(layout, NUM_WORDS, path, rewrite, is_save=True)


def loaded(layout: str, num_words: int, path: Path, rewrite: sw.Rewrite) -> tuple[Whole, list[float]]:
    """The same of an engine that loads."""
    return _run(layout, num_words, path, rewrite, is_save=False)


def _run(
    layout: str, num_words: int, path: Path, rewrite: sw.Rewrite | None, *, is_save: bool
) -> tuple[Whole, list[float]]:
    def each(channel: sw.Channel) -> tuple[dict[sw.Piece, torch.Tensor], list[float]]:
        engine = engine_of(layout, num_words, channel)
        if is_save:
            train(engine, range(2))
            sw.save(path, engine, rewrite=rewrite, channel=channel)
        else:
            sw.load(path, engine, rewrite=rewrite, channel=channel)
        state = {piece: tensor.clone() for piece, tensor in engine.state().items()}
        return state, train(engine, range(2, 4))

    results = sw.simulate(LAYOUTS[layout].mesh.size, each)
    return wholes(state for state, _ in results), results[0][1]


def padded(whole: Whole) -> Whole:
    """By hand: moments of elements that were never trained are 0."""
    made = {}
    for name, tensor in whole.items():
        parameter = name.removeprefix("optimizer/").partition("/")[0]
        if parameter in FILLS and tensor.dim():
            fill = FILLS[parameter] if parameter == name else 0.0
            tail = (0, 0) * (tensor.dim() - 1)
            tensor = nn.functional.pad(tensor, (*tail, 0, PADDED - NUM_WORDS), value=fill)
        made[name] = tensor
    return made


def check_equal(got: Whole, expected: Whole) -> None:
    got, expected = masters_of(got), masters_of(expected)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert same_tensor(tensor, expected[name].contiguous()), name


@pytest.mark.parametrize(
    ("source", "target"), [("runs", "tp"), ("tp", "tp and runs"), ("one", "runs"), ("tp and runs", "one")]
)
def test_a_vocabulary_is_padded_into_any_layout_and_trains_on_as_without(
    source: str, target: str, tmp_path: Path
) -> None:
    whole, losses = saved(source, tmp_path)
    got, again = loaded(target, PADDED, tmp_path, sw.Rewrite(PAD))
    check_equal(got, padded(masters_of(whole)))
    assert again == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_save_pads_and_a_load_through_the_inverse_crops(source: str, tmp_path: Path) -> None:
    whole, _ = saved(source, tmp_path, sw.Rewrite(PAD))
    stored = {name: sw.checkpoint.open(tmp_path).read(name) for name in sw.checkpoint.open(tmp_path).tensors}
    check_equal(stored, padded(masters_of(whole)))
    got, _ = loaded("tp", NUM_WORDS, tmp_path, sw.Rewrite(PAD).inverse())
    check_equal(got, whole)


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


def test_damage_leaves_the_padding_of_the_target_as_it_was(tmp_path: Path) -> None:
    sw.save(tmp_path, {"w": torch.arange(6.0).view(2, 3)})
    [file] = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    state = {"w": torch.full((4, 3), 7.0)}
    with pytest.raises(sw.ShardwiseError, match="is damaged"):
        sw.load(tmp_path, state, rewrite=sw.Rewrite("w -> w, pad='[4,-1]'"))
    assert (state["w"] == 7).all()


def test_the_command_pads_to_a_parameter_and_goes_back_by_the_record(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    tensors = {"wte": torch.randn(5, 3).bfloat16()}
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "pad.rewrite").write_text("wte -> wte, pad='[{padded_vocab},-1]'\n")
    hub, save, back = (str(tmp_path / name) for name in ("hub", "save", "back"))
    rewrite = ["--rewrite", str(tmp_path / "pad.rewrite"), "--set", "padded_vocab=8"]
    shown = CliRunner().invoke(main, ["ckpt", "convert", hub, save, *rewrite, "--dry-run"])
    assert "wte     [5:8, 0:3]                      fill 0" in shown.output
    assert CliRunner().invoke(main, ["ckpt", "convert", hub, save, *rewrite, "--certify"]).exit_code == 0
    assert sw.checkpoint.open(save).read("wte").tolist() == [*tensors["wte"].tolist(), *[[0.0] * 3] * 3]
    assert CliRunner().invoke(main, ["ckpt", "convert", save, back, "--to", "hf", "--inverse"]).exit_code == 0
    assert same_tensor(load_file(f"{back}/model.safetensors")["wte"], tensors["wte"])


KEPT = f"""
    embedding.weight -> embedding.weight, pad='[{PADDED},-1]', fill='kept'
    head.weight -> head.weight, pad='[{PADDED},-1]', fill='kept'
    head.bias -> head.bias, pad='[{PADDED}]', fill='kept'
"""


@pytest.mark.parametrize("layout", LAYOUTS)
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
    for name in FILLS:
        master = f"optimizer/{name}/master"
        held = master if master in after else name
        assert torch.equal(after[held][NUM_WORDS:], before[held][NUM_WORDS:])
        assert torch.equal(after[held][:NUM_WORDS], saved.read(name))
        moments = after[f"optimizer/{name}/exp_avg"]
        assert torch.equal(moments[:NUM_WORDS], saved.read(f"optimizer/{name}/exp_avg"))
        assert not moments[NUM_WORDS:].any()


def test_only_a_load_has_values_to_keep(tmp_path: Path) -> None:
    state = {name: torch.ones(NUM_WORDS, *([6] if "weight" in name else [])) for name in FILLS}
    sw.save(tmp_path, state)
    with pytest.raises(CheckpointError, match="fill='kept'"):
        sw.checkpoint.convert(tmp_path, tmp_path / "out", rewrite=sw.Rewrite(KEPT))
    for give in (
        lambda: sw.save(tmp_path, state, rewrite=sw.Rewrite(KEPT)),
        lambda: dict(sw.full(state, sw.Rewrite(KEPT))),
    ):
        with pytest.raises(RewriteError, match="here is no load"):
            give()


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
