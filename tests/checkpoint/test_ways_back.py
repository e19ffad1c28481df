"""The way back after training in fused form: a save knows it, and `--like` gives the form of an original."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import TorchState
from shardwise.cli import main

FUSE = """
    m.$L.q, m.$L.k, m.$L.v -> t.$L.a, fused_qkv_old, num_heads=4, num_key_value_groups=2, axis=0
    t.$L.a -> layers.$L.qkv.weight
    m.$L.gate^T, m.$L.up^T -> t.$L.b, fused_ffn
    m.$L.experts.*.w -> layers.$L.experts, stack=0, dtype='float32'
"""
NAME = "t.$L.b^T -> layers.$L.gate_up.weight; m.$L.o -> layers.$L.out.weight; m.$L.down -> layers.$L.down.weight"
REWRITE = sw.Rewrite(FUSE) >> sw.Rewrite(NAME)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.gate_up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 8, 8))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + torch.einsum("bi,eij->bj", states, self.experts)
        states = states + self.out(torch.tanh(self.qkv(states)))
        out: torch.Tensor = states + self.down(torch.tanh(self.gate_up(states)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            states = layer(states)
        return states


def engine_of(mesh: str, channel: sw.Channel, *, ffn: str = "column") -> sw.Engine:
    sizes = sw.Mesh.parse(mesh)
    rules = {
        "layers.*.qkv": "column",
        "layers.*.out": "row",
        "layers.*.gate_up": ffn,
        "layers.*.down": ffn.replace("column", "row"),
    }
    plan = sw.Plan(
        mesh=sizes,
        tensor=sw.Tensor(rules=rules if sizes.tp > 1 else None),
        merge=sw.Merge(microbatches=2) if sizes.pp > 1 else sw.Merge(),
    )
    return sw.parallelize(Net(), plan, optimizer=sgd, loss=loss, channel=channel)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return (output.float() - 1).square().mean()


FILES = {
    "config.json": b'{"architectures": ["Hub"],   "dtype": "bfloat16"}\n',
    "generation_config.json": b'{"do_sample":true}',
    "tokenizer.json": b"{}  ",
}


def hub(folder: Path) -> Path:
    """In two files with an index, in bfloat16, one norm in float32."""
    folder.mkdir()
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    for at in range(2):
        tensors = {f"m.{at}.{name}": torch.randn(size, 8) for name, size in (("v", 4), ("q", 8), ("k", 4))}
        tensors |= {f"m.{at}.{name}": torch.randn(8, 8) for name in ("gate", "up")}
        tensors |= {f"m.{at}.{name}": torch.randn(8, 16) for name in ("down", "o")}
        tensors |= {f"m.{at}.experts.{number}.w": torch.randn(8, 8) for number in range(3)}
        halves = {name: each.bfloat16() if name[-1] != "o" else each for name, each in tensors.items()}
        file = f"model-{at + 1:05d}-of-00002.safetensors"
        save_file(halves, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(halves, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def by_hand(whole: Mapping[str, torch.Tensor], tp: int, *, of_ffn: int | None = None) -> dict[str, torch.Tensor]:
    """The inverse, written without the library: for so many ranks, what each has of query, key, value, gate and up.

    of_ffn: for how many gate and up are laid out, if for others.
    """
    made: dict[str, torch.Tensor] = {}
    for at in range(2):
        layer = {name.removeprefix(f"layers.{at}."): each for name, each in whole.items()}
        for fused, sizes in (("qkv", {"q": 2, "k": 1, "v": 1}), ("gate_up", {"gate": 1, "up": 1})):
            ranks = [rank.split([size * rank.shape[0] // sum(sizes.values()) for size in sizes.values()])
                     for rank in layer[f"{fused}.weight"].chunk(of_ffn or tp if "gate" in sizes else tp)]  # fmt: skip
            for name, parts in zip(sizes, zip(*ranks, strict=True), strict=True):
                made[f"m.{at}.{name}"] = torch.cat(parts).bfloat16()
        made |= {f"m.{at}.experts.{number}.w": layer["experts"][number].bfloat16() for number in range(3)}
        made |= {f"m.{at}.down": layer["down.weight"].bfloat16(), f"m.{at}.o": layer["out.weight"]}
    return made


def convert(*words: str | Path) -> Result:
    result = CliRunner().invoke(main, ["ckpt", "convert", *map(str, words)])
    assert "Traceback" not in result.output
    return result


def form_of(folder: Path) -> dict[str, Any]:
    """All that there is but the values: names, shapes and dtypes by file, and the bytes of other files."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
                found[path.name] = file.metadata(), {n: (each.shape, each.dtype) for n, each in tensors.items()}
        elif path.name.endswith(".index.json"):
            found[path.name] = json.loads(path.read_text())["weight_map"]
        else:
            found[path.name] = path.read_bytes()
    return found


