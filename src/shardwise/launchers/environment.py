"""The processes that a launcher has started together, as it announces them to each one in the environment.

    torchrun, --nproc       RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT                  always wins: it is the innermost
    mpirun of Open MPI      OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE
    mpirun of MPICH, Intel  PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun                    SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST
    an indexed job          JOB_COMPLETION_INDEX of Kubernetes; WORLD_SIZE and MASTER_ADDR from its manifest

A batch script and the shell of `salloc` are no tasks of a step. SLURM_NTASKS is set there for later steps, and a
program runs once. An indexed job does not say how many pods it has: without WORLD_SIZE it is refused. No MPI says
where rank 0 is. On one host that is known. In a job of SLURM, `mpirun` begins with the first node. Else it is refused.
"""

import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import PlanError

ONE_REQUEST_SECONDS = 1.0
"""Signals to stop that follow each other so closely are one request. Schedulers send them to all processes of a job,
launchers pass them on to theirs, and `timeout` sends them to its command and then to the group that the command is in.
"""

_BATCH_STEP = 0xFFFFFFF0
"""Numbers of steps from here on are those of SLURM itself: the batch script, the shell of `salloc`."""

_PORTS = range(15_000, 30_000)
"""For rank 0 to listen on, where SHARDWISE_PORTS does not say: below those that the kernel gives away."""

_QUOTA = Path("/sys/fs/cgroup/cpu.max")

_EXPORTS = {"mpirun": "-x {name}={value}", "mpiexec": "-genv {name} {value}"}
"""How launchers give a variable to all processes."""

_EXAMPLES = {"MASTER_ADDR": "$(hostname)", "MASTER_PORT": "29500"}

_ALONE = "for a program that runs alone, start one process, or set RANK=0 and WORLD_SIZE=1 and unset MASTER_ADDR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """One process among those that were started together."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    """The rank among those of this host; None where the launcher does not say."""
    host: str
    """Where rank 0 runs; empty where the environment does not say."""
    port: int
    """Where rank 0 listens; 0 where the environment does not say."""
    job: str
    """What sets the processes apart from those of other jobs that might meet at the same port."""

    def checked(self) -> "Announced":
        """Raises PlanError where the processes could not find each other."""
        missing = [name for name, value in (("MASTER_ADDR", self.host), ("MASTER_PORT", self.port)) if not value]
        if missing:
            option = _EXPORTS.get(self.launcher, "")
            shown = " ".join(option.format(name=name, value=_EXAMPLES[name]) for name in missing)
            with_option = f", as {self.launcher} {shown}" if option else ""
            lacks = {
                "MASTER_ADDR": ("the address of rank 0", "the host of rank 0"),
                "MASTER_PORT": ("a port where rank 0 listens", "a free port" if self.host else "a free port there"),
            }
            known = f": rank 0 is on {self.host}" if self.host else ""
            raise PlanError(
                f"{self.launcher} has started {self.size} processes, and this is rank {self.rank}, but "
                f"{' and '.join(lacks[name][0] for name in missing)} {'is' if len(missing) == 1 else 'are'} "
                f"missing{known}. Export {' and '.join(missing)} to all of them "
                f"({', '.join(lacks[name][1] for name in missing)}){with_option}, or start with torchrun. "
                f"{_ALONE[0].upper()}{_ALONE[1:]}"
            )
        return self

    def way_out(self) -> str:
        """What to do when the processes do not meet."""
        return (
            f"{self.launcher} announces {self.size} processes, and this is rank {self.rank}. If rank 0 runs "
            f"elsewhere, or the port is taken, export MASTER_ADDR and MASTER_PORT to all of them; {_ALONE}"
        )


def announced(environment: Mapping[str, str]) -> Announced | None:
    """What a launcher other than torchrun announces; None where it is torchrun, or where there is but one process.

    Raises PlanError where the environment contradicts itself.
    """
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    found = _mpi(environment)
    slurm = _slurm(environment)
    # srun speaks PMI as well; where both say the same, it says more. mpirun inside a job starts its own daemons by
    # srun, whose variables its processes inherit.
    if found is None or (slurm is not None and (slurm.rank, slurm.size) == (found.rank, found.size)):
        found = slurm
    if found is None:
        found = _indexed_job(environment)
    if found is None or found.size <= 1:
        return None
    if not 0 <= found.rank < found.size:
        raise PlanError(
            f"{found.launcher} announces rank {found.rank} of {found.size} processes; ranks are 0 to {found.size - 1}"
        )
    return found


def place_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank of this process and the number of those that were started with it; None where it runs alone.

    Raises PlanError where the processes could not find each other.
    """
    if {"RANK", "WORLD_SIZE"} <= environment.keys():
        rank, size = _number(environment, "RANK") or 0, _number(environment, "WORLD_SIZE") or 1
        return None if size == 1 and "MASTER_ADDR" not in environment else (rank, size)
    found = announced(environment)
    return None if found is None else (found.rank, found.checked().size)


