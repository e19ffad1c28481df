"""The contract of formats on all that are read and written."""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.testing.formats import Claim, Format, claims_of
from tests.checkpoint.formats import FORMATS

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf", "ignore:.*deprecated"
)


@pytest.mark.parametrize(("form", "claim"), claims_of(FORMATS, sw))
def test_formats_fulfil_the_contract(form: Format, claim: Claim, tmp_path: Path) -> None:
    claim(form, tmp_path)
