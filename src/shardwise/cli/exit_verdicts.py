"""How a run ends badly: exit codes, and one paragraph on stderr from all ranks.

rank 2   raises DataError      -> 000002.json     "Error: shard 7 is empty"           exit 2
rank 0   finds rank 2 gone     -> 000000.json     about its peer                       exit PEER_FAILED
rank 1   finds rank 2 gone     -> 000001.json     about its peer                       exit PEER_FAILED
launcher reads all three, prints the words of rank 2 once, exits with 2
"""

import contextlib
import copy
import itertools
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from shardwise.errors import BatchError, DataError, ModelError, OptimizerError, PeerError, PlanError, ShardwiseError
from shardwise.runs.stop_signals import Stopped

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitVerdict:
    """What one process has to say about its end."""

    paragraph: str
    exit_code: int
    is_about_peer: bool
    """Another rank is the cause, and its own words are better."""
    traceback: str = ""
    """What `--debug` adds. Printed with the paragraph, and so once, however many ranks met the consequences."""

    @classmethod
    def of(cls, error: Exception, *, rank: int | None, debug: bool) -> "ExitVerdict":
        """What to say about `error`, met on `rank`; None where there are no ranks yet."""
        words = _words_of(error)
        # Our own errors say what was asked and what holds. Of others the class is half of the message: KeyError: 'x'.
        if not isinstance(error, ShardwiseError):
            who = "" if rank is None else f"rank {rank}: "
            words = f"{who}{words}"
        words = "\n".join([words, *getattr(error, "__notes__", ())])
        # What the user can change in the command, the file or the model is wrong usage; all else is a failure.
        asked = isinstance(error, PlanError | DataError | ModelError | OptimizerError | BatchError)
        return cls(
            paragraph=f"Error: {words}",
            exit_code=WRONG_USAGE if asked else FAILED,
            is_about_peer=isinstance(error, PeerError),
            traceback="".join(traceback.format_exception(error)) if debug else "",
        )

    def leave(self, folder: Path, rank: int) -> None:
        """Leave it for the process that started the ranks."""
        # Written under another name first: the launcher reads *.json while ranks are still being terminated.
        (folder / f"{rank:06}.part").write_text(json.dumps(asdict(self)), encoding="utf-8")
        (folder / f"{rank:06}.part").rename(folder / f"{rank:06}.json")  # a rank that is stopped here leaves no torso


def _words_of(error: Exception) -> str:
    """What `error` says, with its class if the class is not ours."""
    words = str(error)
    # A DataLoader raises the error of a worker again, with the worker's traceback as its message.
    caught, _, behind = words.rpartition("Traceback (most recent call last):\n")
    if match := re.match(r"Caught \w+ (in [^\n]+)\.\n", caught):
        lines = list(itertools.dropwhile(lambda line: line.startswith(" "), behind.rstrip().splitlines()))
        return "\n".join(lines) + f" ({match[1]})"
    return words if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {words}"


def deciding_verdict(folder: Path) -> ExitVerdict | None:
    """The verdict to print, of all that the ranks have left: of a rank that failed, rather than of its peers."""
    # `min` keeps the first of equals: the lowest rank, so that a second run of the same failure prints the same.
    found = [ExitVerdict(**json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*.json"))]
    return min(found, key=lambda verdict: verdict.is_about_peer, default=None)


def print_verdict(verdict: ExitVerdict) -> None:
    """Say it on stderr."""
    if verdict.traceback:
        click.echo(verdict.traceback, err=True)
    click.echo(verdict.paragraph, err=True)


@contextlib.contextmanager
def errors_in_words(*, debug: bool, rank: int | None = None, verdicts: Path | None = None) -> Iterator[None]:
    """End a command that fails: a paragraph on stderr, and its exit code.

    rank: of this process, where it is one of several. verdicts: where these leave what they have to say, for the
    process that started them; None: each says it.
    """
    try:
        yield
    except click.ClickException:  # click has its own words
        raise
    except KeyboardInterrupt as interrupt:
        if verdicts is None:
            click.echo("; ".join(["stopped by Ctrl-C", *getattr(interrupt, "__notes__", ())]), err=True)
        sys.exit(INTERRUPTED)
    except Stopped as stopped:
        # All ranks stop after the same update, with the same words: rank 0 says them for all.
        if not rank:
            click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and rank is None:  # who reads the output has seen enough
            raise
        verdict = ExitVerdict.of(error, rank=rank, debug=debug)
        # Under torchrun nobody collects files: each rank prints for itself, and torchrun shows the first to fail.
        if verdicts is None or rank is None:
            print_verdict(verdict)
            sys.exit(verdict.exit_code)
        verdict.leave(verdicts, rank)
        if verdict.is_about_peer:
            from shardwise.launchers.local import PEER_FAILED

            sys.exit(PEER_FAILED)  # to the launcher: look for the rank that caused it
        sys.exit(verdict.exit_code)


class Renamed(click.Option):
    """An option whose first name alone is shown. Scripts may use the others, which mean something else elsewhere."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """See click."""
        shown = copy.copy(self)
        shown.opts = self.opts[:1]
        return super(Renamed, shown).get_help_record(ctx)


def place_here(num_processes: int | None) -> tuple[int, int] | None:
    """The rank of this process and how many there are; None where it runs alone or starts `num_processes`.

    Raises UsageError where a launcher has started several, because each would start that many again.
    """
    from shardwise.launchers.environment import place_of

    place = place_of(os.environ)
    if num_processes is None or place is None:
        return place
    rank, size = place
    if size > 1:
        raise click.UsageError(
            f"--nproc {num_processes} starts processes, but a launcher (torchrun, srun or mpirun) has started {size} "
            f"already, and this is rank {rank}. Each would do the whole work again, in the same folder. Leave out "
            "--nproc and let the launcher start one process for each rank, or let it start one in all"
        )
    return None


def set_threads() -> None:
    """Give a process that computes alone the `thread_settings`, where torch is not loaded yet."""
    from shardwise.launchers.environment import thread_settings

    if "torch" not in sys.modules:
        for name, value in thread_settings(None).items():
            os.environ.setdefault(name, value)


def launched(arguments: Sequence[str], *, num_processes: int, overrides: Sequence[str], debug: bool) -> int:
    """Start the ranks of a command, wait for them, print the verdict that matters; returns the exit code."""
    from shardwise.comm import launch

    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        options = [word for each in overrides for word in ("--set", each)]
        options += ["--verdicts", folder, *(["--debug"] if debug else [])]
        code = launch("shardwise.cli", [*arguments, *options], num_processes=num_processes)
        verdict = deciding_verdict(Path(folder))
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if verdict is None or code == 0 or code > INTERRUPTED:  # stopped from outside: the ranks' words are its echo
        return code
    print_verdict(verdict)
    return verdict.exit_code
