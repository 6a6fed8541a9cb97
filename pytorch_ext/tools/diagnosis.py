"""`weft.doctor`: a check of the package on this machine, as a text block for a bug report.

Each probe runs by itself. An exception in one probe becomes its finding, and the other probes go on.
"""

import importlib
import importlib.metadata
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from weft.adapters import version_numbers

SELF_TEST_S = 60
TESTED_TORCHES = "2.11", "2.15"  # the oldest and the newest that the tests ran with; docs/install.md has the table
_IMPORTED = ("torch", "weft._C")


@dataclass(frozen=True)
class Finding:
    """Outcome of one probe.

    Attributes:
        ok: True or False; None is neither good nor bad.
    """

    name: str
    ok: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAULT", None: "-"}[self.ok]
        first, *rest = self.text.split("\n")
        return "\n".join([f"{self.name:<20} {mark:<6} {first}", *(" " * 28 + line for line in rest)])


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        healthy: no probe found a fault.
    """

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return all(finding.ok is not False for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def doctor() -> Diagnosis:
    """Probe this machine without changing it. A missing driver, nvcc or triton is a state, not a fault.

    Examples:
        >>> print(weft.doctor())  # doctest: +ELLIPSIS
        versions             ok     weft ...
    """
    deadly = {name: how for name in _IMPORTED if name not in sys.modules and (how := _death_by_import(name))}
    sys.modules.update(dict.fromkeys(deadly))  # type: ignore[arg-type]  # the probes' imports now raise instead of ending the process
    try:
        findings = [Finding(f"import {name}", False, how) for name, how in deadly.items()]
        return Diagnosis((*findings, *(_probe(name, probe) for name, probe in PROBES.items())))
    finally:
        for name in deadly:
            del sys.modules[name]


def _death_by_import(name: str) -> str:
    """Describe how importing a module ends the process; "" if it ends with at most an exception."""
    command = [sys.executable, "-c", f"try: import {name}\nexcept Exception: pass"]
    status = subprocess.run(command, capture_output=True, timeout=SELF_TEST_S).returncode
    if not status:
        return ""
    how = f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exit status {status}"
    return f"ends the process: {how}"


def _probe(name: str, probe: Callable[[], tuple[bool | None, str]]) -> Finding:
    try:
        return Finding(name, *probe())
    except Exception as error:  # any exception is this probe's finding
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _versions() -> tuple[bool | None, str]:
    found = {name: version_of(name) for name in ("weft", "torch", "triton", "cupy-cuda13x", "numpy")}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    text = f"{text}; Python {platform.python_version()} on {platform.platform()}"
    if found["torch"] is None:
        return False, text
    oldest, newest = map(version_numbers, TESTED_TORCHES)
    torch = version_numbers(found["torch"])[:2]
    if not oldest <= torch <= newest:
        text += f"\nweft's tests ran with torch {' to '.join(TESTED_TORCHES)}; this one is {found['torch']}"
    return torch >= oldest, text


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extension() -> tuple[bool | None, str]:
    from weft.build import build_info

    info = build_info()
    cuda = f"CUDA {info['cuda']} for {info['cuda_architectures']}" if info["cuda"] else "without CUDA (no nvcc)"
    return True, f"built by {info['compiler']}, {cuda}; instruction sets here: {', '.join(info['instruction_sets'])}"


def _driver() -> tuple[bool | None, str]:
    from weft import _C

    state = _C.launch.driver()
    if not state["found"]:
        return None, f"{state['error']}; ranks run on the CPU"
    return state["error"] is None, f"version {state['version']}" + (f": {state['error']}" if state["error"] else "")


def _devices() -> tuple[bool | None, str]:
    import torch

    if not torch.cuda.is_available():
        return None, f"torch {torch.__version__} sees no CUDA device"
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        lines.append(f"{index}: {properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB")
    return True, "\n".join(lines)


def _kernels() -> tuple[bool | None, str]:
    """Compare the installed compiled kernels with this machine's devices."""
    import torch

    from weft.kernels import dispatch, launch

    lines, installed = [], set()
    for architecture in launch.ARCHITECTURES:
        archive = dispatch.archive_of(architecture)
        if isinstance(archive, str):
            lines.append(f"{architecture}: {archive}")
        else:
            installed.add(architecture)
            made_by = f"triton {archive.triton} and ptxas {archive.assembler}"
            lines.append(f"{architecture}: {len(archive.variants)} variants, compiled by {made_by}")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    needed = {launch.architecture_of(torch.device("cuda", index)) for index in devices}
    missing = sorted(needed - installed)
    if not missing:
        return (True if needed else None), "\n".join(lines)
    jit = version_of("triton")
    how = f"triton {jit} compiles them as they are needed" if jit else "triton is not installed either: none can run"
    return (None if jit else False), "\n".join([*lines, f"the devices here need {', '.join(missing)}: {how}"])


