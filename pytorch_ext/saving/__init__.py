"""Checkpoints: what a model and its optimizers hold, where it stands in the whole, and how it is written and read."""
