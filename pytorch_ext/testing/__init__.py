"""Shared parts of tests and benches: references, argument lists, the launcher of ranks, tolerances."""
