"""The vocabulary: every word with a meaning of its own in shardwise, and that meaning in one sentence.

Docs, messages and names use these words and no synonyms. A new word is added here first.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["VOCABULARY"]

VOCABULARY: Mapping[str, str] = MappingProxyType(
    {
        "axis": "A direction of the mesh along which ranks lie: pp, dp_replicate, dp_shard or tp.",
        "dim": "A dimension of a tensor.",
        "rank": "One process of the world, numbered row-major over the mesh with tp innermost.",
        "data rank": "The place of a rank along dp_replicate and dp_shard, which decides what samples it sees.",
        "mesh": "The number of ranks along every axis.",
        "placement": "How a tensor lies along an axis (replicated, cut along a dim or in runs), or modules on stages.",
        "layout": "A mesh and a placement per axis: which rank has which elements of a tensor.",
        "box": "An n-d region of indices, given by its offset and its shape.",
        "run": "A half-open range of row-major elements of a tensor or of a box.",
        "piece": "The pure description of one holder's share: name, dtype, global shape, box and maybe a run in it.",
        "holder": "A rank or a file that has elements of a tensor.",
        "slice": "What a rank owns of a tensor or of a buffer.",
        "bucket": "Parameters that travel together in one collective.",
        "buffer": "The flat tensor in which a bucket's values lie, of which parameters or gradients are views.",
        "owner": "The rank that holds the master and the optimizer state of an element.",
        "tie": "A parameter with several names, since several modules hold its storage.",
        "master": "The value of a parameter in full precision, which the optimizer updates and a checkpoint holds.",
        "working copy": "The low-precision values of the parameters that compute reads.",
        "partition": "How owners are chosen: equal slices of the buffers, or whole parameters.",
        "pipeline": "The ranks along pp, which have the stages of one model and see the same samples.",
        "stage": "A step of the pipeline: modules that are placed together; stage s is run at pp coordinate s % pp.",
        "chunk": "One of several stages that lie on one rank.",
        "placed module": "A module that belongs to one stage.",
        "glue": "The code between placed modules, which every rank runs.",
        "clip": "Not executing a foreign module or glue operation, but only inferring its output's shape and dtype.",
        "transfer": "A value that crosses from one stage to another in forward, and whose gradient comes back.",
        "announce": "Of the rank that has a value: to tell the others what they cannot infer of it.",
        "microbatch": "The part of a batch that one forward and backward sees.",
        "schedule": "The order in which each rank of a pipeline runs its actions.",
        "action": "The forward or the backward of one microbatch through one stage, written F3.0 or B3.0.",
        "bubble": "The share of the time of all ranks of a pipeline in which they run no action.",
        "in flight": "Of a microbatch on a rank: its forward has begun there, and its last backward has not ended.",
        "in step": "Of stages: none runs ahead of the others, since they give values back to each other.",
        "merge": "Accumulating the gradients of several microbatches into one update.",
        "update": "One change of the masters by the optimizer.",
        "channel": "What a rank calls to talk to the others.",
        "plan": "The frozen value that says how a model is trained on a mesh, decided before any process talks.",
        "save": "One committed state in a folder of its own: it is there as a whole or not at all.",
        "manifest": "The file that says what a save holds, and whose creation is the commit.",
        "torn": "Of a save: begun and never committed; nothing reads it, and the next successful save removes it.",
        "block": "The bytes of a piece that one checksum covers, and that are therefore read as a whole.",
        "store": "Where files of checkpoints are kept: a folder, or a prefix in an object store.",
        "portion": "What a rank along tp has of a parameter that is cut: the local tensor with which it computes.",
        "rule": "A word that says how the parameters of a module are cut along tp, and what moves between the ranks.",
        "unit": "Parameters that stage 3 gathers together, for the forward and the backward of their modules.",
        "gathered": "Of a unit: its whole working copies are here; at rest each owner has its runs of them.",
        "relayout": "To put the model of a running engine under another plan, with all its state and without a file.",
        "reshard": "To bring live tensors from one layout to another, across ranks and without a file.",
        "route": "How a tensor is resharded: who holds it, who wants it, and which share goes from whom to whom.",
        "share": "The elements that one holder gives to one target of a reshard.",
        "region": "The smallest module in which every cut along tp that begins also ends.",
        "proof": "The comparison of each region, cut and whole, when it is first called.",
        "rewrite": "A declared transformation between the names and shapes of two state dicts.",
        "statement": "One line of a rewrite: what is there on its left, what becomes of it on its right.",
        "placeholder": "A part of a name that stands for digits, the same in its whole statement, written $LAYER_ID.",
        "instance": "A statement with digits for its placeholders: names of tensors on both sides.",
        "source": "Of a rewrite: a tensor that goes in.",
        "output": "Of a rewrite: a tensor that comes out.",
        "drop": "To use no element of a source, as the rewrite says: `a -> _`.",
        "add": "Of a target: to leave it with the value that it has, as the rewrite says: `_ -> b`.",
        "fragment": "A box of a source, and where its elements are in a box of an output; or the other way round.",
        "inverse": "The rewrite that makes the sources of the outputs again, bit for bit.",
        "lossy": "Of a statement: no inverse brings all back, since it drops, or casts to what holds less, or copies.",
        "certificate": "The file that says of each converted tensor whether it comes back to the bit, and, where an "
        "original was given, whether what was written is as there.",
    }
)
"""Word -> its meaning."""
