"""Archives of compiled kernels, one for each architecture: `python -m weft.kernels.aot` writes them here."""
