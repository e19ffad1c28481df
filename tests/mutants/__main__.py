"""How many one-line mutants of the library the tests find, and how long that takes.

    python -m tests.mutants                         # the quick tests
    python -m tests.mutants --only sum-order        # some mutants
    python -m tests.mutants --tier all              # what the quick tests do not find, with the slow ones too

pytest runs in a copy of the checkout, and forks for each mutant (`forks.py`). The tests that run the changed line come
first, those of its room before others, quick ones before slow ones. Then come those that start other processes, where
nobody notes lines. It stops at the first failure. Which tests run a line comes from one run of all tests without a
mutant (`--record`, kept in build/mutants.json). A mutant is found by a test that fails or exceeds a time limit, and
passes in a fork without the mutant.

Without `--record` the test that found a mutant last (benchmarks/results/mutants.md) has the first try, then the others
of its file, and those of the folder that is called like that of the mutant. All are asked about what these do not find.
"""

import argparse
import datetime
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutants.forks import ANSWERS, ORDERS, Answer, Order
from tests.mutants.listed import LIST, ROOT, Mutant, marked, mutants
from tests.mutants.marks import FILE
from tests.mutants.trees import Tree
from tests.tiers import function_of, recorded, slow_tests

_RECORD = ROOT / "build" / "mutants.json"
_LAST = ROOT / "benchmarks" / "results" / "mutants.md"
_LEAST_OF_QUICK = 0.95
_NEAREST_FILES = 8
_IN_PROCESSES = ("tests/processes/", "tests/testing/", "tests/cli/")

