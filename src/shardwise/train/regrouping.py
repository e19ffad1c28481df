"""A save of a run is loaded into optimizers whose groups the configuration may have changed since.

    saved    group 0 (lr 0.1): w, b      group 1 (lr 0.01): head       frozen: scale
    now      group 0: w, head, scale     group 1: b                    frozen: nothing

Learning rate and weight decay of every group come from the configuration. So where groups differ, those of the save are
not compared, and moments go by name. A parameter that is frozen now leaves its moments; one that is trained from here
on begins without.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.states import Restoration
from shardwise.engine import Engine
from shardwise.plan.names import is_state_name, named_by_wrappers, split_state_name
from shardwise.plan.optimizer_entries import NumberedParameter
from shardwise.plan.saved_settings import ADDED, LIVE, stored_names, stored_ties, take_over
from shardwise.space import Piece
from shardwise.train.run_state import Settings

_RATE, _DECAY = "lr", "weight_decay"
_DECIDED = (_RATE, _DECAY, "initial_lr")
"""Settings of groups that the configuration and the schedule decide."""


class RegroupedEngine:
    """An engine, to load into; it knows afterwards whether groups differ."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.has_other_groups = False

    def state(self) -> Mapping[Piece, torch.Tensor]:
        """See `Stateful`."""
        return self._engine.state()

    def settings(self) -> Mapping[str, object]:
        """See `Restorable`."""
        return self._engine.settings()

    def numbering(self) -> Sequence[Sequence[Sequence[NumberedParameter]]]:
        """See `Numbering`."""
        return self._engine.numbering()

    def restore(self, stored: Mapping[str, Piece], settings: Mapping[str, Any]) -> Restoration:
        """See `Restorable`."""
        here = self._engine.settings()
        now, then = _names_by_group(here), _names_by_group(settings)
        trained, before = _flat(now), _flat(then)
        # Ties and wrappers may call a parameter otherwise than the save does.
        own = self._engine.names()
        aliases = {**named_by_wrappers(stored, dict(zip(own, own, strict=True))), **here["ties"]}
        called = stored_names(sorted(trained), aliases, dict.fromkeys(before), stored_ties(settings))
        name_of = {name: each for each, name in called.items()}
        self.has_other_groups = now != [
            [sorted(name_of.get(name, name) for name in names) for names in optimizer] for optimizer in then
        ]
        if not self.has_other_groups:
            return self._engine.restore(stored, settings)
        gone = (before - set(name_of)) & {*own, *aliases}
        restoration = self._engine.restore(
            stored,
            {
                **settings,
                "optimizers": [_without(each, gone) for each in settings["optimizers"]],
                LIVE: _DECIDED,
                ADDED: [*settings.get(ADDED, ()), *sorted(trained - set(called))],
            },
        )
        left = {name for name in stored if is_state_name(name) and (split_state_name(name) or ("",))[0] in gone}
        restoration.accounted = {*restoration.accounted, *left}
        return restoration


def _names_by_group(settings: Mapping[str, Any]) -> list[list[list[str]]]:
    """For each optimizer and each of its groups the parameters."""
    return [[sorted(group["parameters"]) for group in each["groups"]] for each in settings.get("optimizers", ())]


def _flat(groups: list[list[list[str]]]) -> set[str]:
    return {name for optimizer in groups for names in optimizer for name in names}


def _without(optimizer: Mapping[str, Any], gone: set[str]) -> dict[str, Any]:
    """A saved optimizer without some parameters."""
    groups = [
        {**group, "parameters": [name for name in group["parameters"] if name not in gone]}
        for group in optimizer["groups"]
    ]
    return {**optimizer, "groups": [group for group in groups if group["parameters"]]}


def settle_settings(engine: Engine, then: Settings, fresh: Settings, *, has_other_groups: bool) -> list[str]:
    """Let the configuration win where it was changed, and let the schedule begin from its learning rate.

    then, fresh: the settings of groups as the configuration made them, in the saved run and now. Other settings stay as
    they were loaded: some optimizers count and measure in them. Returns lines to print.
    """
    words = []
    if has_other_groups:
        words.append("optimizers have other groups than in the saved run: lr and weight_decay are those of now")
    for number, (optimizer, now) in enumerate(zip(engine.optimizers, fresh, strict=True)):
        before = then[number] if number < len(then) else []
        for at, (group, new) in enumerate(zip(optimizer.param_groups, now, strict=True)):
            if has_other_groups:
                # No group of the save is this one: what none of them had was changed.
                changed = {
                    key: value
                    for key, value in new.items()
                    if key in (_RATE, _DECAY) or not any(old.get(key) == value for old in before)
                }
            else:
                changed = {key: value for key, value in new.items() if before[at].get(key) != value}
                words += [
                    f"optimizer {number}, group {at}: {key} was {before[at].get(key)} in the saved run and is {value} "
                    "from here on"
                    for key, value in changed.items()
                ]
            # What was loaded is the learning rate of the schedule at that step. The schedule multiplies the full
            # one, so this has to be in the group before a scheduler is made.
            take_over(group, {**changed, _RATE: new[_RATE]})
            rate = group[_RATE]
            # A rate that is a tensor (`capturable` optimizers) is written in place by schedulers: without a copy the
            # full rate would fall along with it.
            group["initial_lr"] = rate.clone() if isinstance(rate, torch.Tensor) else rate
    return words
