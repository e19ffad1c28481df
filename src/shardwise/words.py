"""The glossary: every word with a special meaning in shardwise, and that meaning in one sentence.

Docs, messages and names use these words in one meaning each. All else is called as PyTorch calls it.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["GLOSSARY"]

GLOSSARY: Mapping[str, str] = MappingProxyType(
    {
        "axis": "A direction of the mesh along which ranks are arranged: pp, dp_replicate, dp_shard or tp.",
        "mesh": "The number of ranks along every axis; ranks are numbered row-major, with tp innermost.",
        "data rank": "A rank's coordinates along dp_replicate and dp_shard, which decide which samples it sees.",
        "placement": "How a tensor is spread along one axis: replicated, cut along a dim, or cut into runs.",
        "layout": "A mesh and a placement per axis: which rank has which elements of a tensor.",
        "box": "An n-dimensional range of indices: an offset and a shape.",
        "run": "A half-open range of row-major elements of a tensor or of a box.",
        "piece": "The description of the elements that one holder has: name, dtype, global shape, box, maybe a run.",
        "share": "The elements that one holder gives to one target when tensors move.",
        "bucket": "Parameters of one dtype that are fused in one flat buffer and move in one collective.",
        "slot": "The place of one parameter in its bucket.",
        "owner": "The rank that holds the master and the optimizer state of an element.",
        "master": "The full-precision value of a parameter, which the optimizer updates and a checkpoint holds.",
        "working copy": "The values of the parameters that forward and backward read, in the compute dtype.",
        "sharding stage": (
            "The state that is cut over owners: 1 optimizer state, 2 gradients too, 3 parameters too; 0 nothing."
        ),
        "unit": "The parameters that sharding stage 3 gathers together, for the forward and backward of their modules.",
        "microbatch": "The part of a batch that one forward and backward sees.",
        "merge": "Adding up the gradients of several microbatches into one update.",
        "stage": "The modules that one step of the pipeline runs; stage s is at pp coordinate s % pp.",
        "placed module": "A module that belongs to one stage.",
        "glue": "The code between placed modules, which every rank runs.",
        "infer-only": "Of a call on other ranks than its stage's: only the shape and dtype of its output are computed.",
        "schedule": "The order in which each rank of a pipeline runs the forwards and backwards of its stages.",
        "portion": "The elements of a cut parameter with which one rank along tp computes.",
        "region": "The smallest module in which all cuts along tp begin and end; it is compared cut and whole.",
        "save": "One committed state in its own folder, complete or absent.",
        "rewrite": "A declared transformation between the names and shapes of two state dicts.",
        "certificate": "A file that says, per converted tensor, whether it comes back bit for bit.",
        "reshard": "To move live tensors from one layout to another, without a file.",
        "relayout": "To put a running engine under another plan, with all its state and without a file.",
    }
)
"""Word -> its meaning."""
