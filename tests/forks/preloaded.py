"""What the tests' processes share with the interpreter that they are forked from: seven seconds of imports.

To be imported there and nowhere else: it freezes what the collector of garbage has seen.
"""

import gc

import matplotlib.figure  # noqa: F401, rank 0 leaves pictures
import pytest  # noqa: F401, processes import the test whose function they call
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import shardwise.checkpoint
import shardwise.cli
import shardwise.train.rank  # noqa: F401

# A collection in a forked process would otherwise copy every page.
gc.collect()
gc.freeze()
