"""Tensor parallelism: which layers a plan names, the styles they are split in, and checks that the parts fit together.

`auto` finds a plan for a model that nobody has written one for.
"""
