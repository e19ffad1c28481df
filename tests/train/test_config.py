"""Configurations: what is read, and all that is refused, with every problem of a bad one at once."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, DataError
from shardwise.plan import Activations, Average, Pipeline
from shardwise.train import check_references
from shardwise.train.config import read_config
from tests.refusals import Refusals
from tests.train.row_kinds import pretrained_folder, run_of
from tests.train.runs import finished, laid_out, small_run

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


def test_a_minimal_config_needs_a_factory_and_a_number_of_steps_only(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, MINIMAL))
    assert (config.name, config.folder, config.output) == ("small", tmp_path, Path("runs/small"))
    assert (config.train.steps, config.data.source, config.plan.merge.microbatches) == (3, "python-docs", 8)


def test_without_a_mesh_the_processes_share_the_global_batch(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "global_batch = 24\nmicrobatch = 2\n")
    plans = {size: read_config(path, num_processes=size).plan for size in (1, 2, 3, 4)}
    assert {size: plan.mesh.dp_shard for size, plan in plans.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
    assert {size: plan.merge.microbatches for size, plan in plans.items()} == {1: 12, 2: 6, 3: 4, 4: 3}


def test_tables_become_the_specs_of_the_plan(tmp_path: Path) -> None:
    text = MINIMAL + (
        "clip_grad_norm = 0.5\n[average]\ndecay = 0.99\nevery = 2\n[mesh]\ndp_replicate = 2\ndp_shard = 2\n"
        '[sharding]\nstage = 0\nbucket_bytes = 1_000\noffload = "state"\n'
        '[precision]\ncompute = "bfloat16"\nkeep = ["*norm*"]\n[activations]\ncheckpoint = "blocks"\n'
        '[tensor.rules]\n"up" = "column"\n'
    )
    given = ["activations.offload=['layers.*']"]
    plan: Any = read_config(written(tmp_path, text), overrides=given, num_processes=4).plan
    assert (plan.mesh.size, plan.sharding.stage, plan.sharding.bucket_bytes) == (4, 0, 1000)
    assert (plan.sharding.offload, plan.average, dict(plan.tensor.rules)) == (
        "state",
        Average(decay=0.99, every=2),
        {"up": "column"},
    )
    assert (plan.precision.compute, plan.precision.keep, plan.clip_grad_norm) == ("bfloat16", ("*norm*",), 0.5)
    assert plan.activations == Activations(checkpoint="blocks", offload=("layers.*",))
    assert read_config(written(tmp_path, MINIMAL)).plan.average is None


def test_the_pipeline_table_places_modules_and_orders_stages(tmp_path: Path) -> None:
    mesh = MINIMAL + "[mesh]\npp = 2\n[pipeline]\n"
    settings = 'schedule = "fthenb"\nchunks = 2\nstages = { "layers.0" = 0, "layers.1" = 1, head = 3 }\n'
    path = written(tmp_path, mesh + settings)
    plan = read_config(path, overrides=["pipeline.stages.embed=2"], num_processes=2).plan
    stages = {"layers.0": 0, "layers.1": 1, "head": 3, "embed": 2}
    assert plan.pipeline == Pipeline(schedule="fthenb", chunks=2, stages=stages)
    assert plan.merge.microbatches == 8  # ranks of a pipeline share their microbatches
    balanced = read_config(written(tmp_path, mesh), overrides=["pipeline.balance=seconds"], num_processes=2)
    assert balanced.plan.pipeline == Pipeline(balance="seconds")


def test_set_changes_adds_and_leaves_out_values_in_any_table(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "[checkpoint]\nevery = 3\n")
    overrides = ["train.steps=5", "train.decay=linear", "model.config.width=7", "checkpoint.every=null"]
    config = read_config(path, overrides=overrides)
    assert (config.train.steps, config.train.decay, config.model.config) == (5, "linear", {"width": 7})
    assert (config.checkpoint.every, read_config(path).checkpoint.every) == (None, 3)


# What is refused ----------------------------------------------------------------------------------------------------


def toml(text: str, *overrides: str, ranks: int = 1) -> Callable[[Path], object]:
    """A file of this text; a text that begins with a table is the whole file."""
    whole = text if text.startswith("\n") else f"{MINIMAL}{text}"
    return lambda folder: read_config(written(folder, whole), overrides=overrides, num_processes=ranks)


def run(
    *overrides: str, kind: str = "text", files: Mapping[str, bytes | None] | None = None
) -> Callable[[Path], object]:
    """A run as the command starts it, beside these files (None: a folder).

    It is refused when its settings are read, when its names are looked up, or when it builds what they name.
    """

    def refused(folder: Path) -> None:
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
        if any("=llama" in each for each in overrides):
            pretrained_folder(folder)
        config = laid_out(folder, *overrides) if kind == "text" else run_of(folder, kind, *overrides)
        check_references(config)
        finished(config)

    return refused


def lines(text: str | bytes) -> Callable[[Path], object]:
    """A run of two ranks on a file of these lines."""
    content = text if isinstance(text, bytes) else text.encode()
    return run("data.source=broken.jsonl", "mesh.dp_shard=2", kind="jsonl", files={"broken.jsonl": content})


GOOD = json.dumps({"text": "good", "stars": "a"}) + "\n"
SCHEDULE = "torch.optim.lr_scheduler"
NO_WARMUP = "train.warmup_steps=null"
PRETRAINED = ("model.pretrained=llama", "model.config={}")
SHORT = "own: 2 stages, 2 ranks, 2 microbatches\\nrank 0: F0.0 F1.0 B0.0 B1.0\\nrank 1: F0.1 B0.1"
EVERY_PROBLEM = """
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
[average]
decay = 2
evry = 1
[pipeline]
schedul = "1f1b"
chunks = 2
[pipeline.stages]
layers.0 = 0
head = -1
[trian]
"""
BETWEEN = """
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
ROW_SETTINGS = {
    "no text": ("jsonl", "data.text=null"),
    "no source": ("jsonl", "data.source=null"),
    "text and messages": ("jsonl", "data.messages=chat"),
    "packing with columns": ("jsonl", "data.collate=packing"),
    "packing of no text": ("images", "data.collate=packing"),
    "two inputs": ("jsonl", "data.columns.input_ids=stars"),
    "held out twice": ("jsonl", "data.held_out_source=a.jsonl"),
    "options of a file": ("jsonl", "data.dataset_options.split=train"),
    "options of no collator": ("jsonl", "data.collate_options.scale=2"),
    "a format and a dataset": ("own", "data.format=jsonl"),
    "an image setting": ("images", "data.images.sizes=[3, 3]"),
    "an image size": ("images", "data.images.size=[3]"),
    "an unknown format": ("jsonl", "data.format=csv"),
    "columns that are not there": ("jsonl", "data.columns.labels=starz", "data.text=tex"),
    "a column of parquet": ("parquet", "data.columns.labels=score"),
    "a file that is not there": ("jsonl", "data.source=nowhere.jsonl"),
    "a column of a dataset": ("own", "data.columns.labels=star", "mesh.dp_shard=2"),
    "no split": ("saved", "data.dataset_options=null"),
    "another option of saved rows": ("saved", "data.dataset_options.name=x"),
    "code of a dataset": ("hub", "data.source=pandas"),
    "code of others": ("hub", "data.dataset_options.trust_remote_code=true"),
    "a source of a dataset": ("sized", "data.source=text.txt"),
    "no rows": ("sized", "data.dataset=null", "data.collate=nets.py:raw_batch"),
    "names that are not there": ("sized", "data.dataset=nets.py:Absent", "data.collate=nets.py:absent"),
    "too few rows": ("sized", "data.dataset_options.size=2"),
    "a dataset that fails": ("sized", "data.dataset=nets.py:failing"),
    "nothing to hold out of": ("sized", "data.dataset=nets.py:Stream"),
    "no length": ("sized", "data.dataset=nets.py:Unopened"),
    "a dataset that is forgotten": ("sized", "data.dataset=nets.py:forgotten"),
    "nothing held out": ("sized", "data.held_out=null", "data.held_out_dataset=nets.py:Unopened"),
    "channels of images": ("images", "data.images.size=[6, 7]", "data.images.mode=L"),
    "an absent tokenizer": ("words", "data.tokenizer=none"),
    "messages without a template": ("words", "data.text=null", "data.messages=chat", "data.tokenizer=plain"),
    "rows in other dims": ("frames", "data.rows={frmes=1}"),
    "dims that are none": ("frames", "data.rows={table='none', frames=-1}"),
    "turns": ("turns", "train.turns=[{only='critc'}, {only=[]}, {loss_options={a=1}}]"),
    "turns of no step": ("turns", "train.turns=[{steps=0}]"),
    "options of a turn": ("turns", "train.turns=[{loss='gan.py:TellsApart'}]"),
    "names of metrics": (
        *("jsonl", "train.metrics.f1=nets.py:pair", "train.metric_options.fl={}", "train.metric_inputs.x=m:n"),
    ),
    "a metric that is the loss": ("jsonl", "train.metrics.loss=nets.py:accuracy"),
    "inputs of a function": ("jsonl", "train.metrics.a=nets.py:accuracy", "train.metric_inputs.a=nets.py:pair"),
    "a metric that fails": ("jsonl", "train.metrics.a=nets.py:Error", "train.metric_options.a.power=0"),
    "options that are not taken": (
        *("jsonl", "model.loss_options={smothing=0.1}", "train.optimizer_options.beta=[0.9, 0.9]"),
        *("train.metrics.f1=torchmetrics.classification:MulticlassF1Score", "train.metrics.exactness=nets.py:exact"),
    ),
    "options of a dataset": ("own", "data.dataset_options={lst=3}"),
}
REFUSED = Refusals(
    "train.config",
    {
        "every problem at once": toml(EVERY_PROBLEM, ranks=3),
        "problems between tables": toml(BETWEEN, ranks=2),
        "a small vocabulary": toml("", "model.config.vocab_size=100"),
        "a clip of none": toml("", "train.clip_grad_norm=-1.0"),
        "stages behind the last": toml("", "pipeline.stages={head = 1}"),
        "a rule": toml('[mesh]\ntp = 2\n[tensor.rules]\n"up" = "colum"\n', ranks=2),
        "a rule of the wrong name": toml("[mesh]\ntp = 2\n[tensor]\nrule = 'auto'\n", ranks=2),
        "rules of another kind": toml("[mesh]\ntp = 2\n[tensor]\nrules = 3\n", ranks=2),
        "a budget": toml("", "activations.budget_bytes=0"),
        "a schedule that is short": toml("global_batch = 8\n[mesh]\npp = 2\n", f'pipeline.schedule="{SHORT}"', ranks=2),
        "a schedule of others": toml("global_batch = 12\n[mesh]\npp = 2\n", f'pipeline.schedule="{SHORT}"', ranks=2),
        **{
            f"--set {word}": toml("", word)
            for word in ("train.steps", "steps=3", "train.steps.more=3", "train.step=3", "train=3")
        },
        **{
            f"a value for {table}": toml("\n" + f"{table} = 3\n" + (MINIMAL if table not in ("model", "train") else ""))
            for table in ("model", "data", "train", "mesh", "sharding", "precision", "pipeline")
        },
        **{
            word: toml("", word)
            for word in (
                *("train.clip_grad_norm=x", "train.clip_grad_norm={'a.*'='x'}", "train.clip_grad_norm=0.0"),
                *("data.images.mean=['x']", "data.images.std=x", "train.groups=[{parameters='x'}]"),
                *("data.classes=['a', 'b', 'a']", "train.callbacks=[{}]", "train.callbacks={}"),
                *("train.callbacks=[{factory = 'a:b', patience = 3}]", "train.callbacks=[{factory = 3}]"),
                *("train.metric_options.f1.num_classes=3", "train.schedule_options.gamma=1.0"),
                *("generate.every=0", "generate.prompt=x", "generate.options={seed = 3}"),
            )
        },
        "no file": lambda folder: read_config(folder / "absent.toml"),
        "no TOML": toml("\n[train\n"),
        "no UTF-8": lambda folder: [(folder / "a").write_bytes(b"\xff\xfe"), read_config(folder / "a")],
        "no text to go on with": toml('[data]\ndataset = "net.py:Net"\n[generate]\nevery = 1\n'),
        "groups": run(
            "train.groups=[{parameters=['a']}, {parameters=['b'], frozen=true, learning_rate=1.0}, {parameter=['c']}]"
        ),
        "groups that say nothing": run(
            "train.groups=[{parameters=['a']}, {parameters=['b'], frozen=true, learning_rate=1.0}]"
        ),
        "settings of a schedule": run("train.schedule=cosine", "train.decay=linear", "train.min_learning_rate=0.0"),
        "warmup of a schedule": run("train.schedule=schedules.py:make"),
        # Names
        "names": run("model.factory=net.py:Nett", "model.loss=absent.py:loss", "train.optimizer=torch.optim:Adamm"),
        **{
            f"the name {each}": run(f"model.factory={each}")
            for each in (
                "no_colon",
                ":name",
                "torch.nn:",
                "absent_package.net:Net",
                "torch.nn:Nothing",
                "absent.py:Net",
            )
        },
        "no callable": run("model.factory=torch:__version__"),
        "a schedule of another name": run("train.schedule=cosin"),
        "a scheduler of another name": run(f"train.schedule={SCHEDULE}:ExponentalLR", NO_WARMUP),
        "a scheduler's options": run(
            f"train.schedule={SCHEDULE}:ExponentialLR", "train.schedule_options.gama=1.0", NO_WARMUP
        ),
        # What runs build
        "a factory that takes no depth": run("model.config.depth=3", "mesh.dp_shard=2"),
        "a factory of no module": run("model.factory=builtins:dict"),
        "a factory that exits": run("model.factory=net.py:exits", "model.config={}"),
        "too few tokens": run("data.sequence_length=4000"),
        "options of an optimizer": run("train.optimizer=torch.optim:SGD", "train.optimizer_options.beta=1"),
        "no optimizer": run("train.optimizer=builtins:dict", "mesh.dp_shard=2"),
        "a module that is lost": run("precision.keep=['lost']"),
        "a group of nobody": run("train.groups=[{parameters=['*.bias', 'haed*'], learning_rate=0.1}]"),
        "an optimizer without groups": run(
            "train.optimizer=net.py:single", "train.groups=[{parameters=['*'], learning_rate=1.0}]"
        ),
        "callbacks that fail": run("train.callbacks=[{factory = 'mine.py:wrong'}]", "mesh.dp_shard=2"),
        "options of a callback": run("train.callbacks=[{factory = 'mine.py:Mine', options = {height = 2}}]"),
        "patience": run("train.callbacks=[{factory = 'shardwise.train:EarlyStopping', options = {patience = 0}}]"),
        "a metric that is not there": run(
            "train.callbacks=[{factory = 'shardwise.train:EarlyStopping', options = {metric = 'f1'}}]",
            "mesh.dp_shard=2",
        ),
        "no callback": run("train.callbacks=[{factory = 'net.py:Stop'}]"),
        "an empty prompt": run('generate.prompts=["7", ""]'),
        "options of generate": run('generate.prompts=["7"]', "generate.options={do_sample = false}"),
        "a schedule that is none": run("train.schedule=schedules.py:none", NO_WARMUP),
        "a plateau of a callable": run("train.schedule=schedules.py:plateau", NO_WARMUP),
        "options of a plateau": run(
            "train.schedule=reduce_lr_on_plateau", "train.schedule_options.factor=2.0", NO_WARMUP
        ),
        "a schedule that ends too soon": run(
            f"train.schedule={SCHEDULE}:OneCycleLR",
            "train.schedule_options={max_lr=0.05, total_steps=4}",
            NO_WARMUP,
            "mesh.dp_shard=2",
        ),
        "a setting of a configuration class": run(
            *("model.factory=transformers:LlamaForCausalLM", "model.loss=null"),
            "model.config={vocab_size=256, hiden_size=16, colour=1}",
        ),
        "modules that do not initialise": run(
            'model.initialise="by module"', "model.factory=net.py:Bare", "model.config={}", "model.loss=null"
        ),
        # Rows
        **{case: run(*words, kind=kind) for case, (kind, *words) in ROW_SETTINGS.items()},
        "an empty file of rows": lines(""),
        "blank lines": lines("\n \n"),
        "JSON that ends": lines(GOOD * 2 + '{"text": "go'),
        "a list": lines(GOOD + "\n[1]\n" + GOOD),
        "bytes that are no UTF-8": lines(GOOD.encode() + b'{"text": "\xff"}'),
        "JSON nested too deeply": lines(GOOD + "[" * 100_000),
        "another column": lines('{"txt": "good", "stars": "a"}'),
        "a column that lacks": lines(GOOD + '{"text": "good"}'),
        "a number for a text": lines(GOOD + '{"text": 3, "stars": "a"}'),
        "an unknown class": lines(GOOD + '{"text": "", "stars": "d"}'),
        "half of a character": lines(GOOD + '{"text": "\\ud800", "stars": "a"}'),
        "a null": lines(GOOD + '{"text": "", "stars": null}'),
        "many lines": lines(GOOD + "x\n" * 9),
        "no folders of images": run("data.source=empty", kind="images", files={"empty": None}),
        "no images": run("data.source=empty", kind="images", files={"empty/cats": None}),
        "no files of rows": run("data.source=empty", kind="parquet", files={"empty": None}),
        "no folder of save_to_disk": run("data.source=empty", kind="saved", files={"empty": None}),
        "a file that is no parquet": run(kind="parquet", files={"c.parquet": b"PAR1 not really"}),
        "a folder that is no class": run("data.classes=['a', 'b', 'c']", kind="images", files={"pictures/d": None}),
        "an image that is empty": run(kind="images", files={"pictures/a/void.png": b""}),
        "an image that is torn": run(
            *("mesh.dp_shard=2", "train.evaluate_batches=9"),
            kind="images",
            files={"pictures/a/torn.png": b"\x89PNG\r\n\x1a\n torn"},
        ),
        "a folder that is not pretrained": run("model.pretrained=nowhere", "model.config={}", kind="words"),
        "no class of transformers": run(*PRETRAINED, "model.factory=net.py:Net", kind="words"),
        "a setting of a pretrained model": run(*PRETRAINED, "model.config={hiden_size=3}", kind="words"),
        "a pretrained model by module": run(*PRETRAINED, 'model.initialise="by module"', kind="words"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_words_with_every_problem(case: str) -> None:
    REFUSED.check(case)


def test_files_that_raise_are_said_to_and_raise_again(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"raising.py cannot be imported: ZeroDivisionError"):
            check_references(small_run(tmp_path, "model.factory=raising.py:Net"))


def test_a_stream_is_not_read_by_workers_which_would_get_other_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set\s+num_workers=0 \(data\.num_workers\)"):
        finished(run_of(tmp_path, "stream", "data.num_workers=2"))
