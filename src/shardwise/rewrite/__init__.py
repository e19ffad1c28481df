"""Rewrites: how the tensors of one state dict become those of another, decided before an element is touched.

A `Rewrite` is text of a small language, checked against names, shapes and dtypes. The result, a `Checked`, maps every
box of every output to its box of a source, and back. Pure: no torch, no files but its own.
"""

from shardwise.rewrite.metas import TensorLike, TensorMeta, metas_of
from shardwise.rewrite.rewrites import Checked, Rewrite, find_rewrite, shipped, shipped_names, shipped_text
from shardwise.rewrite.strided_views import Fragment

__all__ = [
    "Checked",
    "Fragment",
    "Rewrite",
    "TensorLike",
    "TensorMeta",
    "find_rewrite",
    "metas_of",
    "shipped",
    "shipped_names",
    "shipped_text",
]
