"""What a plan says of activations, and the modules that it means."""

from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.plan import Activations, Outline, Plan
from shardwise.plan.activation_choice import meant_modules


def problems_of(**settings: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        Activations(**settings)
    return list(caught.value.problems)


def test_every_problem_is_listed() -> None:
    assert problems_of(checkpoint="layers.*", offload=(), save=("mm",), budget_bytes=0) == [
        'activations.checkpoint: \'layers.*\' is neither "blocks" nor a tuple of names; write checkpoint=("layers.*",)',
        'activations.offload: () is neither "blocks" nor a tuple of names; write offload=("layers.*",)',
        "activations.save: ('mm',) is not a tuple of operators of torch; write save=(\"aten.mm\",)",
        "activations.budget_bytes: 0 is not a whole number of at least 1",
    ]
    assert problems_of(save=("aten.mm",), offload="blocks") == [
        "activations.save: given without activations.checkpoint: no module is run again, and all are saved; give "
        'checkpoint="blocks" too'
    ]
    assert problems_of(checkpoint=(1,), save="aten.mm", budget_bytes=True)[1:] == [
        "activations.save: 'aten.mm' is not a tuple of operators of torch; write save=(\"aten.mm\",)",
        "activations.budget_bytes: True is not a whole number of at least 1",
    ]


def test_a_plan_with_activations_has_a_text_that_parses_back_and_an_older_one_parses_too() -> None:
    from_a_list: Any = ["layers.*", "head"]
    plan = Plan(activations=Activations(checkpoint=from_a_list, save=("aten.mm",), offload="blocks", budget_bytes=7))
    assert plan.activations.checkpoint == ("layers.*", "head")
    assert Plan.parse(plan.text()) == plan
    assert hash(Plan.parse(plan.text())) == hash(plan)
    assert "activations" not in Plan().text()
    with pytest.raises(PlanError, match=r"activations.chekpoint: unknown setting; did you mean activations.checkpoint"):
        Plan.parse('activations.chekpoint = "blocks"\n')


def module(name: str, kind: str, *children: Outline, is_indivisible: bool = False) -> Outline:
    return Outline(
        name=name,
        kind=kind,
        is_container=kind == "ModuleList",
        children=children,
        own_parameters=() if children else ((f"{name}.weight", 4),),
        is_indivisible=is_indivisible,
    )


def model() -> Outline:
    blocks = [
        module(
            f"layers.{at}",
            "Block",
            module(
                f"layers.{at}.attention",
                "MultiheadAttention",
                module(f"layers.{at}.attention.out", "Linear"),
                is_indivisible=True,
            ),
            module(f"layers.{at}.up", "Linear"),
        )
        for at in range(2)
    ]
    return module("", "Model", module("embedding", "Embedding"), module("layers", "ModuleList", *blocks))


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("blocks", ["layers.0", "layers.1"]),
        (("*.up", "layers.0"), ["layers.0", "layers.1.up"]),
        (("layers.*",), ["layers.0", "layers.1"]),
        (("*.attention", "embedding"), ["embedding", "layers.0.attention", "layers.1.attention"]),
        ((".",), [""]),
        ((".", "layers.0"), [""]),
    ],
)
def test_of_matches_inside_each_other_the_outermost_is_meant(asked: Any, meant: list[str]) -> None:
    assert meant_modules(model(), asked, setting="activations.checkpoint") == meant


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("layer.0",), "activations.offload: 'layer.0' matches none of the 10 modules; the nearest module is"),
        (("layers",), "activations.offload: 'layers' matches 'layers', a ModuleList without a call of its forward"),
        (("*.out",), "'layers.0.attention.out' is a part of 'layers.0.attention', which computes with its parameters"),
    ],
)
def test_names_of_no_module_that_is_called_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        meant_modules(model(), asked, setting="activations.offload")
    assert message in str(caught.value)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="no block of the model repeats; give the names of its modules"):
        meant_modules(module("", "Model", module("one", "Linear")), "blocks", setting="activations.checkpoint")
