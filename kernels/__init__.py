"""weft.kernels: the Triton kernels."""

if __name__ != "weft.kernels":
    raise ImportError(
        f"this folder is the source of weft.kernels and was imported as {__name__!r}: install the package "
        "(pip install -e .), import weft.kernels, and keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )
