"""Which files of the repository import which, read from their text."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = {"weft": ROOT / "pytorch_ext", "weft.kernels": ROOT / "kernels", "weft.bench": ROOT / "bench"}
HOMES = re.findall(r"^from (\S+) import (\w+) as", (FOLDERS["weft"] / "__init__.pyi").read_text(), re.MULTILINE)


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def modules_named(path: Path, known) -> Iterator[str]:
    """`from weft.ops import matmul` names weft.ops.matmul where that is a module, and weft.ops where it is not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from [name for name in (whole, node.module) if name in known][:1]


@cache
def files_imported() -> dict[Path, set[Path]]:
    """Return the files that each file of the packages, the tests and the examples imports.

    `weft.name` imports the file that the public name comes from.
    """
    paths = dict(modules())
    public = {name: paths[home] for home, name in HOMES if home in paths}
    scripts = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    known = paths | {path.stem: path for path in scripts if not path.stem.startswith("test_")}
    imported = {}
    for path in [*paths.values(), *scripts]:
        names = re.findall(r"\bweft\.(\w+)", path.read_text()) if path in scripts else ()
        imported[path] = {known[name] for name in modules_named(path, known)} | {
            public[name] for name in names if name in public
        }
    return imported
