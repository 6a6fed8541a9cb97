"""Gradients of data parallel ranks: where they lie, how they cross ranks, and who steps which part of them."""
