"""Registration of weft's layers with peft, now or when a script imports peft later."""

import importlib.util
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


def register_with_peft() -> None:
    """Let peft know split layers.

    Otherwise its target_modules="all-linear" passes over them, and it saves a rank's part as if it were the whole.
    """
    if "peft" in sys.modules:
        _register()
    elif not any(isinstance(finder, _PeftFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PeftFinder())


def _register() -> None:
    try:
        from weft.adapters.peft import register
    except ImportError as error:  # another version, which the script may not use with weft
        warnings.warn(f"peft does not know split layers: {error}", stacklevel=2)
        return
    register()


class _PeftFinder(MetaPathFinder):
    """Finder that lets the usual ones find peft, and registers after its import."""

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # a library may only ask whether peft is there
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_register(module) -> None:
                sys.meta_path.remove(self)
                execute(module)
                _register()

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
