"""What tests and benches share: references, argument lists, the launcher of ranks, tolerances."""
