"""How a run ends badly: exit codes, and one paragraph on stderr, whichever of the ranks have something to say."""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from shardwise.errors import BatchError, DataError, ModelError, OptimizerError, PeerError, PlanError, ShardwiseError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one process has to say about its end."""

    paragraph: str
    exit_code: int
    is_about_peer: bool
    """The cause lies with another rank, whose own words are better."""
    traceback: str = ""
    """What `--debug` adds. It is told with the words, and so once, however many ranks have met the consequences."""

    @classmethod
    def of(cls, error: Exception, *, rank: int | None, debug: bool) -> "Verdict":
        """What to say about `error`, met on `rank`; None where there are no ranks yet."""
        words = str(error)
        if not isinstance(error, ShardwiseError):
            who = "" if rank is None else f"rank {rank}: "
            words = f"{who}{type(error).__name__}: {words}"
        words = "\n".join([words, *getattr(error, "__notes__", ())])
        asked = isinstance(error, PlanError | DataError | ModelError | OptimizerError | BatchError)
        return cls(
            paragraph=f"Error: {words}",
            exit_code=WRONG_USAGE if asked else FAILED,
            is_about_peer=isinstance(error, PeerError),
            traceback="".join(traceback.format_exception(error)) if debug else "",
        )

    def leave(self, folder: Path, rank: int) -> None:
        """Leave it for the process that started the ranks."""
        (folder / f"{rank:06}.part").write_text(json.dumps(asdict(self)), encoding="utf-8")
        (folder / f"{rank:06}.part").rename(folder / f"{rank:06}.json")  # a rank that is stopped here leaves no torso


def weighed(folder: Path) -> Verdict | None:
    """The one verdict to tell, of all that the ranks have left: of a rank that failed, rather than of its peers."""
    found = [Verdict(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]
    return min(found, key=lambda verdict: verdict.is_about_peer, default=None)


def tell(verdict: Verdict) -> None:
    """Say it on stderr."""
    if verdict.traceback:
        click.echo(verdict.traceback, err=True)
    click.echo(verdict.paragraph, err=True)


@contextlib.contextmanager
def told(*, debug: bool) -> Iterator[None]:
    """End a command that fails in one process: a paragraph on stderr, and its exit code."""
    try:
        yield
    except (BrokenPipeError, click.ClickException):  # who reads the output has seen enough; click has its own words
        raise
    except KeyboardInterrupt:
        click.echo("stopped by Ctrl-C", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        verdict = Verdict.of(error, rank=None, debug=debug)
        tell(verdict)
        sys.exit(verdict.exit_code)
