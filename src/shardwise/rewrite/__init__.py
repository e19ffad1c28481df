"""Rewrites: how the tensors of one state dict become those of another, decided before an element is touched.

A `Rewrite` is text of a small language, checked against names, shapes and dtypes; what comes of it, a `Checked`, says
which box of which source every box of every output is, and the other way round. Pure: no torch, no files but its own.
"""

from shardwise.rewrite.metas import TensorMeta, metas_of
from shardwise.rewrite.rewrites import Checked, Rewrite, find_rewrite, shipped, shipped_names, shipped_text
from shardwise.rewrite.strided_views import Fragment

__all__ = [
    "Checked",
    "Fragment",
    "Rewrite",
    "TensorMeta",
    "find_rewrite",
    "metas_of",
    "shipped",
    "shipped_names",
    "shipped_text",
]
