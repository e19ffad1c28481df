"""Programs as users start them: the README's under torchrun, and a launcher that is killed outright."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.forks.programs import started

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
    agent = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
    with started(["-c", agent, "--standalone", "--nproc-per-node", "2", str(file)]) as torchrun:
        out, err = torchrun.communicate(timeout=100)
        assert torchrun.wait(timeout=0) == 0, err
    assert (out.count("learnt"), out.count("not")) == (2, 0)  # ranks may write into one line


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word of a parent's death is Linux's")
def test_a_launcher_killed_outright_leaves_no_ranks_behind(tmp_path: Path) -> None:
    text = f"from shardwise.comm import launch; launch(None, ['-c', {WAITS!r}], num_processes=2)"
    with started(["-c", text], environment={"PIDS": str(tmp_path)}) as launcher:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            assert is_running(launcher.pid)
            os.sched_yield()
        pids = [int(file.name) for file in tmp_path.iterdir()]
        launcher.send_signal(signal.SIGKILL)
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline
            os.sched_yield()
