"""Programs as users start them: the README's under torchrun, and a launcher that is killed outright."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAITS = """
import os, signal
print(os.getpid(), flush=True)
open(f"{os.environ['PIDS']}/{os.getpid()}", "w").close()
signal.pause()
"""


def test_the_program_of_the_readme_runs_under_torchrun(tmp_path: Path) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    file = tmp_path / "program.py"
    file.write_text(program + "\nprint('learnt' if min(alone[-3:]) < alone[0] else 'not learnt')\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert (result.stdout.count("learnt"), result.stdout.count("not")) == (2, 0)  # ranks may write into one line


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word of a parent's death is Linux's")
def test_a_launcher_killed_outright_leaves_no_ranks_behind(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from shardwise.comm import launch; launch(None, ['-c', {WAITS!r}], num_processes=2)",
        ],
        env=os.environ | {"PIDS": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < deadline
        assert launcher.poll() is None
        os.sched_yield()
    pids = [int(file.name) for file in tmp_path.iterdir()]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        os.sched_yield()
