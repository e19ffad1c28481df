"""Running averages of the weights."""