_FOUND = re.compile(r"^- (\S+) .*? s  found by (tests/.*?)(?: \(slow\))?(?: \(time limit\))?$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A run of all tests without a mutant."""

    seconds: dict[str, float]
    """By node id."""
    tests_of: dict[str, list[str]]
    """The tests that run the line of a mutant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What came of one mutant."""

    mutant: Mutant
    seconds: float
    test: str
    """Which test found it; empty: none did."""
    is_timeout: bool

    @property
    def is_slow(self) -> bool:
        """Whether `make test` leaves out what found it."""
        return function_of(self.test) in slow_tests()

    def __str__(self) -> str:
        excused = f" ({self.mutant.survives})" if self.mutant.survives else ""
        how = (
            f"found by {self.test}{' (slow)' if self.is_slow else ''}{' (time limit)' if self.is_timeout else ''}"
            if self.test
            else f"SURVIVED{excused}"
        )
        return f"{self.mutant.name:28} {self.seconds:6.1f} s  {how}"


def record(listed: Sequence[Mutant], folder: Path, jobs: int) -> Record:
    """Run all tests with notes of who runs which line."""
    tree = Tree(folder / "record")
    of_file: dict[Path, list[Mutant]] = defaultdict(list)
    for mutant in listed:
        of_file[mutant.path].append(mutant)
    for path, each in of_file.items():
        tree.write(path, marked((ROOT / path).read_text(encoding="utf-8"), each))
    notes, report, output = folder / "notes", folder / "report.xml", folder / "record.txt"
    workers = ["--numprocesses", str(jobs), "--dist", "worksteal"] if jobs > 1 else ["-n0"]
    code = tree.pytest(
        [*workers, "-m", "not stress", f"--junitxml={report}"], output, environment={FILE: str(notes)}
    ).wait()
    text = output.read_text(encoding="utf-8", errors="replace")
    if code not in (0, 1):
        sys.exit(f"the tests do not run without a mutant:\n{text[-4000:]}")
    # Those of the sources themselves see the notes. Others count for nothing: what finds a mutant has to pass without.
    for test in _FAILED.findall(text):
        print(f"    {test} fails while lines are noted", flush=True)
    tests_of: dict[str, set[str]] = defaultdict(set)
    for line in notes.read_text(encoding="utf-8").splitlines():
        name, _, test = line.partition(" ")
        if test:
            tests_of[name].add(test)
    made = Record(seconds=recorded(report), tests_of={name: sorted(tests) for name, tests in tests_of.items()})
    _RECORD.parent.mkdir(exist_ok=True)
    _RECORD.write_text(json.dumps(asdict(made)), encoding="utf-8")
    return made


def known() -> Record | None:
    """The last record: it decides which tests run, and in which order."""
    return Record(**json.loads(_RECORD.read_text(encoding="utf-8"))) if _RECORD.exists() else None


def last_finders(*, tier: str) -> dict[str, str]:
    """The tests that found the mutants last, by the mutants' names."""
    slow = slow_tests() if tier == "quick" else frozenset()
    found = _FOUND.findall(_LAST.read_text(encoding="utf-8"))
    return {
        name: test
        for name, test in found
        if function_of(test) not in slow and (ROOT / test.partition("::")[0]).exists()
    }


def order_again(mutant: Mutant, finder: str) -> Order:
    """The test that found it last, if one did, and those in its file and in the folder of its room."""
    batches = [[finder], [finder.partition("::")[0]]] if finder else []
    folder = ROOT / "tests" / Path(mutant.file).parent
    twin, of_folder = folder / f"test_{Path(mutant.file).name}", folder.with_name(f"test_{folder.name}.py")
    near = sorted(folder.glob("test_*.py"), key=lambda each: each != twin)
    near += [of_folder] if of_folder.exists() else []
    batches += [[str(each.relative_to(ROOT))] for each in near]
    return Order(name=mutant.name, file=str(mutant.path), text=_changed(mutant), batches=batches)


def order_of(mutant: Mutant, made: Record, *, tier: str, near: bool) -> Order:
    """The tests that run the changed line, those of a few near files first; then, unless `near`, those in processes."""
    slow = slow_tests()
    by_file: dict[str, list[str]] = defaultdict(list)
    late: list[str] = []
    for test in made.tests_of.get(mutant.name, ()):
        (late if function_of(test) in slow else by_file[test.partition("::")[0]]).append(test)

    def seconds_of(tests: Sequence[str]) -> float:
        return sum(made.seconds.get(test, 1.0) for test in tests)

    # The innermost folder first (tests/engine/zero), then the room, then the shortest.
    files = sorted(
        by_file,
        key=lambda file: (
            not file.startswith(f"tests/{Path(mutant.file).parent}/"),
            not file.startswith(f"tests/{mutant.room}"),
            seconds_of(by_file[file]),
        ),
    )
    parts = [files[:_NEAREST_FILES], files[_NEAREST_FILES:]]
    batches = [[test for file in part for test in by_file[file]] for part in parts]
    apart = [test for test in made.seconds if test.startswith(_IN_PROCESSES)]
    batches.append([test for test in apart if function_of(test) not in slow])
    if tier == "all":
        late.sort(key=lambda test: made.seconds.get(test, 1.0))
        batches += [late, [test for test in apart if function_of(test) in slow]]
    return Order(
        name=mutant.name,
        file=str(mutant.path),
        text=_changed(mutant),
        batches=[each for each in (batches[:1] if near else batches) if each],
    )


def _changed(mutant: Mutant) -> str:
    return mutant.applied((ROOT / mutant.path).read_text(encoding="utf-8"))


def answers(orders: Sequence[Order], tree: Tree, folder: Path, *arguments: str) -> Iterator[Answer]:
    """Let one pytest carry out the orders, each answer as it comes. Ends the program where it does not."""
    written, output = folder / "orders.json", folder / "output.txt"
    written.write_text(json.dumps([asdict(each) for each in orders]), encoding="utf-8")
    reading, writing = os.pipe()
    process = tree.pytest(
        ["-n0", "-p", "tests.mutants.forks", *arguments],
        output,
        environment={ORDERS: str(written), ANSWERS: str(writing)},
        pass_fds=[writing],
    )
    os.close(writing)
    num_answers = 0
    with os.fdopen(reading) as lines:
        for line in lines:
            num_answers += 1
            yield Answer(**json.loads(line))
    process.wait()
    if num_answers < len(orders):
        sys.exit(f"pytest has ended early:\n{output.read_text(encoding='utf-8', errors='replace')[-4000:]}")


def run_all(
    chosen: Sequence[Mutant], order_for: Callable[[Mutant], Order], folder: Path, jobs: int, *, is_last: bool
) -> dict[str, Finding]:
    """Try all mutants out; prints each when it is done. What is not found counts only where no other try follows."""
    found: dict[str, Finding] = {}
    folder.mkdir()
    of_name = {each.name: each for each in chosen}

    def work(number: int) -> None:
        own = folder / str(number)
        own.mkdir()
        tree = Tree(own / "tree")
        orders = [order_for(each) for each in chosen[number::jobs]]
        files = {test.partition("::")[0] for order in orders for batch in order.batches for test in batch}
        for answer in answers(orders, tree, own, "-m", "not stress", *sorted(files)):
            note(answer)

    def note(answer: Answer) -> None:
        mutant = of_name[answer.name]
        if not answer.test and not is_last:
            print(f"    {mutant.name} is not found near", flush=True)
            return
        found[answer.name] = Finding(
            mutant=mutant, seconds=answer.seconds, test=answer.test, is_timeout=answer.is_timeout
        )
        print(found[answer.name], flush=True)
        for test in answer.unsound:
            print(f"    {test} fails alone, without a mutant too", flush=True)

    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(work, range(min(jobs, len(chosen)))))
    return found


