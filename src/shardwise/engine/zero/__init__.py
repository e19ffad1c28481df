"""Sharding stages: who holds and reduces which elements of parameters and gradients along the data axes."""
