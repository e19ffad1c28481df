"""`model.initialise = "by module"`: initial parameters that do not depend on what else is built."""

from pathlib import Path

import pytest
import torch

from shardwise.errors import ModelError
from shardwise.train.run_build import build_model
from tests.engine.initialised import initialise
from tests.train.runs import finished, laid_out, small_run
from tests.train.test_references import llama_words

BY_MODULE = "model.initialise=by module"


def parameters(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    config = small_run(folder, BY_MODULE, *words)
    model = build_model(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    initialise(model, config.train.seed)
    return {name: each.detach() for name, each in model.named_parameters()}


def test_the_seed_and_the_names_alone_decide(tmp_path: Path) -> None:
    torch.manual_seed(99)
    short, long, other = (
        parameters(tmp_path, *llama_words(num_hidden_layers=layers), f"train.seed={seed}")
        for layers, seed in ((1, 5), (2, 5), (1, 6))
    )
    assert short.keys() < long.keys()
    assert all(torch.equal(values, long[name]) for name, values in short.items())
    assert not torch.equal(short["lm_head.weight"], other["lm_head.weight"])


def test_a_parameter_that_nobody_initialises_is_named(tmp_path: Path) -> None:
    (tmp_path / "gap.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.ones(2))\n"
    )
    with pytest.raises(ModelError, match=r'model.initialise = "by module"(.|\n)*parameter \'scale\'(.|\n)*"whole"'):
        parameters(tmp_path, "model.factory=gap.py:Net", "model.config={}")


def test_a_run_says_that_modules_draw_their_own_and_goes_alike_under_every_layout(tmp_path: Path) -> None:
    words = [BY_MODULE, "train.steps=3", "train.microbatch=3"]
    one = finished(small_run(tmp_path, *words))
    said = "initial parameters: drawn by each module, from its name and the seed 5"
    assert said in one.printed
    for axis in ("dp_shard", "pp"):
        two = finished(laid_out(tmp_path, *words, f"mesh.{axis}=2"))
        assert said in two.printed
        assert one.curve("loss") == pytest.approx(two.curve("loss"), rel=1e-5)  # sums in another order
    whole = finished(small_run(tmp_path, *words[1:]))
    assert "initial parameters" not in whole.printed
    assert whole.curve("loss")[0] != one.curve("loss")[0]
