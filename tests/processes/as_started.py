"""Programs that are ranks of one world, each started as torchrun starts it.

They meet at a store that this process serves: no port is chosen which somebody else may take before a rank listens.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.forks.programs import ROOT, Program, started

PATIENCE_SECONDS = 200.0
"""For programs that end by themselves, on a machine that is busy with others."""


@contextlib.contextmanager
def world(size: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank, as the agent of torchrun sets it."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    yield [agent | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    del store


@contextlib.contextmanager
def ranks_of(
    programs: Sequence[Sequence[str]], *, environment: Mapping[str, str] | None = None, folder: Path = ROOT
) -> Iterator[list[Program]]:
    """A rank for each of the programs, which are the arguments of an interpreter (see `started`)."""
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(world(len(programs)))
        yield [
            stack.enter_context(started(arguments, environment=place | dict(environment or {}), folder=folder))
            for arguments, place in zip(programs, places, strict=True)
        ]


def ended(
    programs: Sequence[Sequence[str]], *, environment: Mapping[str, str] | None = None, folder: Path = ROOT
) -> list[tuple[int, str, str]]:
    """The exit code, the output and the errors of each rank, once all have ended."""
    with ranks_of(programs, environment=environment, folder=folder) as ranks:
        told = [each.communicate(timeout=PATIENCE_SECONDS) for each in ranks]
        return [(each.wait(timeout=0), *texts) for each, texts in zip(ranks, told, strict=True)]


def outputs(
    programs: Sequence[Sequence[str]], *, environment: Mapping[str, str] | None = None, folder: Path = ROOT
) -> list[str]:
    """What each rank has printed, once all have ended well."""
    found = ended(programs, environment=environment, folder=folder)
    assert all(code == 0 for code, *_ in found), found
    return [out for _, out, _ in found]
