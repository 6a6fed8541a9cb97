"""What torch.compile leaves out of its graphs: they have no place for tensors that are parts of a sequence."""

import sys
import warnings
from collections.abc import Callable
from functools import wraps

import torch
from torch import nn
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which would import Dynamo here: two seconds


def outside_of_graphs(function: Callable) -> Callable:
    """Return a function that torch.compile leaves out of its graphs, with all that it calls."""
    eager = _disable_dynamo(function)

    @wraps(function)
    def called(*args, **kwargs):
        return (eager if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return called


def leave_out_of_graphs(model: nn.Module) -> None:
    """Let torch.compile have no effect on the model's forward and inside of it."""
    model.forward = _Uncompiled(model)  # type: ignore[method-assign]


class _Uncompiled:
    """Forward of a model; a compiled function inside it runs as it is written."""

    def __init__(self, module: nn.Module):
        self.__wrapped__ = module.forward  # whose signature others read: a Trainer, generate

    @outside_of_graphs
    def __call__(self, *args, **kwargs):
        if "torch._dynamo" not in sys.modules:  # nothing is compiled yet
            return self.__wrapped__(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return self.__wrapped__(*args, **kwargs)


def uncompile(model: nn.Module) -> None:
    """Let compiled modules run as they are written from now on, with one warning: recomputation would compile them."""
    if "torch._dynamo" not in sys.modules:
        return
    compiled = 0
    parts: list[nn.Module | None] = [model]
    for part in parts:  # this grows on the way: nn.Module.modules() would be several Python calls a module
        if part is None:
            continue
        parts += part._modules.values()
        if part._compiled_call_impl is not None:
            part._compiled_call_impl = None
            compiled += 1
        elif isinstance(part, torch._dynamo.OptimizedModule) and part.forward != part._orig_mod.__call__:
            part.forward = part._orig_mod.__call__
            compiled += 1
    if compiled:
        warnings.warn(
            f"{compiled} modules are compiled, and the ranks of their model share the sequence; torch.compile has no "
            "graph for parts of a sequence, so these modules run uncompiled",
            stacklevel=2,
        )
