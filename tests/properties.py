"""On how many examples a property is tried: few and always the same, or many and new ones with EXAMPLES=20.

What a property costs is its number of examples: the same ones each time find what breaks, and `make stress` looks for
faults that are not known yet. An example that once failed is written down above its test, with `@example`.
"""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EXAMPLES", "1"))


def tried(num_examples: int, *suppressed: HealthCheck) -> Callable[[Any], Any]:
    """So many examples; no deadline, because other tests may share the processor."""
    checks = [HealthCheck.too_slow, *suppressed]
    return settings(
        max_examples=TIMES * num_examples, derandomize=TIMES == 1, deadline=None, suppress_health_check=checks
    )