def assert_like(folder: Path, original: Path, expected: Mapping[str, torch.Tensor]) -> None:
    assert form_of(folder) == form_of(original)
    found = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def trained(
    source: Path, path: Path, mesh: str, rewrite: sw.Rewrite | None, *, ffn: str = "column"
) -> dict[str, torch.Tensor]:
    """Load into an engine, train, save; the weights then."""

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = engine_of(mesh, channel, ffn=ffn)
        sw.load(source, engine, rewrite=rewrite, cast=True, channel=channel)
        before = dict(sw.full(engine, channel=channel))
        engine.step({"states": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))})
        sw.save(path, engine, step=1, channel=channel)
        after = dict(sw.full(engine, channel=channel))
        assert not any(torch.equal(before[name], tensor) for name, tensor in after.items())
        return after

    return sw.simulate(sw.Mesh.parse(mesh).size, run)[0]


@pytest.mark.parametrize(("mesh", "tp"), [("tp=2", 2), ("pp=2", 1)])
def test_a_fused_model_goes_back_to_the_form_of_its_hub(tmp_path: Path, mesh: str, tp: int) -> None:
    source = hub(tmp_path / "hub")
    whole = trained(source, tmp_path / "save", mesh, REWRITE)
    result = convert(tmp_path / "save", tmp_path / "out", "--to", "hf", "--like", source)
    assert result.exit_code == 0, result.output
    assert "tensors cast to the wanted dtype" in result.output
    assert_like(tmp_path / "out", source, by_hand(whole, tp))
    # The same by the inverse: of the record, and of the rewrite by name.
    (tmp_path / "r.rewrite").write_text(str(REWRITE))
    words = ("--to", "hf", "--rewrite", tmp_path / "r.rewrite", "--inverse", "--like", source)
    assert convert(tmp_path / "save", tmp_path / "named", *words).exit_code == 0
    assert_like(tmp_path / "named", source, by_hand(whole, tp))
    # Without an original the values come back, in the dtypes in which they were trained.
    result = convert(tmp_path / "save", tmp_path / "inverse", "--inverse", "--to", "hf", "--certify", "--lossy")
    assert result.exit_code == 0, result.output
    back = load_file(tmp_path / "inverse" / "model.safetensors")
    assert back.keys() == by_hand(whole, tp).keys()
    assert all(torch.equal(back[name].to(each.dtype), each) for name, each in by_hand(whole, tp).items())


@pytest.mark.parametrize(("then", "tp", "now"), [("tp=1", 1, "tp=2"), ("tp=2", 2, "tp=4")])
def test_a_save_that_is_cut_in_other_ways_now_goes_back_as_it_was_fused(
    tmp_path: Path, then: str, tp: int, now: str
) -> None:
    """Without a record of the degree each of these gave gate and up other rows, without a word."""
    source = hub(tmp_path / "hub")
    trained(source, tmp_path / "first", then, REWRITE)
    whole = trained(tmp_path / "first", tmp_path / "second", now, None)
    sw.checkpoint.convert(tmp_path / "second", tmp_path / "third", to="whole")
    for name in ("second", "third"):
        result = convert(tmp_path / name, tmp_path / f"{name} out", "--to", "hf", "--like", source)
        assert result.exit_code == 0, result.output
        assert_like(tmp_path / f"{name} out", source, by_hand(whole, tp))
    # A rewrite that leaves degrees open, on the way into an engine that has gate and up apart: the record tells.
    open_degrees = "layers.0.gate_up.weight -> m.0.gate, m.0.up, fused_ffn, axis=0"
    parts = {name: torch.zeros(8, 8) for name in ("m.0.gate", "m.0.up")}
    sw.load(tmp_path / "second", parts, rewrite=sw.Rewrite(open_degrees), strict=False)
    assert all(torch.equal(each.bfloat16(), by_hand(whole, tp)[name]) for name, each in parts.items())


