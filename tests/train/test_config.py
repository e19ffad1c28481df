"""Configurations: what is read, and every problem of a bad one at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.plan import Activations, Average, Pipeline
from shardwise.train.config import read_config

MINIMAL = """
[model]
factory = "net.py:Net"

[train]
steps = 3
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(folder: Path, text: str, *overrides: str, num_processes: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(written(folder, text), overrides=overrides, num_processes=num_processes)
    return list(caught.value.problems)


def test_a_minimal_config_needs_a_factory_and_a_number_of_steps_only(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, MINIMAL))
    assert (config.name, config.folder, config.output) == ("small", tmp_path, Path("runs/small"))
    assert (config.train.steps, config.data.source, config.plan.merge.microbatches) == (3, "python-docs", 8)


def test_without_a_mesh_the_processes_share_the_global_batch(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "global_batch = 24\nmicrobatch = 2\n")
    microbatches = {}
    for num_processes in (1, 2, 3, 4):
        plan = read_config(path, num_processes=num_processes).plan
        assert plan.mesh.dp_shard == num_processes
        microbatches[num_processes] = plan.merge.microbatches
    assert microbatches == {1: 12, 2: 6, 3: 4, 4: 3}


def test_tables_become_the_specs_of_the_plan(tmp_path: Path) -> None:
    text = MINIMAL + (
        "clip_grad_norm = 0.5\n[average]\ndecay = 0.99\nevery = 2\n[mesh]\ndp_replicate = 2\ndp_shard = 2\n"
        '[sharding]\nstage = 0\nbucket_bytes = 1_000\noffload = "state"\n'
        '[precision]\ncompute = "bfloat16"\nkeep = ["*norm*"]\n'
    )
    plan = read_config(written(tmp_path, text), num_processes=4).plan
    assert (plan.mesh.size, plan.sharding.stage, plan.sharding.bucket_bytes) == (4, 0, 1000)
    assert plan.sharding.offload == "state"
    assert (plan.precision.compute, plan.precision.keep, plan.clip_grad_norm) == ("bfloat16", ("*norm*",), 0.5)
    assert plan.average == Average(decay=0.99, every=2)
    assert read_config(written(tmp_path, MINIMAL)).plan.average is None
    assert problems_of(tmp_path, MINIMAL + "[average]\ndecay = 2\nevry = 1\n") == [
        "average.evry: unknown setting; did you mean average.every?",
        "average.decay: 2 is not a number from 0 to below 1; leave it out for the mean of all weights",
    ]


def test_the_pipeline_table_places_modules_and_orders_stages(tmp_path: Path) -> None:
    mesh = MINIMAL + "[mesh]\npp = 2\n[pipeline]\n"
    settings = 'schedule = "fthenb"\nchunks = 2\nstages = { "layers.0" = 0, "layers.1" = 1, head = 3 }\n'
    path = written(tmp_path, mesh + settings)
    plan = read_config(path, overrides=["pipeline.stages.embed=2"], num_processes=2).plan
    assert (plan.mesh.pp, plan.pipeline.num_chunks) == (2, 2)
    assert plan.pipeline == Pipeline(
        schedule="fthenb", chunks=2, stages={"layers.0": 0, "layers.1": 1, "head": 3, "embed": 2}
    )
    assert plan.merge.microbatches == 8  # ranks of a pipeline share their microbatches
    balanced = read_config(written(tmp_path, mesh), overrides=["pipeline.balance=seconds"], num_processes=2)
    assert balanced.plan.pipeline == Pipeline(balance="seconds")


def test_every_problem_of_a_pipeline_table_is_listed(tmp_path: Path) -> None:
    text = MINIMAL + '[pipeline]\nschedul = "1f1b"\nchunks = 2\n[pipeline.stages]\nlayers.0 = 0\nhead = -1\n'
    assert problems_of(tmp_path, text) == [
        "pipeline.schedul: unknown setting; did you mean pipeline.schedule?",
        "pipeline.chunks: 2 asked of the schedule '1f1b', which runs one stage per rank; 'interleaved' runs several",
        "pipeline.stages: 'layers' is given {'0': 0}, which is not a whole number of at least 0; in TOML a name with "
        "dots is written in quotes",
        "pipeline.stages: 'head' is given -1, which is not a whole number of at least 0",
    ]
    assert problems_of(tmp_path, MINIMAL, "pipeline.stages={head = 1}") == [
        "pipeline.stages: 'head' is given stage 1, but pp=1 with 1 stage per rank has the stages 0 to 0"
    ]


