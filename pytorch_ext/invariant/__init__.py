"""The units of a model with `invariant`: functions and sums with the same bits for any number, and calls on several."""
