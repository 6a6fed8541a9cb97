"""What torch.compile leaves out of its graphs: they have no place for tensors that are parts of a sequence."""

import sys
import warnings
from collections.abc import Callable
from functools import wraps

import torch
from torch import nn
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which would import Dynamo here: two seconds

from weft.forward import ForwardChain, step_of


def outside_of_graphs(function: Callable) -> Callable:
    """Return a function that torch.compile leaves out of its graphs, with all that it calls."""
    eager = _disable_dynamo(function)

    @wraps(function)
    def called(*args, **kwargs):
        return (eager if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return called


def leave_out_of_graphs(model: nn.Module) -> None:
    """Let torch.compile have no effect on the model's forward and inside of it."""
    ForwardChain.of(model).add("uncompiled", _uncompiled)


@outside_of_graphs
def _uncompiled(forward: Callable, module: nn.Module, *args, **kwargs):
    """Run a model's forward; a compiled function inside it runs as it is written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet
        return forward(*args, **kwargs)
    with torch.compiler.set_stance("force_eager"):
        return forward(*args, **kwargs)


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
        elif isinstance(part, torch._dynamo.OptimizedModule) and step_of(part, "uncompiled") is None:
            leave_out_of_graphs(part)
            compiled += 1
    if compiled:
        warnings.warn(
            f"{compiled} modules are compiled, and the ranks of their model share the sequence; torch.compile has no "
            "graph for parts of a sequence, so these modules run uncompiled",
            stacklevel=2,
        )
