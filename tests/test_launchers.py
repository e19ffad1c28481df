"""What launchers announce: several processes make one world or none starts, and a program that runs once runs alone."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from shardwise.comm import default_channel
from shardwise.errors import PlanError
from shardwise.launchers.environment import announced, first_host, place_of, thread_settings
from tests.forks.programs import started
from tests.refusals import Refusals

JOB = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[07-08]", "SLURM_JOB_NODELIST": "node[07-08]"}
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "ENVIRONMENT": "BATCH"}
STEP = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node08,node10"}
TASK = {**BATCH, **STEP, "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node07-81@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INDEXED = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-0.train"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node07", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (JOB, None),  # the shell of salloc
        (BATCH, None),
        ({**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)}, None),
        (
            {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
            None,
        ),  # salloc with a step of its own
        ({**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun -n 1 in a job of four tasks
        (TASK, (2, 4)),
        ({**JOB, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, (3, 4)),
        ({**TASK, **TORCHRUN}, (0, 2)),  # torchrun as the one task of each node
        ({**OMPI, **TORCHRUN}, (0, 2)),
        (OMPI, (1, 2)),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({**TASK, **OMPI}, (1, 2)),  # its daemon is the task
        ({**TASK, "PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),  # srun --mpi=pmi2
        ({**HYDRA, "MASTER_PORT": "29500"}, (1, 2)),
        ({**INDEXED, **TORCHRUN}, (0, 2)),  # torchrun in each pod
        (INDEXED, (1, 2)),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "1"}, None),  # pods that each run alone
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0"}, None),
    ],
)
def test_who_is_started_together_and_who_runs_alone(
    environment: Mapping[str, str], place: tuple[int, int] | None
) -> None:
    assert place_of(environment) == place


@pytest.mark.parametrize("launcher", [HYDRA, {**OMPI, "PMIX_NAMESPACE": ""}, TASK])
@pytest.mark.parametrize("host", ["", "node07"])
@pytest.mark.parametrize("port", [0, 29500])
def test_what_is_missing_is_named_and_nothing_else(launcher: Mapping[str, str], host: str, port: int) -> None:
    found = announced(launcher)
    assert found is not None
    found = dataclasses.replace(found, host=host, port=port)
    if host and port:
        assert found.checked() is found
        return
    with pytest.raises(PlanError) as raised:
        found.checked()
    words = str(raised.value)
    for name, lacks, how in (("ADDR", "the address of rank 0", "the host of"), ("PORT", "a port where", "a free port")):
        is_missing = not (host if name == "ADDR" else port)
        assert [f"MASTER_{name} " in f"{words.partition('; ')[0].partition('. For a')[0]} "] == [is_missing]
        assert (lacks in words, how in words) == (is_missing, is_missing)
    assert ("rank 0 is on node07" in words) == bool(host)


@pytest.mark.parametrize(
    ("quota", "alone", "four"),
    [("max 100000", None, "2"), ("400000 100000", "4", "1"), ("50000 100000", "1", "1"), ("no file", None, "2")],
)
def test_threads_spin_for_a_short_time_and_are_no_more_than_the_quota(
    quota: str, alone: str | None, four: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr("shardwise.launchers.environment._QUOTA", tmp_path / "cpu.max")
    if quota != "no file":
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    short = {"GOMP_SPINCOUNT": "10000"}
    assert thread_settings(None) == ({**short, "OMP_NUM_THREADS": alone} if alone else short)
    assert thread_settings(4) == {**short, "OMP_NUM_THREADS": four}
    assert thread_settings(99)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # a count would come before it
    assert thread_settings(4) == {"OMP_NUM_THREADS": four}


def test_tasks_of_a_step_find_rank_0_without_being_told() -> None:
    tasks = [announced({**TASK, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    (port,) = {task.port for task in tasks if task is not None}
    assert 15_000 <= port < 30_000
    assert {(task.host, task.port, task.job) for task in tasks if task is not None} == {("node08", port, "slurm 71.3")}
    other = announced({**TASK, "SLURM_STEP_ID": "4"})
    assert other is not None
    assert other.port != port
    named = announced({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert named is not None
    assert (named.host, named.port, named.local_rank) == ("10.0.0.1", 4000, 1)
    local = announced(OMPI)
    assert local is not None
    assert (local.host, local.local_rank) == ("127.0.0.1", 1)


def test_mpirun_in_a_job_begins_with_its_first_node() -> None:
    # A daemon on the second node is the only task of a step of that node.
    daemon = {**TASK, "SLURM_STEP_NODELIST": "node08", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    processes = [
        announced({**place, **OMPI, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
        for rank, place in enumerate((BATCH, daemon))
    ]
    found = {(each.launcher, each.host, each.port, each.size) for each in processes if each is not None}
    assert len(found) == 1
    assert {each[:2] for each in found} == {("mpirun", "node07")}


def channel_of(environment: Mapping[str, str]) -> None:
    """The channel of a program that this launcher has started."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith(PREFIXES)}
    with mock.patch.dict(os.environ, {**kept, **environment}, clear=True):
        default_channel()


PREFIXES = ("SLURM_", "OMPI_", "PMI", "MASTER_", "JOB_COMPLETION_INDEX", "RANK", "WORLD_SIZE")
REFUSED = Refusals(
    "launchers",
    {
        "mpirun on several hosts": partial(channel_of, {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
        "mpiexec without a port": partial(channel_of, HYDRA),
        "srun with tasks anywhere": partial(channel_of, {**TASK, "SLURM_DISTRIBUTION": "arbitrary"}),
        "an indexed job of unknown size": partial(channel_of, {"JOB_COMPLETION_INDEX": "1"}),
        "an indexed job without a host": partial(channel_of, {**INDEXED, "MASTER_ADDR": ""}),
        "an index behind the last": partial(channel_of, {**INDEXED, "JOB_COMPLETION_INDEX": "2"}),
        "a task behind the last": partial(channel_of, {**TASK, "SLURM_PROCID": "4"}),
        "a number in words": partial(channel_of, {**TASK, "SLURM_STEP_NUM_TASKS": "four"}),
    },
    kind=PlanError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_several_processes_that_cannot_meet_are_refused_with_the_way_out(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[003-005,9],gpu1", "node003"),
        ("node[9,003-005]", "node9"),
        ("gpu1,gpu2", "gpu1"),
        ("r[1-2]n[07,09]-ib", "r1n07-ib"),
        ("", ""),
    ],
)
def test_the_first_of_a_list_of_hosts(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


PROGRAM = """
import shardwise as sw
channel = sw.default_channel()
print(channel.size, [int(each) for each in channel.exchange(str(channel.rank).encode(), purpose="ranks")])
channel.close()
"""


@pytest.mark.processes
def test_tasks_of_srun_are_one_world() -> None:
    """They find rank 0 by a port of the job, which is this process's own."""
    step = {**JOB, **STEP, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    step["SLURM_STEP_NUM_TASKS"] = "2"
    with contextlib.ExitStack() as stack:
        places = [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
        tasks = [stack.enter_context(started(["-c", PROGRAM], environment=place)) for place in places]
        assert [task.communicate(timeout=100) for task in tasks] == [("2 [0, 1]\n", "")] * 2
