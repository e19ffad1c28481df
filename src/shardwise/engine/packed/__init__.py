"""Packed weights: codes in fewer bits, and the tensors that belong to them."""
