"""Applied statements: what was carried out, instance by instance. What undoes a rewrite exactly is made of them."""

from dataclasses import dataclass

from shardwise.rewrite.compiled_ops import CompiledOps
from shardwise.rewrite.environment import Variable
from shardwise.rewrite.expansion import Expanded
from shardwise.rewrite.statements import Statement, StatementOperation

__all__ = ["AppliedInstance", "InstanceGroup", "StatementTask"]


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances to which the same operations apply."""

    operations: tuple[StatementOperation, ...]
    instances: tuple[Expanded, ...] | None = None
    """None: what the statement is expanded to."""


@dataclass(frozen=True, slots=True)
class StatementTask:
    """Instances that are carried out at once: those of one statement, or of what undoes one."""

    statement: Statement
    """What findings show."""
    groups: tuple[InstanceGroup, ...]

    @classmethod
    def of(cls, statement: Statement) -> "StatementTask":
        """Return the task that a statement is."""
        return cls(statement, (InstanceGroup(statement.operations),))


class AppliedInstance:
    """An instance that was carried out."""

    __slots__ = ("along", "left", "ops", "right")

    def __init__(
        self, left: tuple[Variable, ...], right: tuple[Variable, ...], ops: CompiledOps | None, along: bool
    ) -> None:
        self.left = left
        self.right = right
        self.ops = ops
        """None: nothing but names changed; or one value without dims stands for all."""
        self.along = along
        """Whether this is optimizer state that went along with its parameter."""
