"""The words with which a plan says how parameters are cut over the ranks along `tp`.

A rule is a word, and settings in brackets where it needs them: `column`, `column(unit=64)`, `row(parts=4096+1024)`.

    column      outputs of a linear map (or columns of an embedding): each rank has its own, and goes on with them
    row         inputs of a linear map: each rank comes with its own, and the sum over the ranks goes on
    vocab       tokens: rows of an embedding, which are summed; outputs of a head, which are gathered
    replicate   whole on every rank, and so are all modules inside without a rule
    sequence    whole; each rank works on its own positions, which are gathered (norms, dropout)
    heads       of a module of heads: its attributes count this rank's heads while it runs, for forwards that read them
    sum         a module with cut bare parameters: each rank computes a part of a sum (experts)
    once        what counts once in such a sum: a bias, a path around; the first rank's goes on
    split       this module and what follows work on this rank's positions, up to a `gather`
    auto        what the model itself carries, or what a run of it allows; any other rule beats it:
                {"*": "auto", "lm_head": "column"}

and the words of transformers (`colwise`, `packed_colwise`, `moe_tp_experts` ...) with the meaning that they have there.
Of a bare parameter, `column` cuts the last dim but one (the last of a vector), `row` the last. Settings:

    unit=64            so many indices stay together. Without it, what is in a module of heads is cut between groups
                       of heads (a key-value head with its query heads)
    groups=8           the dim, or each of its parts, is so many units side by side (8+8+1024: of each part)
    parts=3            the dim is 3 equal stretches side by side (query, key, value), each cut for itself;
    parts=8+2+2        or stretches of these sizes
    dim=1              of a bare parameter: the dim to cut; of `sequence` and `split`: that of the positions (1)
    gather=1           column, vocab: the input is this rank's positions (dim 1), which are gathered before
    scatter=1          row, vocab: of the sum, each rank goes on with its positions (dim 1)
    size=64            mla_kv_a_proj: so many last outputs are read by the heads of all ranks
    attributes=a+b     heads: these attributes grow with the number of heads
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.errors import PlanError

Kind = Literal[
    "column", "row", "vocab", "channels", "whole", "sum", "once", "tail", "sequence", "split", "heads", "auto"
]
"""What a rule comes down to. `channels`: columns of an embedding; `once`: on the first rank only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule as the planner reads it."""

    text: str
    """As it was written."""
    kind: Kind
    gathers: bool = False
    """Of what gives each rank its own part: the parts are put together for every rank."""
    splits: bool = False
    """Of what takes each rank's own part: it is taken from an input that every rank has whole."""
    sums_gradients: bool = False
    """The parameters are whole, and see other activations on each rank."""
    parts: int | tuple[int, ...] = 1
    """Stretches of the cut dim that are cut each for itself: so many equal ones, or of these sizes."""
    unit: int | None = None
    """Indices of the cut dim that stay together; None: the planner looks for heads."""
    groups: int | tuple[int, ...] | None = None
    """Units of the cut dim: so many in each of its parts, or these. Of `heads`: groups that the attributes count."""
    dim: int | None = None
    """Of a bare parameter: the dim that is cut. Of `sequence` and `split`: the dim of the positions."""
    size: int | None = None
    """Of `mla_kv_a_proj`: how many of the last outputs every head reads."""
    gather: int | None = None
    """The input is this rank's part along this dim: it is gathered before."""
    scatter: int | None = None
    """The output is left as this rank's part along this dim."""
    attributes: tuple[str, ...] = ()
    """Of `heads`: attributes of the module that are as many times larger as there are more heads on all ranks."""


# For each word its defaults and the settings that may change them. Words with one meaning (`colwise` and `column`) come
# down to one kind and its flags, so that the planner never looks at a word.
_COLUMN = frozenset({"parts", "unit", "groups", "dim", "gather"})
_ROW = frozenset({"parts", "unit", "groups", "dim", "scatter"})
_NONE: frozenset[str] = frozenset()