def _mpi(environment: Mapping[str, str]) -> Announced | None:
    for launcher, rank_name, size_name, local_names, local_size_name in (
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
         "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("mpiexec", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), "MPI_LOCALNRANKS"),
        ("a PMIx launcher", "PMIX_RANK", "PMIX_SIZE", ("PMIX_LOCAL_RANK",), "PMIX_LOCAL_SIZE"),
    ):  # fmt: skip
        rank, size = _number(environment, rank_name), _number(environment, size_name)
        if rank is None or size is None:
            continue
        local_ranks = (_number(environment, name) for name in (*local_names, "LOCAL_RANK"))
        # All on one host, which is then this one. Else the nodes of the job: a daemon of mpirun may be in a step that
        # has the other nodes alone.
        host = first_host(environment.get("SLURM_JOB_NODELIST", "")) if launcher == "mpirun" else ""
        if _number(environment, local_size_name) == size:
            host = "127.0.0.1"
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
        return Announced(
            launcher=launcher,
            rank=rank,
            size=size,
            local_rank=next((local for local in local_ranks if local is not None), None),
            host=environment.get("MASTER_ADDR", host),
            port=_number(environment, "MASTER_PORT") or (_port_of(job, environment) if job else 0),
            job=f"mpi {job}",
        )
    return None


def _slurm(environment: Mapping[str, str]) -> Announced | None:
    rank = _number(environment, "SLURM_PROCID")
    step = _number(environment, "SLURM_STEP_ID", "SLURM_STEPID")
    says_so = rank or step is not None or "SLURM_STEP_NUM_TASKS" in environment
    if rank is None or not says_so or (step is not None and not 0 <= step < _BATCH_STEP):
        return None  # no job, or its batch script, or its shell
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if size is None:
        return None
    nodes = next((environment[name] for name in _NODES if environment.get(name)), "")
    # With an arbitrary distribution rank 0 may be on any node.
    first = "" if environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary") else first_host(nodes)
    job = f"{environment.get('SLURM_JOB_ID', environment.get('SLURM_JOBID', ''))}.{step if step is not None else ''}"
    return Announced(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        host=environment.get("MASTER_ADDR", first),
        port=_number(environment, "MASTER_PORT") or _port_of(job, environment),
        job=f"slurm {job}",
    )


def _indexed_job(environment: Mapping[str, str]) -> Announced | None:
    """A pod of an indexed job of Kubernetes, whose index is its rank."""
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    if rank is None:
        return None
    size = _number(environment, "WORLD_SIZE")
    if size is None:
        raise PlanError(
            f"Kubernetes announces index {rank} of an indexed job, but not how many pods it has. Set WORLD_SIZE in its "
            "manifest, as completions. Set MASTER_ADDR too: the pod of index 0 under the name of its service, such as "
            "train-0.train. Or start torchrun in the pods. For pods that each run alone, set WORLD_SIZE to 1"
        )
    host = environment.get("MASTER_ADDR", "")
    return Announced(
        launcher="Kubernetes",
        rank=rank,
        size=size,
        local_rank=0,  # a pod sees its own devices
        host=host,
        port=_number(environment, "MASTER_PORT") or (_port_of(host, environment) if host else 0),
        job=f"kubernetes {host}",
    )


_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it.

    >>> first_host("node[003-005,9],gpu1"), first_host("gpu1,gpu2"), first_host("r[1-2]n[07,09]-ib")
    ('node003', 'gpu1', 'r1n07-ib')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def thread_settings(num_processes: int | None) -> dict[str, str]:
    """Variables for the threads of each of so many processes on this host, where the user sets none.

    None: of one that runs alone, whose threads torch counts. They are read as torch is loaded.
    """
    # By default threads spin 300,000 times, up to 14 ms, and take the cores of those they wait for. So many times
    # outlast the gaps in a step, where waking a thread would cost 50 us.
    settings = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "10000"}
    visible = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    cores = min(visible, _quota())
    # How many there are decides how sums are rounded: torch's number stays, where it fits.
    if num_processes is not None or cores < visible:
        settings["OMP_NUM_THREADS"] = str(max(1, cores // (num_processes or 1)))
    return settings


def _quota() -> int:
    """Cores that the control group of this process may use, which torch does not look for."""
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):  # no such group, or none: "max 100000"
        return sys.maxsize
    return max(1, quota // period)


def listening_ports(environment: Mapping[str, str], *, otherwise: str | None = None) -> range | None:
    """The ports to listen on, from SHARDWISE_PORTS or else from a setting; None where neither says.

    Raises PlanError for what is no range.
    """
    text = environment.get("SHARDWISE_PORTS", "").strip() or otherwise
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise PlanError(f"ports to listen on are {text!r}, which is no range of ports from 1 to 65535: 20000-20100")
    return range(first, last + 1)


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """The value of the first variable that is set. Raises PlanError where it is no whole number."""
    for name in names:
        if text := environment.get(name, "").strip():
            if not re.fullmatch(r"-?\d+", text):
                raise PlanError(
                    f"the environment has {name}={text!r}, which is no whole number; set it right or unset it"
                )
            return int(text)
    return None


def _port_of(job: str, environment: Mapping[str, str]) -> int:
    """A port that the processes of a job find without asking, and those of another one seldom."""
    ports = listening_ports(environment) or _PORTS
    return ports[zlib.crc32(job.encode()) % len(ports)]
