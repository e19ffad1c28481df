"""All tests of processes, time and faults, again and again beside busy processes: a test that fails once is a fault.

    python -m tests.again --runs 20 --busy 4

It prints a line for each run. What pytest said of a run with failures stays in build/again, with the load of the
machine; seeds, logs and durations stand in it.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "again"

_TELLS = re.compile(
    r"\b(subprocess|multiprocessing|os\.fork|fake_device|threading|time\.sleep|signal\.|SIG[A-Z]+|timeout_seconds|on_threads|"
    r"sw\.launch|launched|torchrun|pool|processes)\b"
)
"""What a file of tests names that start processes or threads, wait for something, or break something."""

_LAST_LINE = re.compile(r"^=* ?(\d+ (?:passed|failed).*?) ?=*$", re.MULTILINE)


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Processes that compute for nothing as long as the context is open."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def chosen_files() -> list[str]:
    """The files that are run, relative to the root."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(each.relative_to(ROOT)) for each in files if _TELLS.search(each.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=4, help="processes that compute for nothing meanwhile")
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    with busy_processes(arguments.busy):
        for at in range(1, arguments.runs + 1):
            output, began = KEPT / f"run-{at}.txt", time.monotonic()
            command = [sys.executable, "-m", "pytest", "-n", str(arguments.workers), "--dist", "worksteal", "-q"]
            # Beside processes without end a test of ten seconds takes minutes; one that hangs is found in any case.
            command += ["--timeout", "600", "-o", "faulthandler_timeout=900"]
            with output.open("w", encoding="utf-8") as file:
                code = subprocess.run(
                    [*command, "-m", "not stress", *chosen_files()],
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                ).returncode
            said = _LAST_LINE.findall(output.read_text(encoding="utf-8", errors="replace"))
            what = said[-1] if said else f"pytest ended with {code} and counted nothing"
            load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
            line = f"run {at}: {what}; {time.monotonic() - began:.0f} s in all, load {load}"
            print(line, flush=True)
            if code == 0:
                output.unlink()
            else:
                num_failed += 1
                output.write_text(f"{line}\n\n{output.read_text(encoding='utf-8', errors='replace')}", encoding="utf-8")
    if num_failed:
        sys.exit(f"{num_failed} of {arguments.runs} runs failed: {KEPT}")


if __name__ == "__main__":
    main()
