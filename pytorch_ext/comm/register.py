"""Registration of the "weft" backend with torch.distributed, without importing torch."""

import importlib.abc
import importlib.util
import sys

_C10D = "torch.distributed.distributed_c10d"


def register_backend_when_torch_is_imported() -> None:
    """Register the backend now if torch.distributed is imported, else at the end of its import."""
    if _C10D in sys.modules:
        _register(sys.modules[_C10D])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _register(c10d) -> None:
    c10d.Backend.register_backend("weft", _create, extended_api=True, devices=["cpu"])


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