def _peers() -> tuple[bool | None, str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return None, "fewer than two CUDA devices here, so there is no other one to read from"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    cut = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return None if cut else True, f"devices that do not reach each other's memory: {cut}" if cut else "all reach all"


def _multicast() -> tuple[bool | None, str]:
    import torch

    if not torch.cuda.is_available():
        return None, "no CUDA device"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    there = [_SymmetricMemory.has_multicast_support(DeviceType.CUDA, i) for i in range(torch.cuda.device_count())]
    if not all(there):
        return None, "no sums in the switch"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and len(there) == 1:
        return None, (
            f"CUDA_VISIBLE_DEVICES={shown} shows one GPU. Where each rank sees one alone, the switch does not sum:\n"
            "torch makes no address in it. Show all GPUs to every rank (Slurm: --gpu-bind=none; Ray:\n"
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1), and call torch.cuda.set_device(LOCAL_RANK)"
        )
    return None, "the switch can sum (deterministic=False)"


def _shared_memory() -> tuple[bool | None, str]:
    """Probe memfd, which holds the weft backend's segments. Memory limits them, not /dev/shm."""
    descriptor = os.memfd_create("weft-doctor")
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    finally:
        os.close(descriptor)
    try:
        status = os.statvfs("/dev/shm")
        there = f"has {status.f_bavail * status.f_frsize >> 20} MiB"
    except OSError:
        there = "is not there"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    return True, f"memfd works; /dev/shm (not used) {there}; locked memory: {limit}"


def _cores() -> tuple[bool | None, str]:
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    text = f"{usable} of {all_cores} cores are this process's; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"
    return None, text + ". More ranks than cores wait asleep instead of spinning"


def _allocator() -> tuple[bool | None, str]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = {name: os.environ[name] for name in names if name in os.environ}
    text = ", ".join(f"{name}={value}" for name, value in settings.items()) or "torch's defaults"
    if any("expandable_segments:True" in value for value in settings.values()):
        text += ": such memory cannot be shared between processes; weft's symmetric memory is allocated apart from it"
    return None, text


def _environment() -> tuple[bool | None, str]:
    ours = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("WEFT_", "TRITON_", "NCCL_"))}
    return None, ", ".join(
        f"{name}={value}" for name, value in ours.items()
    ) or "no variable of weft's, triton's, NCCL's"


def _self_test() -> tuple[bool | None, str]:
    """Run two ranks in a new process, because CUDA does not survive a fork and this process may have touched it."""
    command = [sys.executable, "-c", "from weft.tools.diagnosis import two_ranks; two_ranks()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SELF_TEST_S)
    if done.returncode:
        return False, "\n".join(done.stderr.splitlines()[-20:]) or f"exit status {done.returncode}"
    return True, done.stdout.strip()


def two_ranks() -> None:
    """Check an all_reduce of two ranks on this machine; print its time and how ordinary tensors move."""
    from weft.testing.ranks import run_ranks

    kib, microseconds, single_copy = run_ranks(_reduce, 2, timeout_s=SELF_TEST_S)[0]
    print(f"two ranks: all_reduce of {kib:.0f} KiB in {microseconds:.1f} us")
    if single_copy:
        print("ordinary tensors are copied once: ranks read one another's memory")
    else:
        print(
            "ordinary tensors are copied twice: ranks may not read one another's memory (ptrace, seccomp, namespaces)"
        )


def _reduce(rank: int) -> tuple[float, float, bool]:
    import time

    import torch
    import torch.distributed as dist

    import weft

    x = weft.empty_symmetric(1 << 18)
    times = []
    for _ in range(50):
        x.fill_(rank + 1)
        weft.barrier()
        start = time.perf_counter()
        weft.all_reduce(x)
        times.append(time.perf_counter() - start)
        if not torch.equal(x, torch.full_like(x, 3)):
            raise RuntimeError(f"all_reduce of ones and twos gave {x.unique().tolist()}")
    single_copy = dist.group.WORLD.engine.group.single_copy  # type: ignore[union-attr]
    return x.nbytes / 1024, sorted(times)[len(times) // 2] * 1e6, single_copy


PROBES: dict[str, Callable[[], tuple[bool | None, str]]] = {
    "versions": _versions,
    "extension": _extension,
    "driver": _driver,
    "devices": _devices,
    "compiled kernels": _kernels,
    "peer access": _peers,
    "multicast": _multicast,
    "shared memory": _shared_memory,
    "cores": _cores,
    "allocator": _allocator,
    "environment": _environment,
    "self-test": _self_test,
}