def test_every_problem_is_listed_at_once_with_the_nearest_known_key(tmp_path: Path) -> None:
    text = """
        [model]
        factry = "net.py:Net"
        [data]
        sequence_length = "long"
        source = "nowhere"
        held_out = 0.9
        [train]
        steps = 0
        global_bach = 8
        microbatch = true
        decay = "cosinus"
        [sharding]
        stage = 7
        partitions = "slice"
        [precision]
        compute = "float7"
        [mesh]
        dp_shard = 2
        [trian]
        """
    assert problems_of(tmp_path, text, num_processes=3) == [
        "trian: unknown setting; did you mean train?",
        'model.factory: missing; Where the model comes from: "package.module:name" or "file.py:name", a file being '
        "relative to the config.",
        "model.factry: unknown setting; did you mean model.factory?",
        "data.sequence_length: 'long' given; it must be a whole number",
        "data.held_out: 0.9 given; it must be less than or equal to 0.5",
        "train.steps: 0 given; it must be greater than or equal to 1",
        "train.microbatch: True given; it must be a whole number",
        "train.decay: 'cosinus' given; it must be 'cosine', 'linear' or 'constant'",
        "train.global_bach: unknown setting; did you mean train.global_batch?",
        "mesh dp_shard=2 asks for 2 ranks, but the world has 3; start 2 processes, or set dp_shard=3, so that the "
        "sizes multiply to the world",
        "sharding.partitions: unknown setting; did you mean sharding.partition?",
        "sharding.stage: 7 asked; the stages are 0, 1, 2 and 3",
        "precision.compute: 'float7' is not one of float16, bfloat16, float32, float64",
    ]


def test_problems_between_tables_are_listed_too(tmp_path: Path) -> None:
    text = """
        [model]
        factory = "net.py:Net"
        config = {vocab_size = 100}
        [data]
        source = "missing.txt"
        tokenizer = "missing.json"
        [train]
        steps = 3
        warmup_steps = 4
        global_batch = 10
        microbatch = 4
        clip_grad_norm = -1.0
        """
    problems = problems_of(tmp_path, text, num_processes=2)
    assert problems == [
        "train.global_batch: 10 rows cannot be cut into microbatches of 4 rows on 2 data ranks, 8 at a time; give 8 "
        "or 16, or another train.microbatch",
        f'data.source: no file or directory {tmp_path}/missing.txt; "python-docs" needs none',
        f'data.tokenizer: no file {tmp_path}/missing.json; give the JSON of a tokenizer or "bytes"',
        "train.warmup_steps: 4 given; train.steps is only 3; give at most that",
    ]
    assert "vocab_size: 100 given; bytes need at least 256" in str(
        problems_of(tmp_path, MINIMAL, "model.config.vocab_size=100")
    )
    assert "clip_grad_norm" in str(problems_of(tmp_path, MINIMAL, "train.clip_grad_norm=-1.0"))


def test_rules_of_tensor_parallelism_are_checked(tmp_path: Path) -> None:
    text = MINIMAL + "[mesh]\ntp = 2\n"
    config = read_config(written(tmp_path, text + '[tensor.rules]\n"up" = "column"\n'), num_processes=2)
    rules: Any = config.plan.tensor.rules
    assert dict(rules) == {"up": "column"}
    assert "the rule 'colum' is unknown" in str(
        problems_of(tmp_path, text + '[tensor.rules]\n"up" = "colum"\n', num_processes=2)
    )


def test_activations_are_a_table_of_the_plan(tmp_path: Path) -> None:
    table = '[activations]\ncheckpoint = "blocks"\nsave = ["aten.mm"]\n'
    config = read_config(written(tmp_path, MINIMAL + table), overrides=["activations.offload=['layers.*']"])
    assert config.plan.activations == Activations(checkpoint="blocks", save=("aten.mm",), offload=("layers.*",))
    assert problems_of(tmp_path, MINIMAL, "activations.budget_bytes=0") == [
        "activations.budget_bytes: 0 is not a whole number of at least 1"
    ]


