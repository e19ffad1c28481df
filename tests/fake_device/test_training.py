"""Tests of other rooms, on the fake device: their own functions, with ranks that have a device each.

Each compares with one process on the CPU, or with what was written by hand. Bits are equal there, because the fake
device has the kernels of the CPU.
"""

# ruff: noqa: F401, the tests are imported for pytest to find

import pytest

from tests.engine.pipeline.test_composition import (
    test_all_axes_at_once,
    test_every_sharding_on_two_stages,
    test_microbatches_weigh_what_the_user_counts_and_some_nothing,
)
from tests.engine.pipeline.test_equivalence import (
    test_a_clip_sees_the_norm_of_all_stages,
    test_a_tie_of_two_stages_is_summed_in_another_order_and_nothing_else_changes,
)
from tests.engine.tensor.test_engine import test_training_is_that_of_one_process
from tests.engine.test_equivalence import (
    test_ranks_that_own_nothing_take_part,
    test_ranks_train_as_one_process,
)
from tests.engine.test_loss_scaling import (
    soon_doubled,
    test_scales_and_updates_are_those_of_a_grad_scaler,
)
from tests.engine.test_merge import test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all
from tests.engine.test_relayout import test_what_one_rank_alone_cannot_hand_over_is_told_to_all
from tests.engine.test_stages import (
    test_replicas_of_owners_add_their_runs_once_per_update,
    test_saving_gathers_nothing_and_any_stage_loads_what_another_saved,
    test_what_a_model_does_changes_no_bit,
)
from tests.engine.zero.test_grad_reduce import test_activation_checkpointing_changes_no_bit

pytestmark = pytest.mark.usefixtures("on_fake")
