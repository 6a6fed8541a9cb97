"""Lookup of the compiled kernel for a launch, in the archive of the device's architecture.

The launcher makes the key from the arguments. It is weft._C.launch, which launches through the CUDA driver. weft.ops
passes it in by `use`; this package does not import it.
"""

import threading
from pathlib import Path
from typing import Any

from weft.kernels import archive
from weft.kernels.archive import Archive, ArchiveError

_launcher: Any = None
_folder = archive.COMPILED
_archives: dict[str, Archive | str] = {}  # by architecture; a string gives the reason why there is none
# By the kernel's identity and architecture. The entry keeps the kernel alive, so that no other takes its id.
_found: dict[tuple[int, str], tuple[Any, "CompiledKernels | str"]] = {}
_lock = threading.Lock()


def use(launcher: Any, folder: Path = archive.COMPILED) -> None:
    """Set the launcher (None for Triton only) and the folder of the archives for all launches from now on."""
    global _launcher, _folder
    with _lock:
        _launcher, _folder = launcher, folder
        _archives.clear()
        _found.clear()


def archive_of(architecture: str) -> Archive | str:
    """Return the archive for an architecture, or the reason why there is none."""
    known = _archives.get(architecture)
    if known is None:
        path = _folder / f"{architecture}.weft"
        try:
            known = Archive(path)
        except FileNotFoundError:
            known = f"this installation has no compiled kernels for {architecture}; {archive.HOW_TO_BUILD}"
        except ArchiveError as error:
            known = str(error)
        _archives[architecture] = known
    return known


def kind(arguments: tuple, options: dict[str, Any], tensors: list) -> bytes | None:
    """Return the key of a call, everything but addresses, and append its tensors; None if it has no launcher."""
    return None if _launcher is None else _launcher.kind(arguments, options, tensors)


class CompiledKernels:
    """A kernel's compiled variants for one architecture. Each is unpacked at its first launch."""

    def __init__(self, kernel, name: str, stored: Archive) -> None:
        self._archive = stored
        self._variants = stored.of_kernel(name)
        self._added: set[bytes] = set()
        self._dispatcher = dispatcher(kernel)

    def launch(self, grid: tuple[int, ...], arguments: tuple, constants: tuple, stream: int) -> bool:
        """Launch the variant for these arguments; return False, without a launch, if there is none.

        An empty grid loads the variant and launches nothing.
        """
        if self._dispatcher.launch(grid, arguments, constants, stream):
            return True
        key = self._dispatcher.key(arguments, constants)
        variant = self._variants.get(key)
        if variant is None:
            return False
        with _lock:
            if key not in self._added:
                machine = self._archive.machine(variant)
                self._dispatcher.add(key, _loadable(machine))
                self._added.add(key)
        return self._dispatcher.launch(grid, arguments, constants, stream)

    def serves(self, arguments: tuple, constants: tuple) -> bool:
        return self._dispatcher.key(arguments, constants) in self._variants

    def lacks(self) -> str:
        """Return the reason for a launch that no variant serves."""
        return f"{self._archive.path.name} has {len(self._variants)} variants of it, none for these arguments"


def find(kernel, architecture: str) -> CompiledKernels | str:
    """Return the kernel's compiled variants, or the reason why none may be launched."""
    place = (id(kernel), architecture)
    known = _found.get(place)
    if known is None:
        known = _found[place] = kernel, _look_for(kernel, architecture)
    return known[1]


def dispatcher(kernel):
    """Return the launcher's dispatcher, which makes the keys of a kernel's launches."""
    unspecialised = [parameter.name for parameter in kernel.params if parameter.do_not_specialize]
    return _launcher.Dispatcher(full_name(kernel), list(kernel.arg_names), unspecialised)


def full_name(kernel) -> str:
    """Return the kernel's full name ("weft.kernels.signal._meet_kernel", say), the same with and without Triton."""
    return f"{kernel.__module__}.{kernel.__name__}"


def _look_for(kernel, architecture: str) -> CompiledKernels | str:
    if _launcher is None:
        return "nothing was given to launch compiled kernels with; `import weft.ops` gives it"
    stored = archive_of(architecture)
    if isinstance(stored, str):
        return stored
    name = full_name(kernel)
    return stored.drift(name) or CompiledKernels(kernel, name, stored)


def _loadable(machine: archive.Machine):
    return _launcher.Kernel(
        machine.entry,
        machine.cubin,
        list(machine.arguments),
        machine.shared_bytes,
        machine.warps,
        machine.registers,
    )
