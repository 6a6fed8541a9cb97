"""Collectives of a group with tensors on GPUs: weft's kernels over peer memory, or the group's backend.

Tensors in host memory go to the weft engine if it is the group's CPU backend, and to torch's backend otherwise. The
first collective of CUDA tensors checks whether the ranks reach each other's memory. All ranks get the same result, and
it holds from then on.
"""

from dataclasses import replace
from itertools import pairwise
from weakref import ref

import torch
import torch.distributed as dist

from weft import _C
from weft.comm.backend import WeftProcessGroup
from weft.comm.backend_communicator import BackendCommunicator
from weft.comm.communicator import Communicator, backends_of
from weft.comm.crossovers import NEVER, architecture_of, crossovers, default_crossovers
from weft.comm.dtypes import AVERAGE, SUM, op_code
from weft.comm.engine_communicator import EngineCommunicator
from weft.comm.fusion import Fusion
from weft.comm.stream_order import StreamOrder
from weft.comm.symmetric_memory import SymmetricMemory, open_symmetric_memory

_DEVICE_TYPE = "cuda"
_MOST_RANKS = 72  # of one NVLink domain (NVL72), and most_ranks in csrc/cuda
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# There is a set of flags, boxes and staging memory for eager launches, and one for captured ones. Boxes for 64 KiB need
# 1.5 MiB with 8 ranks, 3 MiB with 16. With more ranks low_latency takes smaller tensors only.
_PADS_BYTES = 4 << 20
_WORKSPACE_BYTES = 8 << 20  # larger tensors pass through it in pieces
_SET_BYTES = _PADS_BYTES + _WORKSPACE_BYTES
_BLOCKS = 36  # per launch; best or nearly so in vLLM's search: more blocks contend for the links


