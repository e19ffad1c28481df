"""Checkpoints of other programs with an optimizer: every command takes its state right, or says what it leaves."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.cli import main
from shardwise.errors import CheckpointError
from tests.covering import covering

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RATE = 0.01
Optimizers = Callable[[Iterable[Any]], torch.optim.Optimizer]


class _Net(nn.Module):
    """The same shapes several times, so that no shape tells which number is which parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.decoder(torch.tanh(self.encoder(x))))
        return out


class _OwnForm(torch.optim.AdamW):
    """Has its state in a file in another form than in memory, as bitsandbytes has."""

    def state_dict(self) -> dict[str, Any]:
        held = super().state_dict()
        held["state"] = {number: {"packed": dict(state), "count": 3} for number, state in held["state"].items()}
        return held

    def load_state_dict(self, state_dict: Any) -> None:
        state = {number: each["packed"] for number, each in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


class _PythonNumbers(torch.optim.Optimizer):
    """Keeps a factored moment and Python numbers, as Adafactor of transformers does."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["count"] = state.get("count", 0) + 1
                mean = each.grad.square().mean(-1)
                state["row"] = state.get("row", torch.zeros_like(mean)).lerp(mean, 0.5)
                state["size"] = float(each.norm())
                each.sub_(each.grad * group["lr"] / (1 + state["count"] + state["row"].unsqueeze(-1)))


def _swapped(model: nn.Module) -> list[nn.Parameter]:
    named = dict(model.named_parameters())
    return [each for part in ("decoder", "encoder", "norm") for name, each in named.items() if name.startswith(part)]


ORDERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "of the model": lambda model: list(model.parameters()),
    "swapped": _swapped,
    "backward": lambda model: list(model.parameters())[::-1],
    "in two groups": lambda model: [{"params": _swapped(model)[1::2]}, {"params": _swapped(model)[::2], "lr": 0.02}],
}
OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW": lambda given: torch.optim.AdamW(given, lr=RATE),
    "a tensor as rate": lambda given: torch.optim.AdamW(given, lr=torch.tensor(RATE)),
    "momentum": lambda given: torch.optim.SGD(given, lr=RATE, momentum=0.9),
    "Adafactor": lambda given: torch.optim.Adafactor(given, lr=RATE),
    "Python numbers": lambda given: _PythonNumbers(given, lr=RATE),
}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step)) + torch.arange(8).view(2, 4)).square().sum().backward()
        optimizer.step()


def _trained(order: str, make: Optimizers) -> tuple[_Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Net()
    optimizer = make(ORDERS[order](model))
    _train(model, optimizer, range(3))
    return model, optimizer


State = dict[str, Any]


def _file(path: Path, state: State) -> Path:
    torch.save(state, path)
    return path


def _dcp(path: Path, state: State) -> Path:
    save_dcp(state, checkpoint_id=path, no_dist=True)
    return path


def _of_trainer(path: Path, model: State, optimizer: State) -> Path:
    save_file(model, path / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer, path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return path


def _of_accelerate(path: Path, model: State, optimizer: State) -> Path:
    torch.save(model, path / "pytorch_model.bin")
    torch.save(optimizer, path / "optimizer.bin")
    return path


def _converted(path: Path, model: State, optimizer: State) -> Path:
    (path / "from").mkdir()
    report = checkpoint.convert(_of_trainer(path / "from", model, optimizer), path / "save")
    assert report.notes
    return path / "save"


SOURCES: dict[str, Callable[[Path, State, State], Path]] = {
    "a file": lambda path, model, adamw: _file(path / "last.pt", {"model": model, "optimizer": adamw}),
    "a folder of DCP": lambda path, model, adamw: _dcp(path, {"model": model, "optimizer": adamw}),
    "a folder of DCP with a list": lambda path, model, adamw: _dcp(path, {"model": model, "optimizers": [adamw]}),
    "the Trainer's folder": _of_trainer,
    "accelerate's folder": _of_accelerate,
    "Lightning's file": lambda path, model, adamw: _file(
        path / "x.ckpt", {"state_dict": model, "optimizer_states": [adamw]}
    ),
    "a save made of one": _converted,
}


def _stored(source: str, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    return SOURCES[source](path, model.state_dict(), optimizer.state_dict())


def _same(ours: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> None:
    for mine, yours in zip(ours.param_groups, plain.param_groups, strict=True):
        assert mine["lr"] == yours["lr"]
        for one, other in zip(mine["params"], yours["params"], strict=True):
            assert ours.state[one].keys() == plain.state[other].keys()
            for key, value in plain.state[other].items():
                assert type(ours.state[one][key]) is type(value)
                assert torch.equal(torch.as_tensor(ours.state[one][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize(
    ("source", "order", "kind"), covering(list(SOURCES), list(ORDERS), list(OPTIMIZERS), strength=2)
)
def test_the_targets_order_says_whose_numbered_state_is(tmp_path: Path, source: str, order: str, kind: str) -> None:
    make = OPTIMIZERS[kind]
    model, optimizer = _trained(order, make)
    path = _stored(source, tmp_path, model, optimizer)
    again = _Net()
    ours = make(ORDERS[order](again))
    _train(again, ours, range(1))  # its own state has to go
    assert sw.load(path, TorchState(again, ours)).report.notes == ()
    _same(ours, optimizer)
    _train(model, optimizer, range(3, 5))
    _train(again, ours, range(3, 5))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("to", ["", "whole", "dcp"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_parameters_that_had_no_gradient_yet_need_no_state(tmp_path: Path, to: str, is_frozen: bool) -> None:
    def build() -> tuple[_Net, torch.optim.Optimizer]:
        model = _Net()
        model.encoder.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=RATE)
        model.encoder.requires_grad_(is_frozen is False)
        return model, optimizer

    model, optimizer = build()
    for each in (*model.decoder.parameters(), *model.norm.parameters()):
        each.grad = torch.ones_like(each)
    optimizer.step()
    path = _stored("a file", tmp_path, model, optimizer)
    if to:
        checkpoint.convert(path, tmp_path / "made", to=to)  # type: ignore[arg-type]
        path = tmp_path / "made"
    again, ours = build()
    sw.load(path, TorchState(again, ours))
    _same(ours, optimizer)


PLANS = {
    "alone": (1, sw.Plan()),
    "stage 3": (2, sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3))),
    "pp": (2, sw.Plan(mesh=sw.Mesh(pp=2))),
}


@pytest.mark.parametrize(
    ("source", "plan", "kind"),
    [(source, [*PLANS][at % 3], ("AdamW", "momentum")[at % 2]) for at, source in enumerate(SOURCES)],
)
def test_engines_take_it_in_their_order(tmp_path: Path, source: str, plan: str, kind: str) -> None:
    model, optimizer = _trained("swapped", OPTIMIZERS[kind])
    path = _stored(source, tmp_path, model, optimizer)
    num_ranks, chosen = PLANS[plan]

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        again = _Net()
        ours = OPTIMIZERS[kind](_swapped(again))
        engine = sw.parallelize(
            again, chosen, channel=channel, optimizer=ours, loss=lambda output, _: output.square().sum()
        )
        assert sw.load(path, engine).report.notes == ()
        return dict(sw.full(engine, optimizer=True))

    held = sw.simulate(num_ranks, run)[0]
    for name, each in model.named_parameters():
        for key, value in optimizer.state[each].items():
            assert torch.equal(held[f"optimizer/{name}/{key}"], value)


@pytest.mark.parametrize("source", ["a folder of DCP", "the Trainer's folder"])
def test_every_command_says_that_nothing_proves_the_order(tmp_path: Path, source: str) -> None:
    path = str(_stored(source, tmp_path, *_trained("swapped", OPTIMIZERS["AdamW"])))
    [note] = checkpoint.open(path).contents.notes
    assert "guess" in note or "keeps the numbers" in note
    for words in (
        ["ls", path],
        ["verify", path],
        ["diff", path, path],
        ["convert", path, str(tmp_path / "hf"), "--to", "hf"],
        ["average", path, path, "--out", str(tmp_path / "mean")],
    ):
        result = CliRunner().invoke(main, ["ckpt", *words])
        assert (result.exit_code, note in result.output) == (0, True), result.output
    assert note in sw.load(path, TorchState(_Net())).report.notes
    assert note in sw.load(path, _Net().state_dict(), strict=False).report.notes


@pytest.mark.parametrize("source", SOURCES)
def test_an_order_that_does_not_fit_is_refused_with_ways_out(tmp_path: Path, source: str) -> None:
    path = _stored(source, tmp_path, *_trained("swapped", OPTIMIZERS["AdamW"]))
    model = _Net()
    optimizer = OPTIMIZERS["AdamW"](ORDERS["in two groups"](model))
    _train(model, optimizer, range(1))
    before = {each: optimizer.state[each]["exp_avg"].clone() for each in model.parameters()}
    with pytest.raises(CheckpointError, match=r"groups of \[6\] parameters, .* groups of \[3, 3\].*strict=False"):
        sw.load(path, TorchState(model, optimizer))
    report = sw.load(path, TorchState(model, optimizer), strict=False).report
    [note] = report.notes
    # A guess is taken. State that has numbers stays behind, and the optimizer keeps its own.
    kept = all(torch.equal(optimizer.state[each]["exp_avg"], value) for each, value in before.items())
    assert kept == ("keeps the numbers" in note)


def test_several_optimizers_are_told_apart_by_their_shapes_or_as_a_list(tmp_path: Path) -> None:
    def made() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
        both = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
        return both, [torch.optim.AdamW(list(each.parameters())[::-1], lr=RATE) for each in both.values()]

    model, optimizers = made()
    model["two"](model["one"](torch.ones(2, 4))).square().sum().backward()
    for each in optimizers:
        each.step()
    states = [each.state_dict() for each in optimizers]
    torch.save({"state_dict": model.state_dict(), "optimizer_states": states}, tmp_path / "listed.ckpt")
    torch.save({"model": model.state_dict(), "b": states[1], "a": states[0]}, tmp_path / "named.pt")
    again, ours = made()
    sw.load(tmp_path / "listed.ckpt", TorchState(again, *ours))
    for mine, plain in zip(ours, optimizers, strict=True):
        _same(mine, plain)
    with pytest.raises(CheckpointError, match="several optimizers fit"):
        sw.load(tmp_path / "named.pt", TorchState(again, *ours))


def test_an_optimizer_with_a_form_of_its_own_for_files_reads_them_itself(tmp_path: Path) -> None:
    make: Optimizers = lambda given: _OwnForm(given, lr=RATE)  # noqa: E731
    model, optimizer = _trained("swapped", make)
    path = _stored("the Trainer's folder", tmp_path, model, optimizer)
    again = _Net()
    ours = make(_swapped(again))
    sw.load(path, TorchState(again, ours))
    _same(ours, optimizer)
    engine = sw.parallelize(_Net(), sw.Plan(), optimizer=make, loss=lambda output, _: output.sum())
    with pytest.raises(CheckpointError, match=r"TorchState\(model, optimizer\), save that"):
        sw.load(path, engine)
    sw.save(tmp_path / "way_out", TorchState(again, ours))
    sw.load(tmp_path / "way_out", engine)
    held = dict(sw.full(engine, optimizer=True))
    for name, each in model.named_parameters():
        assert torch.equal(held[f"optimizer/{name}/exp_avg"], optimizer.state[each]["exp_avg"])


def test_counts_that_are_python_numbers_become_what_the_optimizer_keeps(tmp_path: Path) -> None:
    # As torch before 1.12 wrote them.
    model, optimizer = _trained("swapped", OPTIMIZERS["AdamW"])
    held = optimizer.state_dict()
    held["state"] = {number: {**state, "step": int(state["step"])} for number, state in held["state"].items()}
    torch.save({"model": model.state_dict(), "optimizer": held}, tmp_path / "old.pt")
    again = _Net()
    ours = OPTIMIZERS["AdamW"](_swapped(again))
    sw.load(tmp_path / "old.pt", TorchState(again, ours))
    _same(ours, optimizer)


def test_renamed_parameters_keep_their_numbers_and_joined_ones_need_the_same_order(tmp_path: Path) -> None:
    model, optimizer = _trained("swapped", OPTIMIZERS["AdamW"])
    torch.save(
        {
            "model": {f"module.{name}": each for name, each in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
        },
        tmp_path / "x.pt",
    )
    again = _Net()
    ours = OPTIMIZERS["AdamW"](_swapped(again))
    names = [name for name, _ in model.named_parameters()]
    plain = sw.Rewrite("\n".join(f"module.{name} -> {name}" for name in names))
    assert sw.load(tmp_path / "x.pt", TorchState(again, ours), rewrite=plain).report.notes == ()
    _same(ours, optimizer)
    joined = sw.Rewrite(
        "module.encoder.bias, module.decoder.bias -> bias, axis=0\n"
        "module.encoder.weight -> e\nmodule.decoder.weight -> d\nmodule.norm.weight -> n\nmodule.norm.bias -> m"
    )

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.d = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))
            self.bias = nn.Parameter(torch.zeros(8))
            self.n, self.m = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    other = Joined()
    optimizer = torch.optim.AdamW([other.d, other.bias, other.e, other.n, other.m])
    with pytest.raises(CheckpointError, match=r"joined or cut parameters"):
        sw.load(tmp_path / "x.pt", TorchState(other, optimizer), rewrite=joined)


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_the_fsdp_folders_of_accelerate_are_one_checkpoint(tmp_path: Path, form: str) -> None:
    model, optimizer = _trained("swapped", OPTIMIZERS["AdamW"])
    weights, moments = get_state_dict(model, optimizer)
    if form == "sharded":
        save_dcp({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
        save_dcp({"optimizer": moments}, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    else:
        torch.save(weights, tmp_path / "pytorch_model_fsdp.bin")
        torch.save(moments, tmp_path / "optimizer.bin")
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    again = _Net()
    ours = torch.optim.AdamW(again.parameters(), lr=5.0)
    loaded = sw.load(tmp_path, TorchState(again, ours))
    assert (loaded.report.step, loaded.report.notes) == (3, ())
    assert loaded["objects"]["scheduler"] == {"last_epoch": 3}
    assert ours.param_groups[0]["lr"] == RATE
    for name, each in again.named_parameters():
        for key, value in optimizer.state[dict(model.named_parameters())[name]].items():
            assert torch.equal(ours.state[each][key], value)
    assert checkpoint.verify(tmp_path).good
    checkpoint.convert(tmp_path, tmp_path / "out")
    assert checkpoint.diff(tmp_path, tmp_path / "out").equal
