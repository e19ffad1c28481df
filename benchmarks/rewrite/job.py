"""`python -m benchmarks.rewrite.job plan 10000`, or `convert NAME SOURCE DESTINATION`: one run, told as JSON.

Every run has a process of its own, which has imported what it needs and nothing else.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["converted", "main", "planned"]


def planned(num_names: int) -> dict[str, float]:
    """Seconds of each phase of planning for so many names, in a fresh process."""
    return dict(_in_process("plan", str(num_names)))


def converted(name: str, source: Path, destination: Path) -> dict[str, Any]:
    """The fields of what a run of `converting` took, in a fresh process."""
    return dict(_in_process("convert", name, str(source), str(destination)))


def _in_process(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.rewrite.job", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main(arguments: list[str]) -> None:
    """Do what the arguments say, and print what it took."""
    if arguments[0] == "plan":
        from benchmarks.rewrite.planning import plan

        print(json.dumps(plan(int(arguments[1]))))
        return
    from benchmarks.rewrite.converting import run

    print(json.dumps(asdict(run(arguments[1], Path(arguments[2]), Path(arguments[3])))))


if __name__ == "__main__":
    main(sys.argv[1:])
