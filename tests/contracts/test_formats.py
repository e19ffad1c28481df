"""The contract of formats on all that are read and written."""

from pathlib import Path

import pytest

from tests.checkpoint.formats import FORMATS
from tests.contracts.format_cases import Claim, Format, claims_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf", "ignore:.*deprecated"
)


@pytest.mark.parametrize(("form", "claim"), claims_of(FORMATS))
def test_formats_fulfil_the_contract(form: Format, claim: Claim, tmp_path: Path) -> None:
    claim(form, tmp_path)
