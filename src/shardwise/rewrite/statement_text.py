"""Writing: statements as text that is parsed into the same statements."""

from collections.abc import Iterable, Iterator

from shardwise.rewrite.spelling import text_of_name
from shardwise.rewrite.statement_arguments import RECORDED, StatementNames
from shardwise.rewrite.statements import (
    Cast,
    Concat,
    Ffn,
    Name,
    Permute,
    Qkv,
    QkvPerRank,
    Reshape,
    SplitStatement,
    Stack,
    Statement,
    StatementOperation,
    Unstack,
)

__all__ = ["text_of"]


def text_of(statement: Statement) -> str:
    """Return how a statement is written: on one line, names in quotes where they have to be.

    Parsing it gives an equal statement, but for places and text. What an inverse takes from the tensors that the
    forward rewrite was applied to is written as `recorded`: `a -> b, dtype=recorded`.
    """
    left, right = _side(statement.left, right=False), _side(statement.right, right=True)
    names = StatementNames.of(statement.left, statement.right)
    alone = not names.joins and not names.parts  # then joining or parting along a dim changes nothing
    operations = [each for each in statement.operations if not (alone and isinstance(each, Concat | SplitStatement))]
    arguments = [each for operation in operations for each in _arguments(operation)]
    if statement.optional:
        arguments.append("optional=1")
    if statement.gaps:
        arguments.append("gaps=1")
    return ", ".join([f"{left} -> {right}", *arguments])


def _side(names: Iterable[Name], *, right: bool) -> str:
    return ", ".join(text_of_name(name, right=right) for name in names) or "_"


def _arguments(operation: StatementOperation) -> Iterator[str]:
    match operation:
        case Permute(dims):
            yield f"permute={_list(dims or ())}"
        case Reshape(shape):
            yield f"reshape={_list(shape) if shape is not None else RECORDED}"
        case Cast(to, None):
            yield f"dtype={_word(to)}"
        case Cast(to, source):
            yield f"src_dtype={_word(source)}"
            yield f"dst_dtype={_word(to)}"
        case Concat(axis, sizes):
            yield f"axis={axis}"
            yield from [f"sizes={_list(sizes)}"] if sizes is not None else []
        case SplitStatement(axis, sizes, recorded):
            yield f"axis={axis}"
            yield from [f"sizes={RECORDED}"] if recorded else [f"sizes={_list(sizes)}"] if sizes is not None else []
        case Stack(axis) | Unstack(axis):
            yield f"stack={axis}"
        case Qkv() | QkvPerRank() | Ffn():
            yield from _fused(operation)


def _fused(operation: Qkv | QkvPerRank | Ffn) -> Iterator[str]:
    match operation:
        case Qkv(heads, groups, axis):
            values = {"fused_qkv": None, "num_heads": heads, "num_key_value_groups": groups, "axis": axis}
        case QkvPerRank(heads, groups, axis):
            values = {"fused_qkv_old": None, "num_heads": heads, "num_key_value_groups": groups, "axis": axis}
        case Ffn(axis):
            values = {"fused_ffn": None, "axis": axis}
    yield next(iter(values))
    if not isinstance(operation, Qkv):
        values |= {"src_tp": operation.source_degree, "dst_tp": operation.target_degree}
    yield from (f"{word}={value}" for word, value in values.items() if value is not None)
    if not isinstance(operation, Ffn) and operation.sizes is not None:
        yield f"sizes={_list(operation.sizes)}"


def _word(dtype: str | None) -> str:
    return f"'{dtype}'" if dtype is not None else RECORDED


def _list(numbers: Iterable[int]) -> str:
    return f"'[{','.join(map(str, numbers))}]'"
