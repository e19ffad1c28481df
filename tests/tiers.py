"""Which tests are slow: recorded from a whole run, and read by conftest.py, which marks them.

    python -m pytest -m "not stress" --numprocesses 2 --junitxml=build/tests.xml
    python -m tests.tiers build/tests.xml       # writes tests/slow_tests.txt

`make test` leaves the slow ones out and `make test-all` runs everything. A test that is not in the list is not slow: a
new one runs in `make test` until somebody records again.
"""

import argparse
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_name("slow_tests.txt")
STRESS_LIST = Path(__file__).with_name("stress_tests.txt")
ROOT = Path(__file__).parents[1]

SLOW_SECONDS = 0.3
"""Tests from here on are a sixth of all, and take six sevenths of the time."""


LONG_SECONDS = 8.0
"""Tests from here on go first: at the end, all workers would wait for the last one."""


def slow_tests() -> dict[str, float]:
    """Seconds of the slow tests, by node id."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    split = (line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return {test: float(seconds) for seconds, test in split}


def stress_tests() -> frozenset[str]:
    """The node ids of cases that only `make stress` runs: others have the same values, and most pairs of them."""
    lines = STRESS_LIST.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


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
    times = recorded(arguments.report)
    slow = {test: seconds for test, seconds in times.items() if seconds >= arguments.seconds}
    head = f"# Tests of {arguments.seconds:g} s and more, written by `python -m tests.tiers`: seconds, node id.\n"
    LIST.write_text(head + "".join(f"{seconds:.1f} {test}\n" for test, seconds in sorted(slow.items())))
    rest = sum(times.values()) - sum(slow.values())
    print(f"{len(slow)} of {len(times)} tests are slow: {sum(slow.values()):.0f} s; the others take {rest:.0f} s")


if __name__ == "__main__":
    main()