_WORDS: dict[str, tuple[Rule, frozenset[str]]] = {
    rule.text: (rule, settings)
    for rule, settings in (
        (Rule(text="column", kind="column"), _COLUMN),
        (Rule(text="row", kind="row"), _ROW),
        (Rule(text="vocab", kind="vocab", gathers=True), frozenset({"unit", "gather", "scatter"})),
        (Rule(text="replicate", kind="whole"), _NONE),
        (Rule(text="sequence", kind="sequence", sums_gradients=True, dim=1), frozenset({"dim"})),
        (Rule(text="split", kind="split", dim=1), frozenset({"dim"})),
        (Rule(text="heads", kind="heads"), frozenset({"attributes", "groups"})),
        (Rule(text="sum", kind="sum"), _NONE),
        (Rule(text="once", kind="once"), _NONE),
        (Rule(text="auto", kind="auto"), _NONE),
        # The words of transformers.distributed.tensor_parallel, so that a model's own plan is read as it stands.
        # `packed` is a gate and an up projection in one matrix: each half is cut for itself. `embedding_rowwise` is
        # `vocab` without `gathers`, which leaves it to embeddings: the planner refuses it for a head.
        (Rule(text="colwise", kind="column"), _COLUMN),
        (Rule(text="colwise_rep", kind="column", gathers=True), _COLUMN),
        (Rule(text="colwise_gather_output", kind="column", gathers=True), _COLUMN),
        (Rule(text="rowwise", kind="row"), _ROW),
        (Rule(text="rowwise_rep", kind="row", splits=True), _ROW),
        (Rule(text="rowwise_split_input", kind="row", splits=True), _ROW),
        (Rule(text="packed_colwise", kind="column", parts=2), _COLUMN),
        (Rule(text="packed_rowwise", kind="row", parts=2), _ROW),
        (Rule(text="embedding_rowwise", kind="vocab"), frozenset({"unit", "scatter"})),
        (Rule(text="embedding_colwise", kind="channels", gathers=True), frozenset({"unit"})),
        (Rule(text="sequence_parallel", kind="whole", sums_gradients=True), _NONE),
        (Rule(text="replicated_with_grad_allreduce", kind="whole", sums_gradients=True), _NONE),
        (Rule(text="mla_kv_a_proj", kind="tail"), frozenset({"size"})),
        (Rule(text="all_reduce", kind="sum"), _NONE),
        (Rule(text="moe_tp_experts", kind="sum"), _NONE),
        (Rule(text="moe_identity_expert", kind="once"), _NONE),
        (Rule(text="local_params", kind="whole"), _NONE),
    )
}

RULES = tuple(_WORDS)
"""Every word that a rule may begin with."""


def read_rule(text: str) -> Rule:
    """The rule that a text writes down; raises PlanError for an unknown word or setting.

    >>> read_rule("column(parts=2, unit=64)").parts, read_rule("row(parts=4096+1024+1024)").parts
    (2, (4096, 1024, 1024))
    """
    written = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text)
    word = written[1] if written else text
    if written is None or word not in _WORDS:
        raise PlanError(f"the rule {text!r} is unknown; the rules are {', '.join(RULES)}")
    rule, known = _WORDS[word]
    values: dict[str, Any] = {}
    for setting in filter(None, map(str.strip, (written[2] or "").split(","))):
        name, _, value = (each.strip() for each in setting.partition("="))
        if name not in known:
            listed = f"it knows {', '.join(sorted(known))}" if known else "it knows none"
            raise PlanError(f"the rule {text!r} has the setting {setting!r}; of the settings of {word!r}, {listed}")
        values[name] = _value(text, name, value)
    return replace(rule, text=text, **values)


def _value(text: str, name: str, value: str) -> object:
    if name == "attributes" and all(each.strip().isidentifier() for each in value.split("+")):
        return tuple(each.strip() for each in value.split("+"))
    numbers = [int(each) for each in value.split("+") if each.strip().isdigit()]
    # Fewer numbers than words between plus signs: one of them was no number. Dims count from 0, sizes from 1.
    least = 0 if name in ("dim", "gather", "scatter") else 1
    if (
        len(numbers) != value.count("+") + 1
        or min(numbers) < least
        or (len(numbers) > 1 and name not in ("parts", "groups"))
    ):
        examples = {"parts": "parts=3, or parts=4096+1024+1024", "attributes": "attributes=num_heads+hidden_size"}
        wanted = "name" if name == "attributes" else f"number from {least} on"
        raise PlanError(
            f"the rule {text!r} has {name}={value!r}, which is no {wanted}; write {examples.get(name, f'{name}=1')}"
        )
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def rule_problems(rules: Mapping[str, str]) -> list[str]:
    """One finding per unknown rule."""
    problems = []
    for name, text in rules.items():
        try:
            read_rule(text)
        except PlanError as error:
            problems += [f"{name!r}: {problem}" for problem in error.problems]
    return problems
