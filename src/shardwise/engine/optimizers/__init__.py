"""Updates of the elements that a rank owns, by optimizers that know of no ranks."""
