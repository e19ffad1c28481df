"""Parsers of metadata: any bytes give a value or a CheckpointError, in bounded memory and time, and so does reading."""

import contextlib
import copy
import json
import math
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.checkpoint.manifest import packed, unpacked
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError, ShardwiseError
from tests.costs import calls_in
from tests.properties import tried
from tests.refusals import Refusals

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(5)}


MAX_BYTES = 40 << 20
"""More than any of these small checkpoints needs, and less than what their forgeries ask for."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    sw.save(folder, STATE, extra={"note": 1}, step=3, channel=alone())
    return folder


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """What Python and numpy take within stays below MAX_BYTES."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def look(folder: Path) -> None:
    """Everything that one process reads of a checkpoint; CheckpointErrors are of no interest, others are raised."""
    with contextlib.suppress(CheckpointError):
        catalogue = checkpoint.open(folder)
        for name, tensor in list(catalogue.tensors.items())[:4]:
            with contextlib.suppress(CheckpointError):
                assert catalogue.read(name).shape == tensor.shape
    with contextlib.suppress(CheckpointError):
        checkpoint.verify(folder)
    with contextlib.suppress(CheckpointError):
        sw.load(folder, {name: torch.zeros_like(each) for name, each in STATE.items()}, channel=alone())
    with contextlib.suppress(CheckpointError):
        checkpoint.diff(folder, folder)


