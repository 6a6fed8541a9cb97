"""Codes of torch's element types and reductions in weft._C."""

import torch
import torch.distributed as dist

from weft import _C

SUM, AVERAGE = _C.reduce_ops["sum"], _C.reduce_ops["avg"]
OP_NAMES = {code: name for name, code in _C.reduce_ops.items()}
DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _C.dtypes.items()}
_MOVED: dict[torch.dtype, int] = DTYPES | {getattr(torch, name): code for name, code in _C.moved_dtypes.items()}
_OPS: dict[int, int] = {
    int(getattr(dist.ReduceOp, theirs)): _C.reduce_ops[ours]
    for theirs, ours in {
        "SUM": "sum",
        "AVG": "avg",
        "MIN": "min",
        "MAX": "max",
        "PRODUCT": "product",
        "BAND": "bitwise_and",
        "BOR": "bitwise_or",
        "BXOR": "bitwise_xor",
    }.items()
}


def op_code(op) -> int:
    """Return the code of a torch.distributed.ReduceOp or of its bare enumerator; ValueError if it has none."""
    code = _OPS.get(int(getattr(op, "op", op)))
    if code is None:
        raise ValueError(f"the weft backend does not reduce by {op}; it takes {', '.join(_C.reduce_ops)}")
    return code


def dtype_code(x: torch.Tensor) -> int:
    """Return the code of x's type for a reduction; TypeError if it has none."""
    code = DTYPES.get(x.dtype)
    if code is None:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"the weft backend cannot reduce {x.dtype}; it reduces {names}")
    return code


def byte_code(x: torch.Tensor) -> tuple[int, int]:
    """Return (code, elements of that code per element of x) for moving x's bytes; every type can be moved."""
    code = _MOVED.get(x.dtype)
    return (code, 1) if code is not None else (_C.dtypes["uint8"], x.element_size())
