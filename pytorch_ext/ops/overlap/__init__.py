"""Products that communicate: a matrix product and its collective, at the same time where that is faster."""
