"""Tensor parallelism: plans of layers, the styles that split them, and checks that the parts fit together.

`auto` finds a plan for a model.
"""
