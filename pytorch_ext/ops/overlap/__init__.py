"""Matrix products with a collective that runs at the same time where that is faster."""
