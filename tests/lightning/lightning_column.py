"""The column of Lightning in the contract of adapters."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

import shardwise as sw
from shardwise.lightning import Strategy
from tests.contracts.adapter_cases import PLAIN, Asked, Column, Outcome
from tests.lightning.lightning_modules import PLANS, ByHand, Gan, Net, TwoOptimizers, fitted, weights

ACCUMULATED = "accumulated and clipped"
AUTOMATIC: dict[str, dict[str, Any]] = {
    PLAIN: {},
    ACCUMULATED: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bfloat16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
}
IN_TURNS = ("toggled", "in_closures", "dropped")
FORMS = ("ordinary", "schedulers_between", "two_losses", "then_toggled", "later_toggled", "some_batches")
MANUAL: dict[str, Callable[[], pl.LightningModule]] = {
    "by hand": ByHand,
    **{style: lambda style=style: Gan(style) for style in IN_TURNS},  # type: ignore[misc]
    **{form: lambda form=form: TwoOptimizers(form) for form in FORMS},  # type: ignore[misc]
}


def _trained(plan: sw.Plan | None, channel: sw.Channel | None, asked: Asked) -> Outcome:
    strategy: Any = "auto" if plan is None else Strategy(plan, channel=channel)
    build = MANUAL.get(asked.setting, Net)
    callbacks = []
    if asked.saves:
        callbacks.append(pl.callbacks.ModelCheckpoint(asked.folder, filename="{epoch}", save_top_k=-1))
    trainer, seen = fitted(
        strategy,
        build,
        *callbacks,
        max_epochs=1 if asked.saves else 2,
        ckpt_path=asked.folder / "epoch=0.ckpt" if asked.resumes and asked.folder else None,
        **AUTOMATIC.get(asked.setting, {}),
    )
    figures, metrics = seen.figures, {name: float(each) for name, each in trainer.callback_metrics.items()}
    if asked.setting in MANUAL or asked.setting == ACCUMULATED:
        # What is logged of batches is of the rows of a rank; of those whose update is to come no loss is known.
        figures = [{name: each for name, each in one.items() if name != "loss"} for one in figures]
    whole = {} if asked.setting in MANUAL or asked.setting == ACCUMULATED else metrics
    own = metrics if asked.setting in MANUAL else {}
    return Outcome(
        figures=[*figures, {"updates": trainer.global_step, **whole}],
        weights={name: each.clone() for name, each in weights(trainer).items()},
        of_own_rows={name: each for name, each in own.items() if not name.startswith("val")},
    )


# Each form by hand with stages and without; which form meets which plan without is by turns.
_BY_TURNS = ("one rank", "stage 0", "stage 3", "stage 2, k = 2", "tp")
COLUMN = Column(
    plans=PLANS,
    train=_trained,
    cases=[
        *((plan, PLAIN) for plan in PLANS),
        *((plan, ACCUMULATED) for plan in ("one rank", "stage 3", "pp")),
        ("tp", "clipped by value"),
        *(("stage 0", "float64"), ("one rank", "bfloat16")),
        *(("pp", form) for form in MANUAL),
        *((_BY_TURNS[at % len(_BY_TURNS)], form) for at, form in enumerate(MANUAL)),
    ],
    moves=[("stage 3", "pp"), ("pp", "tp"), ("tp", PLAIN), (PLAIN, "stage 3")],
    on_device=[("pp", ACCUMULATED), ("stage 3", PLAIN)],
    exact="one rank",
)
