"""Verbs: what a statement can do to tensors. A file has all of a verb: arguments, text, shapes, views, and inverse."""
