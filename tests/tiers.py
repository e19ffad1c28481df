"""Which tests are slow: recorded from a whole run, by function, and read by conftest.py, which marks them.

    python -m pytest -m "not stress" --numprocesses 2 --junitxml=build/tests.xml
    python -m tests.tiers build/tests.xml       # writes tests/durations.txt

`make test` leaves the slow ones out and `make test-all` runs everything. A function that is not in the list is not
slow: a new one runs in `make test` until somebody records again. A table with quick and slow cases has two functions.
"""

import argparse
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

LIST = Path(__file__).with_name("durations.txt")

SLOW_SECONDS = 0.3
"""Of a case. Functions from here on are a tenth of all, and take six sevenths of the time."""

LONG_SECONDS = 8.0
"""Cases from here on go first: at the end, all workers would wait for the last one."""


@cache
def slow_tests() -> dict[str, float]:
    """Seconds of a case of each slow function, by the function's node id."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    split = (line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return {test: float(seconds) for seconds, test in split}


def function_of(node_id: str) -> str:
    """The node id without the parameters of the case."""
    return node_id.partition("[")[0]


def recorded(report: Path) -> dict[str, float]:
    """Seconds of each test of a JUnit report, by node id."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = str(case.get("classname")).replace(".", "/") + ".py"
        found[f"{module}::{case.get('name')}"] = float(str(case.get("time")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=SLOW_SECONDS)
    arguments = parser.parse_args()
    cases: dict[str, list[float]] = defaultdict(list)
    for test, seconds in recorded(arguments.report).items():
        cases[function_of(test)].append(seconds)
    slow = {function: each for function, each in sorted(cases.items()) if fmean(each) >= arguments.seconds}
    head = (
        f"# Functions with cases of {arguments.seconds:g} s and more, by `python -m tests.tiers`: seconds, node id.\n"
    )
    LIST.write_text(head + "".join(f"{fmean(each):.1f} {function}\n" for function, each in slow.items()))
    total, rest = (sum(map(sum, each.values())) for each in (slow, {k: v for k, v in cases.items() if k not in slow}))
    print(f"{len(slow)} of {len(cases)} functions are slow: {total:.0f} s; the others take {rest:.0f} s")


if __name__ == "__main__":
    main()
