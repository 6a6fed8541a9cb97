"""Comparison of two programs that train a model: what they record, and where they part first."""
