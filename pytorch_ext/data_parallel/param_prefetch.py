"""Where forward first needs each parameter: until then those of a sharded optimizer may still be on their way.

Two look out for it. A module that is called waits for its own parameters. And any torch function that is given a
parameter waits for it, since modules also use what they do not call (nn.MultiheadAttention the weight of its out_proj,
a language model's head the embedding's). Evaluation, calls past the wrapper and state_dicts wait for everything first.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from weft.data_parallel.module_state import OfWrapper
from weft.data_parallel.sharded_optimizer import Shards
from weft.sharding.owners import owners_of

_COMPILED = (
    "overlap_param_gather=True: a module of the model is compiled, and inside of it nothing waits for parameters; "
    "leave out one of the two"
)


class FirstUse:
    """Has a model wait for each of its parameters before it uses it, where `shards` gather late."""

    def __init__(self, module: nn.Module, shards: Shards):
        self._module, self._shards = module, shards
        self._modules, self._watches = list(module.modules()), False
        for one in self._modules:
            for handle in (
                # First, since other hooks may compute a weight.
                one.register_forward_pre_hook(OfWrapper(self._before(one)), prepend=True),
                one.register_state_dict_pre_hook(OfWrapper(lambda *_: shards.wait())),
                one.register_load_state_dict_pre_hook(OfWrapper(lambda *_: shards.wait())),
            ):
                weakref.finalize(self, handle.remove)

    def _before(self, module: nn.Module):
        me = weakref.ref(self)

        def hook(*_) -> None:
            first_use = me()
            if first_use is not None:
                first_use._shards.wait(module._parameters.values() if first_use._watches else None)

        return hook

    def watched(self) -> AbstractContextManager[None]:
        """Around the module's forward.

        Raises:
            ValueError: a module was compiled since this was made.
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
            with _FirstUses(self._shards):
                yield
        finally:
            self._watches = False


class _FirstUses(TorchFunctionMode):
    def __init__(self, shards: Shards):
        super().__init__()
        self._shards = shards

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._shards.under_way:
            self._shards.wait(tree_leaves((args, kwargs)))
        return function(*args, **kwargs)


def obstacle_to_waiting(module: nn.Module) -> str:
    """Why nothing in it could wait; "" where it can."""
    if any(owners_of(parameter) is not None for parameter in module.parameters()):
        return "overlap_param_gather=True: a model in stages calls its modules from elsewhere than its forward"
    return _COMPILED if any(map(_is_compiled, module.modules())) else ""


def _is_compiled(module: nn.Module) -> bool:
    scripted = isinstance(module, torch.jit.ScriptModule)
    return scripted or module._compiled_call_impl is not None or "_orig_mod" in module._modules
