"""A plugin of pytest that tries mutants out: tests are imported once, and each mutant has a fork of that process.

In the fork the functions of the mutated file get the code of the mutant. On the disk the file is the mutant as well,
for the processes that a test starts and for what is imported later. What was computed while tests were imported is that
of the library as it is.
"""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ORDERS, ANSWERS = "MUTANT_ORDERS", "MUTANT_ANSWERS"
"""Variables of the environment: a file of orders, and a pipe for the answers, a line of JSON each."""


_PATIENCE_SECONDS, _SECONDS_PER_TEST = 120.0, 10.0
"""Of a fork: more than its tests take, as each test has a time limit of its own; the machine may do other things."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """One mutant to be tried out."""

    name: str
    file: str
    """Path of the changed file, relative to the tree."""
    text: str
    """Its text with the change."""
    batches: list[list[str]]
    """Node ids, or files for all of their tests, batch by batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of it."""

    name: str
    seconds: float
    test: str = ""
    """The first that failed; empty where none did."""
    is_timeout: bool = False
    words: str = ""
    """The end of what the test said."""
    unsound: list[str] = field(default_factory=list)
    """Tests that fail alone, without a mutant too."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """In the place of pytest's own: carry out the orders."""
    orders = [Order(**each) for each in json.loads(Path(os.environ[ORDERS]).read_text(encoding="utf-8"))]
    items = {item.nodeid: item for item in session.items}
    functions = _functions()
    with os.fdopen(int(os.environ[ANSWERS]), "w") as answers:
        for order in orders:
            print(json.dumps(asdict(_tried_out(order, items, functions))), file=answers, flush=True)
    return True


def _tried_out(
    order: Order, items: dict[str, pytest.Item], functions: dict[str, list[FunctionType]]
) -> Answer:  # fmt: skip
    began = time.monotonic()
    unsound: list[str] = []
    for batch in order.batches:
        # Since the record a test may have been renamed.
        left = [items[each] for each in batch if each in items]
        left += [item for name, item in items.items() if name.partition("::")[0] in batch]
        while left:
            with _changed(order):
                failed, is_timeout, words = _in_fork(left, order, functions)
            if not failed:
                break
            finder = items.get(failed)
            # A test that fails alone without a mutant as well has found none.
            if finder is None or not _in_fork([finder], None, {})[0]:
                return Answer(
                    name=order.name,
                    seconds=time.monotonic() - began,
                    test=failed,
                    is_timeout=is_timeout,
                    words=words,
                    unsound=unsound,
                )
            unsound.append(failed)
            left = left[left.index(finder) + 1 :]
    return Answer(name=order.name, seconds=time.monotonic() - began, unsound=unsound)


@contextlib.contextmanager
def _changed(order: Order) -> Iterator[None]:
    """The file is the mutant's on the disk."""
    path = Path(order.file)
    before = path.read_text(encoding="utf-8")
    compiled = list((path.parent / "__pycache__").glob(f"{path.stem}.*"))
    # Compiled files are told apart by seconds and size, and both may be those of the text before.
    for text in (order.text, before):
        for each in compiled:
            each.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        if text is order.text:
            yield


def _functions() -> dict[str, list[FunctionType]]:
    """The functions of the library by their file."""
    gc.unfreeze()  # tests/conftest.py has hidden them
    gc.collect()
    found: dict[str, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType:  # no `isinstance`, which proxies answer for others
            found[each.__code__.co_filename].append(each)
    gc.freeze()
    return found


def _put_in(order: Order, functions: dict[str, list[FunctionType]]) -> None:
    """Give the functions of the mutated file their new code."""
    path = str(Path(order.file).resolve())
    codes: dict[tuple[str, int], CodeType] = {}
    pending = [compile(order.text, path, "exec")]
    while pending:
        code = pending.pop()
        codes[code.co_qualname, code.co_firstlineno] = code
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    for function in functions.get(path, ()):
        code = function.__code__
        function.__code__ = codes[code.co_qualname, code.co_firstlineno]


class _FirstFailure:
    """The first report that is no success."""

    def __init__(self) -> None:
        self.report: pytest.TestReport | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.report is None:
            self.report = report


def _in_fork(
    items: Sequence[pytest.Item], order: Order | None, functions: dict[str, list[FunctionType]]
) -> tuple[str, bool, str]:
    """Run the items in a fork until one fails: its name, whether that was a time limit, and what it said."""
    if not items:
        return "", False, ""
    reading, writing = os.pipe()
    # Processes that a test starts are known by it, whatever sessions they make.
    os.environ["MUTANT_RUN"] = key = f"{os.getpid()}-{time.monotonic_ns()}"
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.setsid()
        os.close(reading)
        answer: list[Any] = ["the fork itself", False, ""]
        try:
            if order is not None:
                _put_in(order, functions)
            answer = _run(items)
        except BaseException as error:
            answer[2] = repr(error)
        finally:
            os.write(writing, json.dumps(answer).encode()[:60000])
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + _PATIENCE_SECONDS + len(items) * _SECONDS_PER_TEST
    try:
        while os.waitpid(process, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                return "the time limit of all tests", True, ""
            time.sleep(0.02)
        written = os.read(reading, 1 << 16)
        # A fork that has written nothing was ended by a signal: a fault of memory, or a time limit that ends it.
        name, is_timeout, words = json.loads(written) if written else ("the end of the process", False, "")
        return name, is_timeout, words
    finally:
        os.close(reading)
        end_all(key, group=process)


def _run(items: Sequence[pytest.Item]) -> list[Any]:
    first = _FirstFailure()
    session = items[0].session
    session.config.pluginmanager.register(first)
    session.items = list(items)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if first.report is not None:
            words = str(first.report.longrepr)[-3000:]
            return [item.nodeid, "Timeout (>" in words or "Timeout" in words.rpartition("\n")[2], words]
    return ["", False, ""]


def end_all(key: str, *, group: int) -> None:
    """End what is left of a run: its process group, and those that have the key in their environment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(group, 0)
    mark = f"MUTANT_RUN={key}".encode()
    for _ in range(3):  # one may start another while they are looked for
        found = [folder for folder in Path("/proc").glob("[0-9]*") if _has(folder / "environ", mark)]
        for folder in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _has(environ: Path, mark: bytes) -> bool:
    try:
        return mark in environ.read_bytes().split(b"\0")
    except OSError:
        return False
