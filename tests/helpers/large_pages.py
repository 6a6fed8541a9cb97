"""Large pages for a process that forks ranks: each of them copies its table of pages, and frees it when it ends."""

import ctypes
from pathlib import Path

LARGE = 1 << 21  # bytes of a large page on x86
COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later; an older kernel refuses it


def use_large_pages() -> int:
    """Put this process's private memory into large pages where it fills them; return their number."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int
    done = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode = line.split()[:5]
        if access == "rw-p" and inode == "0":
            start, end = (int(number, 16) for number in place.split("-"))
            first = -(-start // LARGE) * LARGE
            done += sum(libc.madvise(page, LARGE, COLLAPSE) == 0 for page in range(first, end - LARGE + 1, LARGE))
    return done
