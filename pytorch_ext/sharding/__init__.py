"""Cuts of a dimension over ranks, and the places of parameters and gradients in the whole model.

`sizes` needs only the standard library, so this file imports nothing.
"""
