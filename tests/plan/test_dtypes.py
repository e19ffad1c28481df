"""The dtypes that a precision gives a parameter, by hand; tests/engine compares promotion and sizes with torch's."""

from typing import Any

import pytest

from shardwise.plan import Parameter, Precision
from shardwise.plan.dtypes import COMPUTE_DTYPES, promote
from shardwise.plan.outlines import describe


def dtypes_of(dtype: str, *, trainable: bool = True, name: str = "w", **precision: Any) -> tuple[str, str]:
    spec = describe(
        name=name,
        aliases=("tied.w",),
        shape=(3, 4),
        dtype=dtype,
        trainable=trainable,
        precision=Precision(**precision),
    )
    return spec.working, spec.master


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        ("float32", {}, ("float32", "float32")),
        ("bfloat16", {}, ("bfloat16", "float32")),
        ("float64", {}, ("float64", "float64")),
        ("float32", {"compute": "bfloat16"}, ("bfloat16", "float32")),
        ("float64", {"compute": "bfloat16"}, ("bfloat16", "float32")),
        ("bfloat16", {"compute": "float32"}, ("float32", "float32")),
        ("float32", {"compute": "bfloat16", "master": "bfloat16"}, ("bfloat16", "bfloat16")),
        ("float32", {"compute": "float32", "master": "bfloat16"}, ("float32", "float32")),
        ("float32", {"compute": "float16", "master": "bfloat16"}, ("float16", "float32")),
        ("float32", {"compute": "bfloat16", "keep": ("w",)}, ("float32", "float32")),
        ("bfloat16", {"compute": "bfloat16", "keep": ("tied",)}, ("float32", "float32")),
        ("float32", {"compute": "bfloat16", "keep": ("other",)}, ("bfloat16", "float32")),
        ("float32", {"compute": "bfloat16", "master": "float64", "keep": ("*",)}, ("float64", "float64")),
        ("complex64", {"compute": "bfloat16"}, ("complex64", "complex64")),
        ("complex64", {"master": "float64"}, ("complex64", "complex128")),
    ],
)
def test_a_trained_parameter_computes_as_asked_and_its_master_is_never_narrower(
    dtype: str, settings: dict[str, Any], expected: tuple[str, str]
) -> None:
    assert dtypes_of(dtype, **settings) == expected


@pytest.mark.parametrize(
    ("dtype", "settings", "expected", "fused"),
    [
        ("float32", {}, ("float32", "float32"), False),
        ("bfloat16", {}, ("bfloat16", "bfloat16"), False),  # no master is made for what is never updated
        ("float32", {"compute": "bfloat16"}, ("bfloat16", "float32"), True),
        ("float64", {"compute": "bfloat16"}, ("bfloat16", "float64"), True),
        ("bfloat16", {"compute": "float32"}, ("float32", "float32"), True),  # cast once, then held as it computes
        ("bfloat16", {"compute": "bfloat16", "keep": ("w",)}, ("float32", "float32"), True),
        ("complex64", {"compute": "bfloat16"}, ("complex64", "complex64"), False),
        ("int64", {"compute": "bfloat16"}, ("int64", "int64"), False),
        ("bool", {"compute": "bfloat16", "keep": ("*",)}, ("bool", "bool"), False),
        ("float8_e4m3fn", {"compute": "bfloat16"}, ("float8_e4m3fn", "float8_e4m3fn"), False),
    ],
)
def test_a_frozen_parameter_keeps_its_values_as_they_were_given(
    dtype: str, settings: dict[str, Any], expected: tuple[str, str], fused: bool
) -> None:
    assert dtypes_of(dtype, trainable=False, **settings) == expected
    working, master = expected
    spec = Parameter(name="w", shape=(3, 4), dtype=dtype, trainable=False, working=working, master=master)
    assert spec.fused == fused
    assert spec.num_elements == 12


@pytest.mark.parametrize("compute", [None, *COMPUTE_DTYPES])
@pytest.mark.parametrize("master", COMPUTE_DTYPES)
def test_a_master_holds_every_value_of_its_working_copy(compute: str | None, master: str) -> None:
    for dtype in COMPUTE_DTYPES:
        for trainable in (True, False):
            working, held = dtypes_of(dtype, trainable=trainable, compute=compute, master=master)
            assert promote(working, held) == held
