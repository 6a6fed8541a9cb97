"""weft.bench: the microbenchmark suite. `weft bench` runs it."""
