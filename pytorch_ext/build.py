"""Build information of the installed extension."""

from weft import _C


def build_info() -> dict:
    """Describe how weft._C was built and which parts of it run on this machine.

    Returns:
        version, compiler, architecture; `cuda` (toolkit release, None for a CPU build) and `cuda_architectures`;
        `instruction_sets` that run on this machine, fastest first; `gpu`: driver version, number of devices and the
        error of the device query, or None for a CPU build.

    Examples:
        >>> weft.build_info()["version"] == weft.__version__
        True
    """
    gpu = _C.cuda.state() if _C.cuda is not None else None
    return {**_C.build, "instruction_sets": _C.instruction_sets(), "gpu": gpu}
