"""What tests of formats share of the suite in `shardwise.testing`, which gets the library as an argument."""

from functools import partial

import shardwise as sw
from shardwise.testing import formats

check_tensors = partial(formats.check_tensors, sw)
"""That a checkpoint has these tensors, to the bit."""
bad_findings = partial(formats.bad_findings, sw)
"""Verification, whose findings are raised."""
