"""The model and its state: how it is built, what a rank has of it, and all of it together."""
