"""The units of a model with `invariant`: functions with the same bits for any number, and calls on several at once."""
