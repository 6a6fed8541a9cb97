"""Waits for the parameters of a sharded optimizer at their first use in forward; until then they may be on their way.

Two kinds of calls wait. A module waits for its own parameters when it is called. A torch function waits for the
parameters among its arguments, because modules also use weights of modules that they do not call: nn.MultiheadAttention
the weight of its out_proj, a language model's head that of the embedding.

Evaluation, calls past the wrapper and state_dicts wait for all parameters first.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from weft.data_parallel.module_state import OfWrapper
from weft.data_parallel.sharded_optimizer import Shards
from weft.forward import FunctionMode
from weft.sharding.owners import owners_of

_COMPILED = (
    "overlap_param_gather=True: a module of the model is compiled, and nothing inside it waits for parameters; leave "
    "out overlap_param_gather or torch.compile"
)


class FirstUse:
    """Hooks that make a model wait for each parameter before its first use, for `shards` that gather late."""

    def __init__(self, module: nn.Module, shards: Shards):
        self._module, self._shards = module, shards
        self._modules, self._watches = list(module.modules()), False
        for each in self._modules:
            for handle in (
                # First, because other hooks may compute a weight.
                each.register_forward_pre_hook(OfWrapper(self._before(each)), prepend=True),
                each.register_state_dict_pre_hook(OfWrapper(lambda *_: shards.wait())),
                each.register_load_state_dict_pre_hook(OfWrapper(lambda *_: shards.wait())),
            ):
                weakref.finalize(self, handle.remove)

    def _before(self, module: nn.Module):
        reference = weakref.ref(self)

        def hook(*_) -> None:
            first_use = reference()
            if first_use is not None:
                first_use._shards.wait(module._parameters.values() if first_use._watches else None)

        return hook

    def watched(self) -> AbstractContextManager[None]:
        """Return the context of the module's forward.

        Raises:
            ValueError: a module was compiled after the hooks were made.
        """
        if not self._module.training:
            self._shards.wait()
        if not self._shards.under_way:
            return nullcontext()
        if any(map(_is_compiled, self._modules)):
            raise ValueError(_COMPILED)
        return self._watch()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        self._watches = True
        try:
            with FunctionMode(every=self._before_function):
                yield
        finally:
            self._watches = False

    def _before_function(self, function, args: tuple, kwargs: dict):
        if self._shards.under_way:
            self._shards.wait(tree_leaves((args, kwargs)))
        return function(*args, **kwargs)


def obstacle_to_waiting(module: nn.Module) -> str:
    """Return why modules inside `module` could not wait for their parameters; "" if they can."""
    if any(owners_of(parameter) is not None for parameter in module.parameters()):
        return "overlap_param_gather=True: a model in stages calls its modules from outside its forward"
    return _COMPILED if any(map(_is_compiled, module.modules())) else ""


def _is_compiled(module: nn.Module) -> bool:
    scripted = isinstance(module, torch.jit.ScriptModule)
    return scripted or module._compiled_call_impl is not None or "_orig_mod" in module._modules
