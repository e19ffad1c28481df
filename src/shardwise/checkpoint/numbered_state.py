"""Optimizer state that other programs number: whose it is says the order of the target's optimizer, as in torch.

    file       number 0: exp_avg (4, 4)     number 1: exp_avg (4,)     a guess, or no names: see `optimizer_states`
    target     its optimizer was given decoder.weight (4, 4), decoder.bias (4,)
    ->         optimizer/decoder.weight/exp_avg, optimizer/decoder.bias/exp_avg

`load_state_dict` of torch takes number i of the file for number i of the live optimizer. So does a load here, if groups
have as many parameters and shapes fit. Otherwise nothing says whose the state is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from typing import Any

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.plan.names import split_state_name, state_name
from shardwise.plan.optimizer_entries import NumberedParameter, can_be_of
from shardwise.plan.saved_settings import GUESSED, LISTED, NUMBERED, ORDER_LOST

Order = Sequence[Sequence[NumberedParameter]]
"""For each group of an optimizer its parameters, as torch counts them."""


_MOST_ASSIGNMENTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedState:
    """Contents whose optimizer state has the names that the target's order gives it."""

    contents: Contents
    given: Mapping[str, str] = field(default_factory=dict)
    """For each tensor that got another name: the name under which it is stored."""
    findings: Sequence[str] = ()
    """What no order fits, and what is missing of the state."""
    notes: Sequence[str] = ()
    """Of the contents, without those that the order has settled."""


def is_unsettled(contents: Contents) -> bool:
    """Whether optimizer state of a checkpoint waits for the target's order, or was left out of its contents."""
    return bool(contents.left_state or contents.settings.get(NUMBERED))


def as_numbered(contents: Contents, orders: Sequence[Order]) -> OrderedState:
    """Name the numbered state of a checkpoint as the target's optimizers count. orders: of each of them.

    Without optimizers in the target nothing changes.
    """
    records: list[dict[str, Any]] = list(contents.settings.get(NUMBERED, ()))
    findings = [] if not contents.left_state or not orders else [f"{contents.left_state}; {_WITHOUT_STATE}"]
    if not records or not orders:
        return OrderedState(contents=contents, findings=findings, notes=contents.notes)
    owners = [{name for group in each["groups"] for name in group["parameters"]} for each in records]
    state = _by_owner(contents.tensors)
    chosen = _assignment(records, orders, state)
    if chosen is None:
        findings += [_misfit(each, orders) for each in records]
        # A guess is under names of the model, and is taken where it is let pass. Numbers are nobody's.
        numbers = {name for names in owners for name in names if name not in contents.tensors}
        held = {
            name: each for name, each in contents.tensors.items() if (split_state_name(name) or ("",))[0] not in numbers
        }
        return OrderedState(contents=replace(contents, tensors=held), findings=findings, notes=contents.notes)
    name_of = {
        old: new.name for record, order in zip(records, chosen, strict=True) for old, new in _pairs(record, order)
    }
    given = {
        state_name(name_of[owner], key): each.name
        for owner, entries in state.items()
        if name_of.get(owner, owner) != owner
        for key, each in entries.items()
    }
    moved = set(given.values())
    tensors = {name: each for name, each in contents.tensors.items() if name not in moved}
    tensors |= {new: contents.tensors[old].renamed(new) for new, old in given.items()}
    known = {name for names in owners for name in names}
    others = [
        each
        for each in contents.settings.get("optimizers", ())
        if not known.issuperset(name for group in each["groups"] for name in group["parameters"])
    ]
    named = [_named(record, order, state) for record, order in zip(records, chosen, strict=True)]
    settings = {key: value for key, value in contents.settings.items() if key != NUMBERED}
    settings |= {"ties": contents.settings.get("ties", {}), "optimizers": [*others, *named]}
    settled = {each["note"] for each in records}
    return OrderedState(
        contents=replace(contents, tensors=tensors, settings=settings),
        given=given,
        findings=findings,
        notes=[each for each in contents.notes if each not in settled],
    )


def _by_owner(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """For each owner of state its tensors by key."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, each in tensors.items():
        if (split := split_state_name(name)) is not None:
            found.setdefault(split[0], {})[split[1]] = each
    return found


def _assignment(
    records: Sequence[Mapping[str, Any]], orders: Sequence[Order], state: Mapping[str, Mapping[str, StoredTensor]]
) -> Sequence[Order] | None:
    """For each numbered optimizer the order of the target's that it is; None where none or several can be it."""
    fits = [[_fits(record, order, state) for order in orders] for record in records]
    tried = islice(permutations(range(len(orders)), len(records)), _MOST_ASSIGNMENTS)
    found = [each for each in tried if all(fits[number][at] for number, at in enumerate(each))]
    # A list of optimizers in a file has the order in which the program lists them.
    listed = tuple(range(len(orders)))
    if len(found) != 1 and not (listed in found and all(each.get(LISTED) for each in records)):
        return None
    return [orders[at] for at in (found[0] if len(found) == 1 else listed)]


def _fits(record: Mapping[str, Any], order: Order, state: Mapping[str, Mapping[str, StoredTensor]]) -> bool:
    """Whether an order can be that of a numbered optimizer."""
    groups = [group["parameters"] for group in record["groups"]]
    if record.get(ORDER_LOST):
        return groups == [[each.name for each in group] for group in order]
    return [*map(len, groups)] == [*map(len, order)] and all(
        can_be_of({each.shape for key, each in state.get(old, {}).items() if key != "step"}, new.shape)
        for old, new in _pairs(record, order)
    )


def _pairs(record: Mapping[str, Any], order: Order) -> Iterator[tuple[str, NumberedParameter]]:
    for group, parameters in zip(record["groups"], order, strict=True):
        yield from zip(group["parameters"], parameters, strict=True)


def _named(record: Mapping[str, Any], order: Order, state: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, Any]:
    """A numbered optimizer as settings have those whose parameters have names."""
    pairs = zip(record["groups"], order, strict=True)
    groups = [
        # Without state and trained here: it had no gradient yet. Frozen here: it was so then.
        {
            **group,
            "parameters": [
                new.name
                for old, new in zip(group["parameters"], parameters, strict=True)
                if old in state or new.trained
            ],
        }
        for group, parameters in pairs
    ]
    return {"kind": "", "groups": groups, "plain": record.get("plain", {}), "none": record.get("none", {})}


_WITHOUT_STATE = (
    "strict=False loads the weights, and the optimizer keeps what it has; TorchState(model) loads a model alone"
)


def _misfit(record: Mapping[str, Any], orders: Sequence[Order]) -> str:
    """Why no optimizer of the target tells whose the state is, and what to do."""
    then = [len(group["parameters"]) for group in record["groups"]]
    now = " and ".join(str([*map(len, order)]) for order in orders)
    is_guess = record.get(GUESSED)
    if record.get(ORDER_LOST):
        why = "A rewrite has joined or cut parameters, and the optimizer here has its own in another order"
    elif then in [[*map(len, order)] for order in orders]:
        why = "The optimizer here has parameters of other shapes at these numbers, or several optimizers fit"
    else:
        why = f"It has groups of {then} parameters, and the target's optimizer groups of {now}"
    way = "strict=False takes the guess" if is_guess else _WITHOUT_STATE
    return f"{record['note']}. {why}. Build the optimizer over the same parameters in the same groups; {way}"