class DeviceCommunicator(Communicator):
    """Communicator that chooses the transport by a tensor's device.

    weft's kernels sum and average float32, float16 and bfloat16 on GPUs that reach each other's memory. They sum in
    rank order in fp32, divide by W for an average, and round once, as the engine does on the CPU. This holds for every
    size. Large tensors pass through staging memory in pieces. Tensors in symmetric memory are read where they lie; for
    one call they lie there on all ranks or on none.

    The backend takes other types and operators, and sums in its own order. NCCL also takes large tensors to gather, and
    large sums that may be in any order (deterministic=False).

    Attributes:
        crossovers: the sizes at which the algorithm changes; the same on all ranks. Set with the transport.

    Launches are on torch's current stream. If that is not the stream of the last launch, it first waits for the last
    one. CUDA graphs can capture launches once one collective has run. Captured launches have flags and staging memory
    of their own, so a replay may run beside other calls. All ranks replay the graphs of a group one after another, in
    the same order.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self._host: Communicator = (
            EngineCommunicator(group) if isinstance(group, WeftProcessGroup) else BackendCommunicator(group)
        )
        backends = backends_of(group)
        self._backend_name = backends.get("cuda", "no backend")
        self._serves_host = "cpu" in backends
        self._device: torch.device | None = None
        self._backend: Communicator | None = None
        self._kernels: _Kernels | None = None
        self._why_not = ""
        self.crossovers = default_crossovers(self.world_size)
        self._connected = False
        self._lent: list[ref[Lent]] = []  # symmetric memory in use
        self._lent_so_far = 0  # the same on every rank, because lending is a collective call

    @property
    def host(self) -> Communicator:
        return self._host

    @property
    def transport(self) -> str:
        if self._device is None:
            return f"{self._host.transport}; for CUDA tensors chosen at their first collective"
        if self._kernels is None:
            return f"{self._backend_name}; weft's kernels do not run: {self._why_not}"
        sizes, low_latency = self.crossovers, min(self._kernels.low_latency_bytes, self.crossovers.one_shot - 1)
        ways = [f"low latency to {_size(low_latency)}"] if low_latency > 0 else []
        if sizes.two_shot < NEVER:
            ways += [f"one-shot below {_size(sizes.two_shot)}", "then two-shot"] if sizes.two_shot else ["two-shot"]
        else:
            ways += ["one-shot"]
        text = f"weft's kernels over symmetric memory ({', '.join(ways)})"
        if self._backend_name == "nccl" and sizes.nccl < NEVER:
            text += f"; nccl above {_size(sizes.nccl - 1)} for what is not summed in order"
        return text

    @property
    def low_latency_bytes(self) -> int:
        """The largest tensor of the algorithm low_latency; 0 if weft's kernels do not run."""
        return self._kernels.low_latency_bytes if self._kernels is not None else 0

    def device_of_numbers(self, device: torch.device) -> torch.device:
        if self._serves_host:
            return torch.device("cpu")
        return torch.device(_DEVICE_TYPE, torch.cuda.current_device()) if device.type != _DEVICE_TYPE else device

    def cuda_group(self) -> dist.ProcessGroup | None:
        return self.group.cuda_half() if isinstance(self.group, WeftProcessGroup) else self.group

    def p2p_group(self, device: torch.device) -> dist.ProcessGroup:
        if device.type != _DEVICE_TYPE:
            return self.group
        group = self.cuda_group()
        assert group is not None
        if not self._connected:  # NCCL connects all ranks in the first call, which must not be a batch of a few
            if device.type == "cuda" and group._get_backend(device).name() == "gloo":
                raise RuntimeError(
                    "gloo sends no CUDA tensors from rank to rank; start the group with cpu:weft,cuda:nccl"
                )
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self._connected = True
        return group

    def check_waits(self) -> None:
        super().check_waits()
        self._host.check_waits()

    def _stopped_a_kernel(self) -> bool:
        return self._kernels is not None and self._kernels.broken()

    # Collectives.

    def all_reduce_(
        self, x: torch.Tensor, op=dist.ReduceOp.SUM, fusion: Fusion | None = None, deterministic: bool = True
    ) -> torch.Tensor:
        if x.device.type != _DEVICE_TYPE:
            return self._host.all_reduce_(x, op, fusion)
        if self.world_size == 1:
            if fusion is not None:
                fusion.around(lambda sent: None, x)
            return x
        backend, kernels = self._on(x.device)
        code = op_code(op)
        supported = x.dtype in _NAMES and code in (SUM, AVERAGE)
        any_order = not deterministic and self._is_nccls(_bytes(x)) and self._place_of(x) is None
        if kernels is None or not supported or any_order:
            return backend.all_reduce_(x, op, fusion)
        average = code == AVERAGE
        if fusion is None:
            self._reduce(kernels, x, average, 1.0, deterministic)
        else:  # the kernel applies the scale, before it rounds
            scale = fusion.scale
            replace(fusion, scale=1.0).around(
                lambda sent: self._reduce(kernels, sent, average, scale, deterministic), x
            )
        return x

    def all_reduce_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if partial.device.type != _DEVICE_TYPE:
            return self._host.all_reduce_rms_norm(partial, residual, weight, eps)
        kernels = self._on(partial.device)[1] if self.world_size > 1 else None
        if kernels is None or not self._is_low_latency(kernels, partial) or not kernels.takes_rows(partial):
            return super().all_reduce_rms_norm(partial, residual, weight, eps)
        inputs = [_flat(x) for x in (partial, residual, weight)]
        normalised, total = (torch.empty(partial.shape, dtype=partial.dtype, device=partial.device) for _ in range(2))
        addresses = [x.data_ptr() for x in (*inputs, normalised, total)]
        hidden = weight.numel()
        kernels.launch("all_reduce_rms_norm", *addresses, partial.numel() // hidden, hidden, _NAMES[partial.dtype], eps)
        return normalised, total

    def fuses_scale(self, x: torch.Tensor) -> bool:
        if x.device.type != _DEVICE_TYPE:
            return self._host.fuses_scale(x)
        return self.world_size > 1 and self._on(x.device)[1] is not None and x.dtype in _NAMES

    def barrier(self) -> None:
        self._host.barrier()

    def broadcast_(self, x: torch.Tensor, root: int) -> torch.Tensor:
        return self._with_backend(x).broadcast_(x, root) if self.world_size > 1 else x

    def all_to_all_into(self, parts: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self._with_backend(parts[0]).all_to_all_into(parts, outputs)

    def all_gather_into(self, x: torch.Tensor, parts: list[torch.Tensor]) -> None:
        if x.device.type != _DEVICE_TYPE:
            return self._host.all_gather_into(x, parts)
        backend, kernels = self._on(x.device)
        sizes, place = [_bytes(part) for part in parts], self._place_of(x)
        if kernels is None or (place is None and self._is_nccls(sum(sizes))):
            return backend.all_gather_into(x, parts)
        _check_part("all_gather", x, parts[self.rank])
        targets = [part.data_ptr() for part in parts]
        if place is None:
            source = _flat(x)
            kernels.launch("all_gather", source.data_ptr(), targets, sizes)
            return None
        lent, offset = place
        places = [self._place_of(part) for part in parts]
        known = x.data_ptr() == targets[self.rank] and all(at is not None and at[0] is lent for at in places)
        if known and sum(sizes) >= self.crossovers.copies:  # each rank's part is where this rank's copy of it is
            offsets = [at[1] for at in places if at is not None]
            sources = [address + at for address, at in zip(lent.window.addresses, offsets, strict=True)]
            kernels.launch("all_gather_by_copies", sources, targets, sizes, number=lent.place_id(offsets[0]))
        else:
            window = lent.window.addresses, offset
            kernels.launch("all_gather_in_place", *window, targets, sizes, x.element_size(), number=lent.place_id(0))
        return None

    def reduce_scatter_into(self, parts: list[torch.Tensor], output: torch.Tensor, op=dist.ReduceOp.SUM) -> None:
        if output.device.type != _DEVICE_TYPE:
            return self._host.reduce_scatter_into(parts, output, op)
        backend, kernels = self._on(output.device)
        code = op_code(op)
        if kernels is None or output.dtype not in _NAMES or code not in (SUM, AVERAGE):
            return backend.reduce_scatter_into(parts, output, op)
        _check_part("reduce_scatter", output, parts[self.rank])
        source, counts = _side_by_side([_flat(part) for part in parts]), [part.numel() for part in parts]
        how = _NAMES[output.dtype], code == AVERAGE, 1.0
        place = self._place_of(source)
        if place is None:
            kernels.launch("reduce_scatter", source.data_ptr(), output.data_ptr(), counts, *how)
        else:
            lent, offset = place
            window = lent.window.addresses, offset
            kernels.launch("reduce_scatter_in_place", *window, output.data_ptr(), counts, *how, number=lent.place_id(0))
        return None

    # Symmetric memory.

    def lend(self, window: SymmetricMemory) -> torch.Tensor:
        """Return this rank's part as a tensor.

        The window stays mapped, and all_reduce_ recognises it, as long as a tensor in it lives.
        """
        self._lent_so_far += 1
        lent = Lent(window, self._lent_so_far)
        self._lent = [other for other in self._lent if other() is not None]
        self._lent.append(ref(lent))
        return _as_tensor(lent)

    def _place_of(self, x: torch.Tensor) -> "tuple[Lent, int] | None":
        """Return the symmetric memory that holds x, and the offset of x in bytes; None if x lies elsewhere.

        Also None for an x that is not contiguous, or a negative view.
        """
        if self._lent and x.is_contiguous() and not x.is_neg():
            for reference in self._lent:
                lent = reference()
                if lent is not None and 0 <= (offset := _address(x) - lent.address) <= lent.bytes - _bytes(x):
                    return lent, offset
        return None

    # Choice of transport, and launches.

    def _is_nccls(self, bytes: int) -> bool:
        """Return whether NCCL carries this size if any order of summation is allowed or nothing is summed."""
        return bytes >= self.crossovers.nccl and self._backend_name == "nccl"

    def _is_low_latency(self, kernels: "_Kernels", x: torch.Tensor) -> bool:
        return _bytes(x) <= kernels.low_latency_bytes and _bytes(x) < self.crossovers.one_shot

    def _reduce(self, kernels: "_Kernels", x: torch.Tensor, average: bool, scale: float, deterministic: bool) -> None:
        """Set x to scale times the sum of x over ranks, or the average."""
        operation = x.numel(), _NAMES[x.dtype], average, scale
        place = self._place_of(x)
        if place is None:
            whole = _flat(x)
            address, two_shot = whole.data_ptr(), _bytes(x) >= self.crossovers.two_shot
            low_latency = self._is_low_latency(kernels, x)
            algorithm = "low_latency" if low_latency else "two_shot" if two_shot else "one_shot"
            kernels.launch("all_reduce", address, address, *operation, algorithm)
            if address != x.data_ptr():
                x.detach().copy_(whole.view(x.shape))
            return
        lent, offset = place
        window = lent.window
        place_id = lent.place_id(offset)
        if window.multicast and kernels.multimem and not deterministic and offset % 16 == 0 and _bytes(x) % 16 == 0:
            kernels.launch(
                "all_reduce_multimem", window.multicast + offset, *operation, offset=place_id, own=x.data_ptr()
            )
        else:
            kernels.launch("all_reduce_in_place", [at + offset for at in window.addresses], *operation, offset=place_id)

    def _with_backend(self, x: torch.Tensor) -> Communicator:
        return self._on(x.device)[0] if x.device.type == _DEVICE_TYPE else self._host

    def _on(self, device: torch.device) -> tuple[Communicator, "_Kernels | None"]:
        if self._device is None:
            self._choose(device)
        if device != self._device:
            raise ValueError(
                f'group "{self.name}" works on {self._device} and got a tensor on {device}; a rank has one GPU for all '
                "collectives of a group"
            )
        assert self._backend is not None
        return self._backend, self._kernels

    def _choose(self, device: torch.device) -> None:
        """Choose the transport of CUDA tensors, together with all ranks."""
        stream = StreamOrder(device)
        if stream.capturing():
            raise RuntimeError(
                f'group "{self.name}" has had no collective of CUDA tensors yet, and cannot be set up for them while a '
                "CUDA graph is captured; run one before the capture, say weft.all_reduce(torch.zeros(1, device=...))"
            )
        with stream.on_device():
            group = self.cuda_group()
            assert group is not None
            kernels, self._why_not = None, self._first_of(self._obstacle())
            if not self._why_not:
                try:
                    window = open_symmetric_memory(self, 2 * _SET_BYTES, device)
                    kernels, obstacle = _made(self, window, stream)
                    self._why_not = self._first_of(obstacle)
                    if kernels is not None and not self._why_not:
                        self.crossovers = self.all_gather_object(crossovers(architecture_of(device), self.world_size))[
                            0
                        ]
                        kernels.multimem = all(self.all_gather_object(kernels.multimem))
                except (ValueError, OSError) as error:  # raised by every rank
                    self._why_not = str(error)
        self._kernels = None if self._why_not else kernels
        self._backend = BackendCommunicator(group)
        self._device = device

    def _obstacle(self) -> str:
        if self.world_size == 1:
            return "the group has one rank"
        if self.world_size > _MOST_RANKS:
            return f"they reach at most {_MOST_RANKS} ranks, and the group has {self.world_size}"
        return "this weft was built without CUDA" if _C.cuda is None else ""

    def _first_of(self, obstacle: str) -> str:
        """Return the obstacle of the lowest rank that has one, or ""; every rank passes its own."""
        obstacles = self.all_gather_object(obstacle)
        by_rank = zip(self.global_ranks, obstacles, strict=True)
        return next((f"rank {rank}: {reason}" for rank, reason in by_rank if reason), "")


class Lent:
    """This rank's part of a window, in the form from which torch makes a tensor; the tensor keeps it alive."""

    def __init__(self, window: SymmetricMemory, number: int):
        self.window, self.number = window, number
        self.address, self.bytes = window.mine.data_ptr(), window.mine.numel()

    def place_id(self, offset: int) -> int:
        """Return what kernels compare between ranks that must use the same memory."""
        return (self.number % 2**16 << 48) + offset

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"version": 3, "shape": (self.bytes,), "typestr": "|u1", "data": (self.address, False)}


class _Kernels:
    """Collectives of the extension on one group and device, with their flags and workspaces.

    A graph may be replayed at any time, so captured launches share neither with the others.

    Attributes:
        multimem: whether all_reduce_multimem runs on the devices of all ranks.
        low_latency_bytes: the largest tensor that low_latency takes.

    Raises:
        RuntimeError: the driver or the device does not run the extension's kernels.
    """

    def __init__(self, ranks: DeviceCommunicator, window: SymmetricMemory, stream: "StreamOrder"):
        self._record, self._stream, self._window = ranks.record(stream.device), stream, window
        self._sets = [
            _ranks(
                ranks.rank,
                [address + begin for address in window.addresses],
                _PADS_BYTES // 4,
                [address + begin + _PADS_BYTES for address in window.addresses],
                _WORKSPACE_BYTES,
                self._record.address,
                self._record.timeout_s,
                _BLOCKS,
            )
            for begin in (0, _SET_BYTES)
        ]
        self.multimem = self._sets[0].load()
        self.low_latency_bytes = self._sets[0].low_latency_bytes

    def takes_rows(self, x: torch.Tensor) -> bool:
        """Return whether all_reduce_rms_norm takes x."""
        if x.dtype not in _NAMES or x.numel() == 0:
            return False
        return x.numel() // x.size(-1) <= self._sets[0].rms_norm_rows(x.size(-1), _NAMES[x.dtype])

    def broken(self) -> bool:
        """Return whether a kernel has given up; it then marks words of its rank's pad."""
        pads = (self._window.mine[begin:][:_PADS_BYTES].view(torch.int32) for begin in (0, _SET_BYTES))
        return any(pad[ranks.marks].any() for pad, ranks in zip(pads, self._sets, strict=True))

    def launch(self, name: str, *arguments, **more) -> None:
        self._record.check()
        with self._stream.next() as (handle, captured):
            getattr(self._sets[captured], name)(*arguments, handle, **more)


def _made(ranks: DeviceCommunicator, window: SymmetricMemory, stream: StreamOrder) -> tuple[_Kernels | None, str]:
    try:
        return _Kernels(ranks, window, stream), ""
    except (ValueError, RuntimeError) as error:  # from this rank's driver; the other ranks must learn of it
        return None, f"{error}; {_built_for()}"


def _built_for() -> str:
    assert _C.cuda is not None
    driver = _C.cuda.state()["driver"]  # 13010 is 13.1
    of_driver = f"the driver's is {driver // 1000}.{driver % 1000 // 10}" if isinstance(driver, int) else "no driver"
    return f"weft is built with CUDA {_C.build['cuda']} for {_C.build['cuda_architectures']}, {of_driver}"


def _ranks(*arguments):
    assert _C.cuda is not None
    return _C.cuda.Ranks(*arguments)


def _as_tensor(lent: Lent) -> torch.Tensor:
    return torch.as_tensor(lent, device=lent.window.mine.device)


def _size(bytes: int) -> str:
    return f"{bytes / (1 << 20):.3g} MiB" if bytes >= 1 << 20 else f"{bytes / 1024:.4g} KiB"


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _address(x: torch.Tensor) -> int:
    """Return x's address, of an empty tensor too."""
    return x.untyped_storage().data_ptr() + int(x.storage_offset()) * x.element_size()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return x's elements in order, in one dimension, in x's own memory if possible."""
    return x.detach().resolve_neg().contiguous().view(-1)


def _side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that starts where the parts lie one after another; copy only parts that do not already."""
    together = all(_address(left) + _bytes(left) == _address(right) for left, right in pairwise(parts))
    return parts[0] if together else torch.cat(parts)


def _check_part(operation: str, x: torch.Tensor, part: torch.Tensor) -> None:
    if x.dtype != part.dtype or x.numel() != part.numel():
        raise ValueError(
            f"{operation}: this rank's part is {part.dtype} with {part.numel()} elements, its tensor {x.dtype} with "
            f"{x.numel()}; they must be alike"
        )
