"""How a dimension is cut over ranks, and where a parameter and its gradient stand in the whole.

`sizes` needs the standard library only, so nothing is imported here.
"""
