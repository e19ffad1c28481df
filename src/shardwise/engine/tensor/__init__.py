"""Tensor parallelism: parameters cut over the ranks along `tp`, and what moves between them."""