def table(found: Sequence[Finding], command: str, cpu_seconds: float) -> str:
    """The results as Markdown."""
    kinds = sorted({each.mutant.kind for each in found})
    rooms = list(dict.fromkeys(each.mutant.room for each in found))
    hits = Counter((each.mutant.room, each.mutant.kind) for each in found if each.test)
    counts = Counter((each.mutant.room, each.mutant.kind) for each in found)

    def cell(room: str | None, kind: str | None) -> str:
        fits = [key for key in counts if room in (None, key[0]) and kind in (None, key[1])]
        return f"{sum(hits[key] for key in fits)}/{sum(counts[key] for key in fits)}" if fits else ""

    rows = [[room, *(cell(room, kind) for kind in kinds), cell(room, None)] for room in rooms]
    rows.append(["all", *(cell(None, kind) for kind in kinds), cell(None, None)])
    lines = [f"| room | {' | '.join(kinds)} | all |", f"{'|---' * (len(kinds) + 2)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    seconds = sorted(each.seconds for each in found)
    return "\n".join(
        [
            *lines,
            "",
            f"{sum(hits.values())} of {len(found)} mutants are found, {sum(each.is_slow for each in found)} of them by "
            f"slow tests, {sum(each.is_timeout for each in found)} by a time limit; {sum(seconds):.0f} s in all, "
            f"{seconds[len(seconds) // 2]:.1f} s the median, {cpu_seconds:.0f} s of processors: `{command}`.",
        ]
    )


def heading() -> str:
    """Where and when the list was tried out."""
    asked = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    day = datetime.date.today().isoformat()
    return f"One-line mutants of `{LIST.relative_to(ROOT)}` at commit {commit}, {day}, on {os.cpu_count()} cores."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--tier", choices=["quick", "all"], default="quick")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--record", action="store_true", help="find out anew which tests run which line")
    parser.add_argument(
        "--near",
        action="store_true",
        help=f"only the {_NEAREST_FILES} nearest files of tests",
    )
    parser.add_argument("--least", type=int, help="exit with 1 where fewer are found (95%%; all with --tier all)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the table and all lines to a file")
    arguments = parser.parse_args()
    listed = mutants()
    chosen = [each for each in listed if arguments.only is None or each.name in arguments.only]
    if unknown := set(arguments.only or ()) - {each.name for each in listed}:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        finders = last_finders(tier=arguments.tier)
        by_name: dict[str, Finding] = {}
        if not arguments.record:
            by_name = run_all(
                chosen,
                lambda each: order_again(each, finders.get(each.name, "")),
                folder / "again",
                arguments.jobs,
                is_last=False,
            )
        if left := [each for each in chosen if each.name not in by_name]:
            made = (None if arguments.record else known()) or record(listed, folder, arguments.jobs)
            by_name |= run_all(
                left,
                lambda each: order_of(each, made, tier=arguments.tier, near=arguments.near),
                folder / "all",
                arguments.jobs,
                is_last=True,
            )
        found = [by_name[each.name] for each in chosen]
    command = " ".join(["python -m tests.mutants", *sys.argv[1:]])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = table(found, command, used.ru_utime + used.ru_stime)
    print(text)
    if arguments.results is not None:
        lines = [f"- {each}" for each in found]
        arguments.results.write_text(
            "\n".join(["# Mutants", "", heading(), "", text, "", *lines, ""]), encoding="utf-8"
        )
    num_excused = sum(bool(each.mutant.survives) and not each.test for each in found)
    asked = len(found) - num_excused if arguments.tier == "all" else math.ceil(_LEAST_OF_QUICK * len(found))
    least = asked if arguments.least is None else arguments.least
    sys.exit(sum(bool(each.test) for each in found) < least)


if __name__ == "__main__":
    main()