def test_parts_that_lie_one_after_the_other_whatever_the_ranks_are_fused_for_one(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub")
    whole = trained(source, tmp_path / "save", "tp=2", REWRITE, ffn="column(parts=2)")
    assert convert(tmp_path / "save", tmp_path / "out", "--to", "hf", "--like", source).exit_code == 0
    assert_like(tmp_path / "out", source, by_hand(whole, 2, of_ffn=1))


def test_a_live_engine_that_was_laid_out_anew_gives_what_was_fused_as_it_was(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub")

    def run(channel: sw.Channel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = engine_of("tp=2", channel)
        sw.load(source, engine, rewrite=REWRITE, cast=True, channel=channel)
        engine = sw.relayout(engine, sw.Plan(mesh=sw.Mesh(dp_shard=2)))
        inverse = REWRITE.inverse()
        sw.save(tmp_path / "apart", engine, rewrite=inverse, channel=channel)
        return dict(sw.full(engine, channel=channel)), dict(sw.full(engine, inverse, channel=channel))

    whole, apart = sw.simulate(2, run)[0]
    expected = by_hand(whole, 2)
    assert apart.keys() == expected.keys()
    assert all(torch.equal(each.to(expected[name].dtype), expected[name]) for name, each in apart.items())
    saved = sw.checkpoint.open(tmp_path / "apart")
    assert all(torch.equal(saved.read(name), each) for name, each in apart.items())


def test_masters_give_the_values_where_the_hub_has_more_bits(tmp_path: Path) -> None:
    like = tmp_path / "hub.safetensors"
    save_file({"a": torch.randn(4, 4), "b": torch.randn(4, 4).bfloat16()}, like)
    masters = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    stored = {f"optimizer/{name}/master": each for name, each in masters.items()}
    stored |= {name: each.bfloat16() for name, each in masters.items()}
    sw.save(tmp_path / "save", stored)
    rewrite = sw.Rewrite("x -> a; y -> b")
    report = sw.checkpoint.convert(tmp_path / "save", tmp_path / "out", to="hf", rewrite=rewrite, like=like)
    assert report.from_masters == ("optimizer/x/master",)
    found = load_file(tmp_path / "out" / "hub.safetensors")
    assert torch.equal(found["a"], masters["x"])
    assert torch.equal(found["b"], masters["y"].bfloat16())


def refused(*words: str | Path) -> str:
    result = convert(*words)
    assert result.exit_code == 1, result.output
    return result.stderr


def test_what_does_not_take_the_form_is_said_in_words(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 4), "b": torch.zeros(3, 4)}, tmp_path / "hub.safetensors")
    like = ("--to", "hf", "--like", tmp_path / "hub.safetensors")
    sw.save(tmp_path / "plain", {"x": torch.zeros(5, 4)})
    assert (
        "plain/save-00000001 does not say which rewrite made it; name the rewrite to undo (--rewrite NAME"
        in refused(tmp_path / "plain", tmp_path / "out", *like)
    )
    sw.save(tmp_path / "same", {"a": torch.zeros(2, 5), "b": torch.zeros(3, 4, dtype=torch.int32)})
    message = refused(tmp_path / "same", tmp_path / "out", *like)
    assert "cannot be written in the form of" in message
    assert "a: shape [2, 4] in the target, [2, 5] by the rewrite" in message
    assert "b: dtype float32 in the target, int32 by the rewrite" in message
    (tmp_path / "r.rewrite").write_text("x -> a")
    message = refused(tmp_path / "plain", tmp_path / "out", "--rewrite", tmp_path / "r.rewrite", *like)
    assert "b: the target wants it, and the rewrite does not make it" in message
    save_file({"c": torch.zeros(2, 4)}, tmp_path / "other.safetensors")
    sw.checkpoint.convert(tmp_path / "other.safetensors", tmp_path / "rewritten", rewrite=sw.Rewrite("c -> d"))
    message = refused(tmp_path / "rewritten", tmp_path / "out", *like)
    assert "has on record does not lead back to" in message
    assert "there is no tensor c" in message
    assert not (tmp_path / "out").exists()
    with pytest.raises(sw.ShardwiseError, match="only files of Hugging Face"):
        sw.checkpoint.convert(tmp_path / "plain", tmp_path / "out", like=tmp_path / "hub.safetensors")
    with pytest.raises(sw.ShardwiseError, match="both say dtypes"):
        sw.checkpoint.convert(
            tmp_path / "plain", tmp_path / "out", to="hf", dtype="float32", like=tmp_path / "hub.safetensors"
        )


def test_values_of_several_loads_are_said_to_be_so(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub")
    sw.save(tmp_path / "experts", {"layers.0.experts": torch.randn(3, 8, 8)})
    sw.save(tmp_path / "named", {"e": torch.randn(3, 8, 8)})
    engine = engine_of("tp=1", sw.default_channel())
    sw.load(source, engine, rewrite=REWRITE, cast=True)
    sw.load(tmp_path / "experts", engine, strict=False)
    sw.load(tmp_path / "named", engine, rewrite=sw.Rewrite("e -> layers.1.experts"), strict=False)
    sw.save(tmp_path / "save", engine)
    message = refused(tmp_path / "save", tmp_path / "out", "--to", "hf", "--like", source)
    assert "came by 3 loads, and each left some as they were: one by `m.$L.q, m.$L.k, m.$L.v ->" in message
    assert "then one without a rewrite; then one by `e -> layers.1.experts`" in message
    (tmp_path / "r.rewrite").write_text(str(REWRITE))
    words = ("--to", "hf", "--rewrite", tmp_path / "r.rewrite", "--inverse", "--like", source)
    assert convert(tmp_path / "save", tmp_path / "out", *words).exit_code == 0
    assert_like(tmp_path / "out", source, by_hand(dict(sw.full(engine)), 1))
    # A load of everything is one load again.
    sw.load(source, engine, rewrite=REWRITE, cast=True)
    sw.save(tmp_path / "again", engine)
    assert convert(tmp_path / "again", tmp_path / "back", "--to", "hf", "--like", source).exit_code == 0


def test_values_that_came_through_no_rewrite_forget_the_one_before_and_a_plain_program_remembers(
    tmp_path: Path,
) -> None:
    source = hub(tmp_path / "hub")
    engine = engine_of("tp=1", sw.default_channel())
    sw.save(tmp_path / "fresh", engine)
    sw.load(source, engine, rewrite=REWRITE, cast=True)
    sw.load(tmp_path / "fresh", engine)
    sw.save(tmp_path / "again", engine)
    said = "does not say which rewrite made it; name the rewrite to undo (--rewrite NAME --inverse)"
    assert said in refused(tmp_path / "again", tmp_path / "out", "--inverse")
    model = Net()
    state = TorchState(model, sgd(list(model.parameters())))
    sw.load(source, state, rewrite=REWRITE, cast=True)
    sw.save(tmp_path / "plain", state)
    assert sw.checkpoint.recorded_rewrite(tmp_path / "plain") == REWRITE


def test_a_lossy_way_back_wants_a_word(tmp_path: Path) -> None:
    (tmp_path / "narrow.rewrite").write_text("a -> b, dtype='bfloat16'\n")
    sw.save(tmp_path / "a", {"a": torch.ones(3)})
    assert convert(tmp_path / "a", tmp_path / "b", "--rewrite", tmp_path / "narrow.rewrite").exit_code == 0
    assert "(--lossy)" in refused(tmp_path / "b", tmp_path / "c", "--inverse")
    assert convert(tmp_path / "b", tmp_path / "c", "--inverse", "--lossy").exit_code == 0
    assert sw.checkpoint.open(tmp_path / "c").read("a").dtype == torch.float32
