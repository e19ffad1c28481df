"""Which gradients are summed along tp, where the graph of a forward is cut into stages: against one process."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.hybrid_models import assert_close, in_one_process, train
from tests.engine.models import NUM_WORDS, word_batch, word_loss
from tests.engine.pipeline.oracle import Case, adamw
from tests.engine.tensor.cut_models import assert_close as assert_same
from tests.engine.tensor.cut_models import compute_cut, compute_whole


class Heads(nn.Module):
    """Two heads, and a norm that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.q = nn.Linear(4, 4)
        self.head_norm = nn.LayerNorm(2)
        self.o = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.head_norm(self.q(self.norm(x)).unflatten(-1, (-1, 2)))
        out: torch.Tensor = x + self.o(torch.tanh(heads).flatten(-2))
        return out


class Net(nn.Module):
    """Two layers, each on a stage; `is_tied`: with one norm of heads."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 4)
        first, second = Heads(), Heads()
        if is_tied:
            second.head_norm.weight, second.head_norm.bias = first.head_norm.weight, first.head_norm.bias
        self.layers = nn.ModuleList([first, second])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Apart(nn.Module):
    """What is made of heads crosses to another stage, where they are put together: its gradient comes back own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 4)
        self.norm = nn.LayerNorm(4)
        self.q = nn.Linear(4, 4)
        self.head_norm = nn.LayerNorm(2)
        self.last_norm = nn.LayerNorm(2)
        self.o = nn.Linear(4, 4)
        self.head = nn.Linear(4, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(words))
        heads = self.head_norm(self.q(x).unflatten(-1, (-1, 2)))
        out: torch.Tensor = self.head(x + self.o(torch.tanh(self.last_norm(heads)).flatten(-2)))
        return out


class Both(nn.Module):
    """What the first stage gives is read by all ranks, and by each rank for its own outputs of `q`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 4)
        self.q = nn.Linear(4, 4)
        self.o = nn.Linear(4, 4)
        self.head = nn.Linear(4, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        out: torch.Tensor = self.head(x + self.o(self.q(x) * x[..., :2]))
        return out


class Twice(Net):
    """One weight is that of a norm of heads on the first stage, and scales what all ranks have on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(2)
        first, _ = self.layers
        assert isinstance(first, Heads)
        self.scale.weight = first.head_norm.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale(super().forward(words)[..., :2])
        return out


RULES = {"layers.*.q": "column(unit=2)", "layers.*.o": "row(unit=2)"}
APART = {"q": "column(unit=2)", "o": "row(unit=2)"}
STAGES = {"embedding": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}


def case_of(make: type[nn.Module], stages: Mapping[str, int], **settings: bool) -> Case:
    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make(**settings).double()

    batches = [word_batch(seed, 4) for seed in range(2)]
    return Case(make=made, batches=batches, stages=dict(stages), loss=word_loss)


def plan_of(
    mesh: str, rules: Mapping[str, str], stages: Mapping[str, int], *, k: int = 1, schedule: str = "1f1b"
) -> sw.Plan:
    sizes = sw.Mesh.parse(mesh)
    return sw.Plan(
        mesh=sizes,
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(schedule=schedule, stages=dict(stages) if sizes.pp > 1 else None),
        tensor=sw.Tensor(rules=dict(rules)),
        clip_grad_norm=None,
    )


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
@pytest.mark.parametrize(("is_tied", "k"), [(False, 2), (True, 1), (True, 2)])
def test_norms_of_heads_without_a_rule_are_summed_on_every_stage(mesh: str, is_tied: bool, k: int) -> None:
    case = case_of(Net, STAGES, is_tied=is_tied)
    plan = plan_of(mesh, RULES, STAGES, k=k)
    # float64: sums in another order; a gradient that is not summed would be off by its size.
    assert_close(train(case, plan), in_one_process(case, plan), relative=1e-9)


def test_norms_of_heads_are_summed_where_a_rank_has_several_stages() -> None:
    stages = {"embedding": 0, "layers.0": 1, "layers.1": 2, "norm": 3, "head": 3}
    case = case_of(Net, stages, is_tied=True)
    plan = plan_of("pp=2,tp=2", RULES, stages, k=2, schedule="interleaved")
    assert_close(train(case, plan), in_one_process(case, plan), relative=1e-9)


@pytest.mark.parametrize("cut_at", ["q", "head_norm", "last_norm", "o"])
def test_what_crosses_tells_what_its_gradient_is(cut_at: str) -> None:
    names = ["embedding", "norm", "q", "head_norm", "last_norm", "o", "head"]
    stages = {name: int(at >= names.index(cut_at)) for at, name in enumerate(names)}
    case = case_of(Apart, stages)
    plan = plan_of("pp=2,tp=2", APART, stages)
    assert_close(train(case, plan), in_one_process(case, plan), relative=1e-9)


@pytest.mark.parametrize(
    ("make", "rules", "stages", "words"),
    [
        (Both, APART, {"embedding": 0, "q": 1, "o": 1, "head": 1}, "'embedding.weight' are read by all ranks alike"),
        (Twice, RULES, {**STAGES, "scale": 1}, "'layers.0.head_norm.weight' is whole along tp and used on several"),
    ],
)
def test_what_no_sum_makes_right_is_refused_across_stages(
    make: type[nn.Module], rules: Mapping[str, str], stages: Mapping[str, int], words: str
) -> None:
    case = case_of(make, stages)

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            case.make(),
            plan_of("pp=2,tp=2", rules, stages),
            optimizer=adamw,
            loss=lambda output, _: output.square().mean(),
            channel=channel,
        )
        engine.step(case.batches[0])

    with pytest.raises(ModelError, match=words):
        sw.simulate(4, run)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_gradients_are_told_through_compiled_modules() -> None:
    def run(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model(word_batch(0, 2)["words"]).square()
        return out

    def make() -> nn.Module:
        net = Net()
        net.layers[0].compile(backend="aot_eager")
        return net

    got = compute_cut(make, RULES, 2, run, is_completed=True)
    assert got.plan is not None
    norms = {f"layers.{at}.head_norm.{key}" for at in range(2) for key in ("weight", "bias")}
    assert got.plan.summed == norms
    assert_same(got, compute_whole(Net, run))
