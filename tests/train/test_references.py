"""Names in a configuration, and the models and optimizers behind them."""

import sys
from pathlib import Path

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.train import check_references
from shardwise.train.references import resolve
from shardwise.train.run_build import build_model, optimizer_factory
from tests.train.runs import small_run

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama_words(**settings: object) -> list[str]:
    return [
        "model.factory=transformers:LlamaForCausalLM",
        "model.config={}",
        *(f"model.config.{key}={value}" for key, value in {**LLAMA, **settings}.items()),
    ]


def test_a_name_in_a_module_and_one_in_a_file_are_found(tmp_path: Path) -> None:
    assert resolve("torch.optim:AdamW", folder=tmp_path, key="x") is torch.optim.AdamW
    (tmp_path / "mine.py").write_text("class Net: ...\ndef loss(): ...\n")
    net, loss = (resolve(f"mine.py:{name}", folder=tmp_path, key="x") for name in ("Net", "loss"))
    assert (net.__name__, loss.__name__) == ("Net", "loss")


def test_a_file_is_executed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("print('executed')\nclass Net: ...\n")
    assert resolve("mine.py:Net", folder=tmp_path, key="x") is resolve("mine.py:Net", folder=tmp_path, key="x")
    assert capsys.readouterr().out == "executed\n"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_colon", "is not of the form"),
        (":name", "is not of the form"),
        ("torch.nn:", "is not of the form"),
        ("absent_package.net:Net", "absent_package.net cannot be imported: ModuleNotFoundError"),
        ("torch.nn:Nothing", "torch.nn has no Nothing"),
        ("absent.py:Net", "no file .*absent.py"),
        ("raising.py:Net", "raising.py cannot be imported: ZeroDivisionError"),
        ("torch:__version__", "not something that can be called"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(tmp_path: Path, reference: str, message: str) -> None:
    (tmp_path / "raising.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=f"^model.factory: .*{message}"):
        resolve(reference, folder=tmp_path, key="model.factory")


def test_a_file_that_raised_raises_again_when_asked_again(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            resolve("raising.py:Net", folder=tmp_path, key="model.factory")


def test_all_names_that_cannot_be_had_are_listed_at_once(tmp_path: Path) -> None:
    words = ["model.factory=net.py:Nett", "model.loss=absent.py:loss", "train.optimizer=torch.optim:Adamm"]
    with pytest.raises(ConfigError) as caught:
        check_references(small_run(tmp_path, *words))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "model.factory",
        "model.loss",
        "train.optimizer",
    ]


def test_a_model_class_of_transformers_gets_its_configuration_from_the_table(tmp_path: Path) -> None:
    model = build_model(small_run(tmp_path, *llama_words()))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == 2 * 256 * 16 + 7 * 16 * 16 + 3 * 16


def test_a_key_that_the_configuration_class_does_not_know_is_refused_with_the_nearest(tmp_path: Path) -> None:
    config = small_run(tmp_path, *llama_words(hiden_size=16, colour=1))
    with pytest.raises(ConfigError) as caught:
        build_model(config)
    assert caught.value.problems == (
        "model.config.hiden_size: LlamaConfig has no such setting; did you mean model.config.hidden_size?",
        "model.config.colour: LlamaConfig has no such setting",
    )


def test_the_seed_alone_decides_the_initial_parameters(tmp_path: Path) -> None:
    models: list[torch.nn.Module] = []
    for seed in (5, 5, 6):
        torch.manual_seed(99 + len(models))
        models.append(build_model(small_run(tmp_path, f"train.seed={seed}")))
    same, again, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_only_matrices_have_weight_decay(tmp_path: Path) -> None:
    config = small_run(tmp_path, "train.optimizer=torch.optim:SGD", "train.optimizer_options.momentum=0.5")
    model = build_model(config)
    optimizer = optimizer_factory(config, model)(list(model.parameters()))
    assert isinstance(optimizer, torch.optim.SGD)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "embedding.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "head.weight": 0.1,
        "head.bias": 0.0,
    }
    assert all(group["lr"] == 0.02 and group["momentum"] == 0.5 for group in optimizer.param_groups)


def test_a_model_of_transformers_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'transformers cannot be imported.*pip install "shardwise\[train\]"'):
        resolve("transformers:LlamaForCausalLM", folder=Path(), key="model.factory")
