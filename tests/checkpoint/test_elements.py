"""Elements of two stretches, compared: against a loop over Python numbers."""

import math
from fractions import Fraction

import pytest
import torch

from shardwise.checkpoint.elements import compare, larger, shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)


WHOLE = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)


COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")  # of torch, in the making of states


ALL = (*FLOATS, *FLOAT8, *WHOLE, torch.uint64, *COMPLEX)


def random_bits(dtype: torch.dtype, num_elements: int, seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (num_elements,), generator=numbers).bool()
    size = num_elements * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=numbers).view(dtype)


def bits_of(element: torch.Tensor) -> bytes:
    return bytes(element.view(torch.uint8).tolist())


def slow_difference(a: complex, b: complex) -> float:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a - b)
    return abs(complex(a) - complex(b)) if isinstance(a, complex) or isinstance(b, complex) else abs(a - b)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_differences_of_random_bits_are_those_of_a_loop(dtype: torch.dtype) -> None:
    a = random_bits(dtype, 60, 0)
    b = a.clone()
    b.view(torch.uint8)[20 * dtype.itemsize :] = random_bits(dtype, 40, 1).view(torch.uint8)
    different = [at for at in range(60) if bits_of(a[at : at + 1]) != bits_of(b[at : at + 1])]
    found = compare(a, b)
    assert found is not None
    assert (found.num_different, found.first) == (len(different), different[0])
    largest: float = 0
    for at in different:
        largest = larger(largest, slow_difference(a[at].item(), b[at].item()))
    if isinstance(largest, float) and math.isnan(largest):
        assert math.isnan(found.max_difference)
    elif dtype in (*COMPLEX, *FLOATS):
        assert found.max_difference == pytest.approx(largest, rel=1e-12)
    else:
        assert found.max_difference == largest
        assert type(found.max_difference) is (int if dtype not in FLOAT8 else float)
    assert bits_of(torch.tensor([found.a], dtype=torch.complex128)) == bits_of(
        torch.tensor([a[found.first].item()], dtype=torch.complex128)
    )
    assert compare(a, a.clone()) is None


def test_differences_of_many_elements_are_those_of_all_their_chunks() -> None:
    a = torch.zeros(600_000, dtype=torch.int8)
    b = a.clone()
    b[[3, 300_000, 599_999]] = torch.tensor([1, 2, 5], dtype=torch.int8)
    found = compare(a, b)
    assert found is not None
    assert (found.num_different, found.first, found.max_difference) == (3, 3, 5)


def test_zeros_of_two_signs_differ_by_nothing_and_nan_equals_itself() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(nan[:1], nan[:1].clone()) is None
    found = compare(nan[:1], nan[1:])
    assert found is not None
    assert math.isnan(found.max_difference)
    assert (found.a_shown, found.b_shown) == ("nan (0x7fc00000)", "nan (0x7fc00001)")
    found = compare(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert found is not None
    assert (found.num_different, found.max_difference, found.first) == (1, 0.0, 1)
    assert (found.a_shown, found.b_shown) == ("0.0", "-0.0")


def test_nan_on_one_side_is_the_largest_difference_wherever_it_is() -> None:
    a = torch.zeros(5)
    for values in ([9.0, math.nan, math.inf], [math.nan, 9.0, math.inf], [math.inf, 9.0, math.nan]):
        found = compare(a[:3], torch.tensor(values))
        assert found is not None
        assert math.isnan(found.max_difference)
    found = compare(torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 2.0]))
    assert found is not None
    assert found.max_difference == math.inf


def test_pairs_of_float4_are_compared_as_pairs() -> None:
    a, b = (torch.tensor(data, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for data in ([0x21, 0x07], [0x21, 0xF7]))
    found = compare(a, b)
    assert found is not None
    assert (found.a, found.b) == ((6.0, 0.0), (6.0, -6.0))
    assert (found.first, found.num_different, found.max_difference) == (1, 1, 6.0)
    assert (found.a_shown, found.b_shown) == ("6|0", "6|-6")
    assert compare(a, a.clone()) is None


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
def test_shown_numbers_tell_every_element_from_its_neighbours(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, 300, 5)
    values = {tensor[at].item() for at in range(300) if tensor[at].item() == tensor[at].item()}
    texts = {shown(torch.tensor([value], dtype=torch.float64).to(dtype)) for value in values}
    assert len(texts) == len(values)
    for value in values:
        text = shown(torch.tensor([value], dtype=torch.float64).to(dtype))
        if math.isfinite(value):
            again = torch.tensor([float(Fraction(text))], dtype=torch.float64).to(dtype)
            assert again.item() == value
