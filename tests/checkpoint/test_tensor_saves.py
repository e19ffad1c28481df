"""Saves and full tensors of engines that cut single parameters, as users of checkpoints see them."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import shardwise as sw
from shardwise.cli import main
from tests.checkpoint.layouts import LAYOUTS, Whole, assembled, engine_of, odd, train
from tests.checkpoint.test_matrix import masters_of, same_bits, state_of

CUT = ["tensor-two-parts-x-two", "tensor-three-bf16", "tensor-two-x-three-stage2", "all-stage3"]


def save(name: str, path: Path) -> Whole:
    """After one update."""

    def run(channel: sw.Channel) -> dict[sw.Piece, torch.Tensor]:
        engine = engine_of(LAYOUTS[name], channel)
        train(engine, channel, [0])
        sw.save(path, engine, step=1, channel=channel)
        return state_of(engine)

    return assembled(sw.simulate(LAYOUTS[name].mesh.size, run))


def ckpt(*words: str | Path) -> Result:
    result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def shape_of(name: str) -> tuple[int, ...]:
    """Of a parameter, or of its state."""
    parameter = name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else name
    if name.endswith("/step"):
        return ()
    return tuple({**dict(odd().named_parameters()), **dict(odd().named_buffers())}[parameter].shape)


@pytest.mark.parametrize("name", CUT)
def test_a_plain_dict_takes_a_save_of_parts(name: str, tmp_path: Path) -> None:
    saved = save(name, tmp_path)
    target = {key: torch.full(shape_of(key), 3, dtype=tensor.dtype) for key, tensor in saved.items()}
    sw.checkpoint.load(tmp_path, target)
    assert [key for key in saved if not same_bits(target[key], saved[key])] == []


def test_the_commands_read_a_save_of_parts(tmp_path: Path) -> None:
    cut, one = tmp_path / "cut", tmp_path / "one"
    saved = save("tensor-two-parts-x-two", cut)

    def load(channel: sw.Channel) -> None:
        engine = engine_of(LAYOUTS["one"], channel, seed=4)
        sw.load(cut, engine, channel=channel)
        sw.save(one, engine, step=1, channel=channel)

    sw.simulate(1, load)
    listed = ckpt("ls", cut)
    assert listed.exit_code == 0
    assert re.search(r"^\s*up\.weight .*33.*7", listed.stdout, re.MULTILINE), listed.stdout
    assert "dp_shard=2,tp=2" in listed.stdout
    assert ckpt("verify", cut).exit_code == 0
    same = ckpt("diff", cut, one)
    assert same.exit_code == 0, same.stdout
    for words in (["--to", "whole"], ["--to", "pieces"]):
        made = tmp_path / words[1]
        assert ckpt("convert", cut, made, *words).exit_code == 0
        assert ckpt("diff", made, one).exit_code == 0
    assert ckpt("convert", cut, tmp_path / "hf", "--to", "hf").exit_code == 0
    plain = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    for key, tensor in plain.items():
        assert same_bits(tensor, saved[key]), key
    assert {"up.weight", "gates.weight", "embedding.weight"} <= plain.keys()


@pytest.mark.parametrize("name", ["tensor-two-parts-x-two", "stage3-two-bf16", "stage3-three-whole", "all-stage3"])
def test_full_tensors_come_whole_and_in_order_from_every_layout(name: str) -> None:
    plan = LAYOUTS[name]

    def run(channel: sw.Channel) -> tuple[Mapping[str, torch.Tensor], dict[sw.Piece, torch.Tensor], list[float]]:
        engine = engine_of(plan, channel)
        train(engine, channel, [0])
        full = dict(sw.full(engine, channel=channel))
        return full, state_of(engine), train(engine, channel, [1])

    def without(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel)
        train(engine, channel, [0])
        return train(engine, channel, [1])

    ranks = sw.simulate(plan.mesh.size, run)
    whole = assembled(state for _, state, _ in ranks)
    order = list(odd().state_dict())
    for full, _, losses in ranks:
        assert list(full) == order
        for key, tensor in full.items():
            assert same_bits(tensor, whole["embedding.weight" if key == "head.weight" else key]), key
            assert tuple(tensor.shape) == tuple(odd().state_dict()[key].shape)
        assert losses == ranks[0][2]
    assert [losses for _, _, losses in ranks] == sw.simulate(plan.mesh.size, without), "it changes nothing"
    assert masters_of(whole).keys() >= set(order) - {"head.weight"}