def test_set_changes_and_adds_values_in_any_table(tmp_path: Path) -> None:
    overrides = ["train.steps=5", "train.decay=linear", "model.config.width=7", "precision.keep=['a', 'b']"]
    config = read_config(written(tmp_path, MINIMAL), overrides=overrides)
    assert (config.train.steps, config.train.decay) == (5, "linear")
    assert config.model.config == {"width": 7}
    assert config.plan.precision.keep == ("a", "b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "not of the form table.key=value"),
        ("steps=3", "not of the form table.key=value"),
        ("train.steps.more=3", "train.steps is 3, not a table"),
        ("train.step=3", "did you mean train.steps?"),
        ("train=3", "not of the form table.key=value"),
    ],
)
def test_a_bad_set_is_refused(tmp_path: Path, override: str, message: str) -> None:
    assert message in str(problems_of(tmp_path, MINIMAL, override))


def test_a_setting_is_left_out_by_null(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL + "\n[checkpoint]\nevery = 3\n")
    checkpoint = read_config(path, overrides=["checkpoint.every=null", "checkpoint.keep=null"]).checkpoint
    assert (checkpoint.every, read_config(path).checkpoint.every) == (None, 3)


@pytest.mark.parametrize("table", ["model", "data", "train", "mesh", "sharding", "precision", "pipeline"])
def test_a_value_where_a_table_belongs_is_refused(tmp_path: Path, table: str) -> None:
    text = f"{table} = 3\n" + (MINIMAL if table not in ("model", "train") else "")
    assert f"{table}: 3 is not a table of settings; write [{table}]" in problems_of(tmp_path, text)


def test_a_file_that_is_missing_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1"):
        read_config(written(tmp_path, "[train\n"))
    (tmp_path / "small.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(tmp_path / "small.toml")


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom shardwise.train import read_config\n"
        f"read_config(pathlib.Path({str(written(tmp_path, MINIMAL))!r}))\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_wrong_with_stages_whatever_the_model_is_known_before_anything_starts(tmp_path: Path) -> None:
    staged = MINIMAL + "global_batch = 8\n[mesh]\npp = 2\n"
    short = "own: 2 stages, 2 ranks, 2 microbatches\\nrank 0: F0.0 F1.0 B0.0 B1.0\\nrank 1: F0.1 B0.1"
    assert problems_of(tmp_path, staged, f'pipeline.schedule="{short}"', num_processes=2) == [
        "pipeline.schedule: rank 1: forward of stage 1 lacks microbatch 1",
        "pipeline.schedule: rank 1: backward of stage 1 lacks microbatch 1",
    ]
    assert problems_of(tmp_path, staged, f'pipeline.schedule="{short}"', "train.global_batch=12", num_processes=2) == [
        "pipeline.schedule: 'own' is written for k (microbatches) = 2, the batch gives 3; change one of them"
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.clip_grad_norm=x", "train.clip_grad_norm: 'x' given; it must be a number or a dictionary"),
        ("train.clip_grad_norm={'a.*'='x'}", "train.clip_grad_norm.a.*: 'x' given; it must be a number"),
        ("train.clip_grad_norm=0.0", "train.clip_grad_norm: 0.0 is not a number above 0; leave it out, and nothing is"),
        ("data.images.mean=['x']", "data.images.mean.0: 'x' given; it must be a number"),
        ("data.images.std=x", "data.images.std: 'x' given; it must be a list or a number"),
        ("train.groups=[{parameters='x'}]", "train.groups.0.parameters: 'x' given; it must be a list"),
        ("data.classes=['a', 'b', 'a']", "data.classes: 'a' stands there twice, and a class has one number; leave one"),
    ],
)
def test_a_key_that_takes_several_types_is_named_as_it_is_in_the_file(
    tmp_path: Path, override: str, problem: str
) -> None:
    found = problems_of(tmp_path, MINIMAL, override)
    assert any(each.startswith(problem) for each in found), found
    assert not any("float]" in each or ".float" in each for each in found)