def seal(manifest: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and give it the checksum that it then has."""
    head = json.loads(manifest.read_bytes())
    change(head)
    head["checksum"] = UNSEALED
    manifest.write_text(sealed(json.dumps(head, indent=1)))


UNSEALED = "xxh3_64:" + "0" * 16


def sealed(text: str) -> str:
    return text.replace("0" * 16, xxhash.xxh3_64_hexdigest(text.encode()), 1)


def write_head(folder: Path, field: str, value: str) -> None:
    (folder / "manifest.json").write_text(sealed(f'{{"checksum": "{UNSEALED}", "{field}": {value}}}'))


def reseal_table(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the table of a save, and all checksums with it."""
    [table] = folder.glob("*-tensors-00000.json")
    rows = json.loads(table.read_bytes())
    change(rows)
    data = json.dumps(rows).encode()
    table.write_bytes(data)
    entry = {"bytes": len(data), "head_bytes": len(data), "checksum": xxhash.xxh3_64_hexdigest(data)}
    seal(folder / "manifest.json", lambda head: head["tables"][0].update(entry))


# Values that formats do not have where they stand, or of which there are too many or too large ones.
odd: st.SearchStrategy[object] = st.sampled_from(
    [None, True, -1, 0, 1, 15, 17, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, 1e308, "", ".", "..", "../x",
     "a/b", "\0", "\ud800", "x" * 5000, "manifest.json", "float4_e2m1fn_x2", "nothing", [], [[]], [2**62] * 3,
     [0, 2**62, 2**62], [1] * 2000, {}, {"a": "a"}, {"a": "b", "b": "a"}, {"w": "nothing"}]
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a JSON value."""
    if isinstance(value, dict):
        return [each for key in value for each in [(value, key), *places(value[key])]]
    if isinstance(value, list):
        return [each for at in range(len(value)) for each in [(value, at), *places(value[at])]]
    return []


def mutate(value: Any, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(value)))
        container[key] = copy.deepcopy(data.draw(odd))


COPIED = tried(15, HealthCheck.function_scoped_fixture)


@COPIED
@given(data=st.data())
def test_a_manifest_and_tables_with_any_values_in_any_place(data: st.DataObject, made: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    shutil.copytree(made, tmp_path)
    folder = tmp_path / "save-00000001"
    if data.draw(st.booleans()):
        seal(folder / "manifest.json", lambda head: mutate(head, data))
    else:
        reseal_table(folder, lambda rows: mutate(rows, data))
    with bounded():
        look(tmp_path)


def trained() -> TorchState:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TorchState(model, optimizer)


def strange_settings(head: dict[str, Any], data: st.DataObject) -> None:
    container, key = data.draw(st.sampled_from([*places(head["settings"]), (head, "aliases"), (head, "extra")]))
    container[key] = copy.deepcopy(data.draw(odd | st.sampled_from([["w"], {"float": "x"}, {"w": None}, "inf"])))


@COPIED
@given(data=st.data())
def test_settings_with_any_values_in_any_place(data: st.DataObject, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    rewrite = sw.Rewrite("weight^T -> weight")
    sw.save(tmp_path, trained(), rewrite=rewrite, channel=alone())
    seal(tmp_path / "save-00000001" / "manifest.json", lambda head: strange_settings(head, data))
    for undo in (rewrite.inverse(), sw.Rewrite("weight -> weight")):
        with contextlib.suppress(ShardwiseError):
            sw.load(tmp_path, trained(), rewrite=undo, strict=False, channel=alone())
        with contextlib.suppress(ShardwiseError):
            checkpoint.convert(tmp_path, tmp_path / "converted", rewrite=undo)
    with contextlib.suppress(ShardwiseError):
        checkpoint.recorded_rewrite(tmp_path)
    look(tmp_path)


def forge(field: str, value: object, *, of: str = "files") -> Callable[[Path], None]:
    return lambda folder: seal(folder / "manifest.json", lambda head: head[of][0].update({field: value}))


def forge_row(**values: object) -> Callable[[Path], None]:
    return lambda folder: reseal_table(folder, lambda rows: rows[0].update(values))


def sparse(name: str) -> Callable[[Path], None]:
    def grow(folder: Path) -> None:
        [file] = folder.glob(name)
        with file.open("r+b") as opened:
            opened.truncate(1 << 40)

    return grow


def large_head(folder: Path) -> None:
    """A data file of 2 GiB, all of which is said to be its header."""
    [file] = folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.truncate(2 << 30)
    entry = {"bytes": 2 << 30, "head_bytes": 3 << 30}
    seal(folder / "manifest.json", lambda head: head["files"][0].update(entry))


def shared_bytes(rows: list[dict[str, Any]]) -> None:
    """Many tensors whose bytes are all the same: a small file that would fill any memory."""
    rows += [{**rows[0], "name": f"again {at}"} for at in range(50)]


def share_bytes(folder: Path) -> None:
    reseal_table(folder, shared_bytes)
    seal(folder / "manifest.json", lambda head: head.update(num_tensors=52))


FORGERIES: dict[str, Callable[[Path], object]] = {
    "a header longer than its file": forge("head_bytes", 2 << 30),
    "a file of 2 GiB that is all header": large_head,
    "a manifest of 1 TiB": sparse("manifest.json"),
    "a table of 1 TiB": sparse("*-tensors-00000.json"),
    **{f"a table named {name!r}": forge("name", name, of="tables")
       for name in ("", ".", "..", "../x", "a/b", "\0", "\ud800")},
    **{f"a file named {name!r}": forge("name", name) for name in ("", "..", "../../etc/passwd")},
    "a block of 17 bytes": lambda folder: seal(folder / "manifest.json", lambda head: head.update(block_bytes=17)),
    "a block of 2^40 bytes": lambda folder: seal(folder / "manifest.json", lambda head: head.update(block_bytes=2**40)),
    "a piece at 2^63": lambda folder: reseal_table(folder, lambda rows: rows[0]["pieces"][0].update(start=2**63)),
    "a piece at 2^62": lambda folder: reseal_table(folder, lambda rows: rows[0]["pieces"][0].update(start=2**62)),
    **{f"a shape of {size} rows, in no file": forge_row(shape=[size, 4], pieces=[]) for size in (2**39, 2**61)},
    "tensors that share their bytes": share_bytes,
    "a tensor of which a part is in no file": forge_row(shape=[4, 4]),
    "a tensor that is in no file": forge_row(pieces=[]),
    "a manifest that is nested deeply": lambda folder: write_head(folder, "extra", "[" * 200_000 + "]" * 200_000),
    "a manifest with a number of many digits": lambda folder: write_head(folder, "step", "9" * 100_000),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_metadata_is_refused_before_it_costs_anything(what: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    FORGERIES[what](tmp_path / "save-00000001")
    with bounded(), pytest.raises(CheckpointError):
        checkpoint.open(tmp_path).read("a")
    target = {name: torch.zeros_like(each) for name, each in STATE.items()}
    with bounded(), pytest.raises(CheckpointError):
        sw.load(tmp_path, target, channel=alone())
    assert not any(each.any() for each in target.values())


def test_boxes_of_very_many_tensors_are_read_in_calls_that_grow_with_them(tmp_path: Path) -> None:
    counts = []
    for number in (500, 2000):
        info = {f"t{at}": {"saved_offsets": [0]} for at in range(number)}
        path = tmp_path / str(number)
        path.mkdir()
        metadata = {"DCP_SHARDING_INFO": json.dumps(info)}
        safetensors.torch.save_file({name: torch.zeros(1) for name in info}, path / "x.safetensors", metadata=metadata)
        counts.append(calls_in(partial(checkpoint.open, path)))
    assert counts[1] < 4.5 * counts[0]


# `extra` comes back as it was given: the states of torch's schedulers go in as they are


SMALL = {"w": torch.ones(2)}


def types(value: Any) -> Any:
    """What is where, and of which type."""
    if isinstance(value, dict):
        return type(value), [(type(key), key, types(each)) for key, each in value.items()]
    return (type(value), [types(each) for each in value]) if isinstance(value, list) else (type(value), repr(value))


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.none() | st.floats(allow_nan=False) | st.sampled_from(["shardwise", "items"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.fixed_dictionaries({"shardwise": inner | st.just("dict"), "items": inner})
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


def test_the_state_of_a_scheduler_goes_in_and_comes_out_as_it_is(tmp_path: Path) -> None:
    extra = {"scheduler": lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [1, 3]).state_dict()}
    sw.save(tmp_path, SMALL, extra=extra, channel=alone())
    for found in (sw.load(tmp_path, {"w": torch.zeros(2)}, channel=alone()), checkpoint.open(tmp_path).extra):
        assert types(dict(found)) == types(extra)


@tried(15)
@given(values)
def test_any_values_come_back_with_their_types(value: object) -> None:
    assert types(unpacked(json.loads(json.dumps(packed(value, "extra"))))) == types(value)


def test_plain_values_are_plain_for_other_programs_and_numbers_of_numpy_are_those_of_python() -> None:
    plain = {"a": [1, 2.5, None, {"b": True}], "shardwise": "x", "nan": math.inf}
    assert packed(plain, "extra") == plain
    assert unpacked({"shardwise": "Tower", "items": [[1, 2]]}) == {"shardwise": "Tower", "items": [[1, 2]]}
    given = {"a": np.float64(1.5), "b": np.bool_(True), "c": [np.int64(3), np.float32(0.1)], "d": {1: np.uint8(2)}}
    expected = {"a": 1.5, "b": True, "c": [3, float(np.float32(0.1))], "d": {1: 2}}
    assert types(unpacked(packed(given, "extra"))) == types(expected)


def scheduled(folder: Path) -> None:
    rate = torch.tensor(0.1)
    scheduler = lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate), 2)
    extra = {"s": scheduler.state_dict(), "t": {(1, 2): 3}, "f": len}
    try:
        sw.save(folder, SMALL, extra=extra, channel=alone())
    finally:
        assert not list(folder.iterdir())


REFUSED = Refusals(
    "checkpoint.extra",
    {
        "a tensor, a tuple as key, a function": scheduled,
        "a long double": lambda: packed({"a": np.longdouble(1)}, "extra"),
        "a complex number": lambda: packed({"a": np.complex64(1)}, "extra"),
        "an array": lambda: packed({"a": np.ones(2)}, "extra"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_come_back_is_named_with_what_to_write_instead(case: str) -> None:
    REFUSED.check(case)
