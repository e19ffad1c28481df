"""Every exception of shardwise, and when it is raised. All derive from `ShardwiseError`.

A message says what was asked, what holds, and what to do. Where several ranks take part, every rank raises
the same verdict.
"""

from collections.abc import Sequence


class ShardwiseError(Exception):
    """The root of every error that shardwise raises on purpose."""


_SHOWN_PROBLEMS = 40
"""Lines of a message whose problems can be as many as a model has parameters."""

_SHOWN_CHARACTERS = 4000
"""Of one problem, which may show what a user gave: a state in the place of a path is as long as a model."""


def _listed(problems: Sequence[str]) -> str:
    problems = [f"{each[:_SHOWN_CHARACTERS]} ..." if len(each) > _SHOWN_CHARACTERS else each for each in problems]
    return problems[0] if len(problems) == 1 else "\n".join(f"  - {problem}" for problem in problems)


def few_of(names: Sequence[str], most: int = 3, *, quotes: bool = True) -> str:
    """The first of what may be many names, and how many more there are."""
    shown = ", ".join(map(repr, names[:most]) if quotes else names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def plural(count: int, noun: str) -> str:
    """A number and its noun: "1 file", "2 files", "2 batches"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


def in_words(error: BaseException) -> str:
    """The class of an error and what it says, if it says anything (KeyboardInterrupt does not)."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))


def _counted(problems: Sequence[str], about: str) -> str:
    """The first of what may be many problems, how many there are, and of what."""
    shown = list(problems[:_SHOWN_PROBLEMS])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    heading = "" if len(problems) == 1 else f"{len(problems)} problems:\n"
    return (f"{about}: " if about else "") + heading + _listed(shown)


class PlanError(ShardwiseError, ValueError):
    """A plan, mesh or spec that cannot hold. Carries every problem found, not only the first."""

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = problems
        heading = "" if len(problems) == 1 else f"{len(problems)} problems:\n"
        super().__init__(heading + _listed(problems))


class ConfigError(PlanError):
    """A training configuration that cannot hold: unknown keys, wrong types, missing files."""


class ModelError(ShardwiseError):
    """A model that cannot be run under the plan: partly overlapping storage, no loss in its output, bad factory."""


class OptimizerError(ShardwiseError):
    """An optimizer that does not fit the model or the plan: lost or foreign parameters, updates that need others."""


class MetricError(ShardwiseError):
    """A metric of an evaluation that cannot be computed, or not over several ranks."""


class BatchError(ShardwiseError, ValueError):
    """A batch that cannot be split into the microbatches of the plan."""


class DataError(ShardwiseError):
    """Training data that is missing, empty or too short."""


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written, found, trusted, or read into its target. Carries every problem found.

    `problems` has them all; the message lists the first of many, under `about`, what they are problems of.
    Unless the message says otherwise nothing was changed: neither an older save nor the target of a load.
    """

    def __init__(self, *problems: str, about: str = "") -> None:
        self.problems: tuple[str, ...] = problems
        super().__init__(_counted(problems, about))


class RewriteError(ShardwiseError, ValueError):
    """A rewrite that cannot be parsed, does not fit the tensors, or cannot be undone. Carries every problem found.

    Each problem shows its statement with line, column and a caret. `problems` has them all; the message the first 40.
    """

    def __init__(self, *problems: str, about: str = "") -> None:
        self.problems: tuple[str, ...] = problems
        super().__init__(_counted(problems, about))


class CallbackError(ShardwiseError):
    """A callback of a loop that raised an error; the message names it, its method and what it raised."""


class DivergedError(ShardwiseError):
    """Training whose gradient has not been finite for many updates in a row: nothing is learnt any more."""


class UnderflowWarning(UserWarning):
    """Gradients that float16 may round to zero, at parallelize; at a step, gradients that are all zero."""


class ActivationsWarning(UserWarning):
    """A checkpointed module that is given an object with tensors in it, such as a cache; they are kept for backward."""


class SameRowsWarning(UserWarning):
    """Data ranks that train on the same rows in one of the first steps. Names the ranks."""


class CollectivesWarning(UserWarning):
    """A forward or a loss that would use a process group, and shardwise has none. Names the line."""


class StageReadsWarning(UserWarning):
    """A step whose microbatches wait for each other, since the program reads values of a stage. Names the line."""


class VersionsWarning(UserWarning):
    """Ranks of one run with unlike versions of shardwise or torch. Names ranks and versions."""


class MismatchError(ShardwiseError):
    """Ranks were given different models, plans, calls or tensors. Names the ranks and the first difference."""


class CallMismatchError(MismatchError):
    """Ranks made calls on one channel that do not fit each other: their programs took different ways."""


class PeerError(ShardwiseError):
    """A peer died, got stuck or stopped with its own error.

    `rank` is the peer (world rank), `operation` what this rank was doing, `purpose` what it was for.
    """

    def __init__(self, message: str, *, rank: int | None = None, operation: str = "", purpose: str = "") -> None:
        self.rank = rank
        self.operation = operation
        self.purpose = purpose
        super().__init__(message)
