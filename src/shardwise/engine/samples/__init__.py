"""Samples that a model is run on, from the configurations of transformers."""
