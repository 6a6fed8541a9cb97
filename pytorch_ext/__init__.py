"""weft: kernels and one-sided collectives that let a PyTorch user run one model on many devices.

Importing this package imports nothing else. A public name is resolved at its first use. The "weft" backend is
registered with torch.distributed when torch.distributed is imported.
"""

if __name__ != "weft":
    raise ImportError(
        f"this folder is the source of the package weft and was imported as {__name__!r}: install it "
        "(pip install -e .), import weft, and keep the repository's root off sys.path (PYTHONSAFEPATH=1)"
    )

import importlib
import re
from pathlib import Path

from weft.comm.register import register_backend_when_torch_is_imported

_LINE = re.compile(r"^from (\S+) import (\w+) as", re.MULTILINE)
_HOME_OF = {name: home for home, name in _LINE.findall(Path(__file__).with_suffix(".pyi").read_text())}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name == "__version__":
        return importlib.import_module("weft._C").build["version"]
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'weft' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__():
    return [*globals(), *__all__]


register_backend_when_torch_is_imported()
