"""Registration of the "weft" backend with torch.distributed, without importing torch.

With WEFT_AS_GLOO=1 the backend also takes gloo's place for CPU tensors: a program that asks for gloo gets groups of
weft, under gloo's name.
"""

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys

_C10D = "torch.distributed.distributed_c10d"


def register_backend_when_torch_is_imported() -> None:
    """Register the backend now if torch.distributed is imported, else at the end of its import."""
    if _C10D in sys.modules:
        _register(sys.modules[_C10D])
    else:
        sys.meta_path.insert(0, _AfterImport())


def autoload() -> None:
    """Record or trace the process, if the environment asks for it. torch calls this at the end of `import torch`."""
    if os.environ.get("WEFT_RECORD"):
        importlib.import_module("weft.tools.compare.recorder").record_by_environment()
    if os.environ.get("WEFT_TRACE"):
        importlib.import_module("weft.tools.tracing.trace_recorder").trace_by_environment()


def _register(c10d) -> None:
    c10d.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu"])
    as_gloo = os.environ.get("WEFT_AS_GLOO", "0")
    if as_gloo not in ("0", "1"):
        raise ValueError(f"WEFT_AS_GLOO={as_gloo} must be 1 (weft's groups where a program asks for gloo's) or 0")
    if as_gloo == "1":
        _take_gloos_place(c10d)


def _take_gloos_place(c10d) -> None:
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_group(group_size, group_rank, global_ranks_in_group, backend, *arguments, **options):
        backends = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
        taken = backend
        if backends.get("cpu") == "gloo":
            cuda = backends.get("cuda") if c10d.torch.cuda.is_available() else None
            taken = "cpu:weft" + (f",cuda:{cuda}" if cuda else "")
        made = make(group_size, group_rank, global_ranks_in_group, taken, *arguments, **options)
        group, world = made[0], c10d._world
        if taken != backend and group in world.pg_map:
            group.backend_name = "gloo"
            world.pg_map[group] = (c10d.Backend(backend), world.pg_map[group][1])
            world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
        return made

    c10d._new_process_group_helper = make_group


def _create(options, _backend_options):
    from weft.comm.backend import WeftProcessGroup

    return WeftProcessGroup.create(options)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that runs `_register` right after torch.distributed's own module has run."""

    def find_spec(self, name, path=None, target=None):
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
