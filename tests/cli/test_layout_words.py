"""The LAYOUT of `shardwise verify`: a mesh, and settings."""

from pathlib import Path as FilePath

import pytest

import shardwise as sw
from shardwise.cli.layout_words import layout_overrides, read_layout, split_words
from shardwise.errors import ConfigError, PlanError


def test_a_layout_is_a_mesh_and_settings() -> None:
    assert read_layout("pp=2,tp=2") == (sw.Mesh(pp=2, tp=2), [])
    assert read_layout("single") == (sw.Mesh(), [])
    assert read_layout("dp_shard=2 sharding.stage=3, sharding.units=['a.*', 'b']") == (
        sw.Mesh(dp_shard=2),
        ["sharding.stage=3", "sharding.units=['a.*', 'b']"],
    )
    assert split_words("""tensor.rules={a = "x,y", b='"'},pp=2""") == ["""tensor.rules={a = "x,y", b='"'}""", "pp=2"]


def test_every_problem_of_a_layout_is_told() -> None:
    with pytest.raises(PlanError) as caught:
        read_layout("pp=0,train.steps=3,dq=2")
    assert len(caught.value.problems) == 3
    with pytest.raises(PlanError, match="says nothing"):
        read_layout(" , ")


def test_the_rules_of_the_model_are_taken_where_nobody_gives_rules(tmp_path: FilePath) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[mesh]\npp = 8\n")
    mesh, overrides = layout_overrides(config, "tp=2", ["train.seed=1"])
    assert mesh == sw.Mesh(tp=2)
    sizes = ["mesh.pp=1", "mesh.dp_replicate=1", "mesh.dp_shard=1", "mesh.tp=2"]
    assert overrides == ["train.seed=1", *sizes, "tensor.rules=auto"]
    assert layout_overrides(config, "tp=2,tensor.rules={a='row'}", [])[1][-1] == "tensor.rules={a='row'}"
    config.write_text("[tensor]\nrules = {a = 'row'}\n")
    assert layout_overrides(config, "tp=2", [])[1] == sizes
    config.write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        layout_overrides(config, "tp=2", [])
