"""The compiled part: raw addresses, counts and codes; checks of tensors are the caller's."""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from torch import Tensor

_Method = TypeVar("_Method", bound=Callable)

class FastMethod:
    """A method that does the usual call in C++."""

    __wrapped__: Callable

def engine_method(otherwise: _Method) -> _Method: ...
def of_default_group(otherwise: _Method) -> _Method: ...
def process_group_method(name: str, otherwise: _Method, work: object) -> _Method: ...

build: dict[str, str | None]
dtypes: dict[str, int]
moved_dtypes: dict[str, int]
reduce_ops: dict[str, int]

class CommError(RuntimeError):
    """A collective or a message failed. The subclasses say how."""

class RankLostError(CommError):
    """A rank died or left the group. The text names it, its process and the call that waited for it."""

class CollectiveMismatchError(CommError):
    """Ranks called different operations, types or sizes. Every rank raises it with the same text."""

class CollectiveTimeoutError(CommError):
    """A rank was silent for longer than the group's timeout. The text names it."""

def on_comm_error(hook: Callable[[str], None]) -> None: ...
def set_purpose(text: str) -> None: ...
def instruction_sets() -> list[str]: ...
def reduce(sources: list[int], destination: int, count: int, dtype: int, op: int, instruction_set: str) -> None: ...
def multiply(
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    out: tuple[int, int],
    sizes: tuple[int, int, int],
    dtype: int,
    leaves: int,
    rounds: bool,
    threads: int,
    instruction_set: str = "",
) -> None: ...
def copy_past_cache(source: int, destination: int, bytes: int) -> None: ...
def check_reduction(dtype: int, op: int) -> None: ...
def process_key() -> int: ...
def has_ended(key: int) -> bool: ...
def descriptor_of(key: int, number: int) -> int: ...

class Segment:
    @staticmethod
    def create(bytes: int) -> Segment: ...
    @staticmethod
    def open(creator: int, descriptor: int, bytes: int) -> Segment: ...
    @property
    def descriptor(self) -> int: ...

class Region:
    """Symmetric memory; its buffer is this rank's part."""

    @property
    def addresses(self) -> list[int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Source:
    @property
    def rank(self) -> int: ...

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def then(self, callback: Callable[[BaseException | None], None]) -> None: ...

class Group:
    def __init__(
        self,
        name: str,
        rank: int,
        segment: Segment,
        ranks: list[tuple[int, int]],
        staging_bytes: int,
        timeout_s: float,
        oversubscribed: bool,
        labels: list[int],
        single_copy: bool,
        threads: int,
    ) -> None: ...
    @staticmethod
    def reserve(segment: Segment, rank: int, world: int, staging_bytes: int) -> None: ...
    @staticmethod
    def segment_bytes(world: int, staging_bytes: int) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def calls(self) -> int: ...
    def record_calls(self, kept: int) -> int: ...
    def last_calls(self) -> list[tuple[int, str, str, int, int, int, int, int]]: ...
    def last_messages(self) -> list[tuple[bool, int, int, int, int, int]]: ...
    def waiting(self) -> tuple[str, float, list[int]] | None: ...
    @property
    def single_copy(self) -> bool: ...
    def rename(self, name: str) -> None: ...
    def set_timeout(self, timeout_s: float) -> None: ...
    def lost_ranks(self) -> list[int]: ...
    def create_region(self, bytes: int) -> Region: ...
    def abort(self) -> None: ...
    def leave(self) -> None: ...
    def inject_faults(
        self, seed: int = 0, longest_delay_us: int = 0, die_at_point: int = 0, wait_for_death: bool = False
    ) -> None: ...
    def barrier(self, asynchronous: bool = False) -> Work | None: ...
    def all_reduce(
        self, input: int, output: int, count: int, dtype: int, op: int, asynchronous: bool = False
    ) -> Work | None: ...
    def all_reduce_fused(
        self,
        input: int,
        output: int,
        count: int,
        dtype: int,
        op: int,
        wire: int,
        scale: float,
        squared_norm: int,
        asynchronous: bool = False,
    ) -> Work | None: ...
    def all_gather(
        self, input: int, outputs: list[int], counts: list[int], dtype: int, asynchronous: bool = False
    ) -> Work | None: ...
    def reduce_scatter(
        self, inputs: list[int], output: int, counts: list[int], dtype: int, op: int, asynchronous: bool = False
    ) -> Work | None: ...
    def broadcast(self, data: int, count: int, dtype: int, root: int, asynchronous: bool = False) -> Work | None: ...
    def reduce(
        self, input: int, output: int, count: int, dtype: int, op: int, root: int, asynchronous: bool = False
    ) -> Work | None: ...
    def gather(
        self, input: int, outputs: list[int], count: int, dtype: int, root: int, asynchronous: bool = False
    ) -> Work | None: ...
    def scatter(
        self, inputs: list[int], output: int, count: int, dtype: int, root: int, asynchronous: bool = False
    ) -> Work | None: ...
    def all_to_all(
        self,
        inputs: list[int],
        input_counts: list[int],
        outputs: list[int],
        output_counts: list[int],
        dtype: int,
        asynchronous: bool = False,
    ) -> Work | None: ...
    def send(self, destination: int, data: int, count: int, dtype: int, tag: int) -> Work: ...
    def receive(self, source: int, data: int, count: int, dtype: int, tag: int, heard_from: Source) -> Work: ...

class _WaitRecord(ModuleType):
    words: int
    fields: dict[str, int]
    states: dict[str, int]
    names: dict[int, str]

wait_record: _WaitRecord

class _Cuda(ModuleType):
    class Ranks:
        def __init__(
            self,
            rank: int,
            pads: list[int],
            pad_words: int,
            workspace: list[int],
            workspace_bytes: int,
            record: int,
            timeout_s: float,
            blocks: int,
        ) -> None: ...
        @property
        def low_latency_bytes(self) -> int: ...
        def rms_norm_rows(self, hidden: int, dtype: str) -> int: ...
        @property
        def marks(self) -> list[int]: ...
        def load(self) -> bool: ...
        def barrier(self, stream: int) -> None: ...
        def all_reduce(
            self,
            source: int,
            destination: int,
            count: int,
            dtype: str,
            average: bool,
            scale: float,
            algorithm: str,
            stream: int,
        ) -> None: ...
        def all_reduce_rms_norm(
            self,
            partial: int,
            residual: int,
            weight: int,
            normalised: int,
            total: int,
            rows: int,
            hidden: int,
            dtype: str,
            eps: float,
            stream: int,
        ) -> None: ...
        def all_reduce_in_place(
            self,
            addresses: list[int],
            count: int,
            dtype: str,
            average: bool,
            scale: float,
            stream: int,
            offset: int = 0,
        ) -> None: ...
        def all_reduce_multimem(
            self,
            multicast: int,
            count: int,
            dtype: str,
            average: bool,
            scale: float,
            stream: int,
            offset: int = 0,
            own: int = 0,
        ) -> None: ...
        def reduce_scatter(
            self, source: int, destination: int, counts: list[int], dtype: str, average: bool, scale: float, stream: int
        ) -> None: ...
        def all_gather(self, source: int, destinations: list[int], bytes: list[int], stream: int) -> None: ...
        def reduce_scatter_in_place(
            self,
            window: list[int],
            offset: int,
            destination: int,
            counts: list[int],
            dtype: str,
            average: bool,
            scale: float,
            stream: int,
            number: int = 0,
        ) -> None: ...
        def all_gather_in_place(
            self,
            window: list[int],
            offset: int,
            destinations: list[int],
            bytes: list[int],
            unit: int,
            stream: int,
            number: int = 0,
        ) -> None: ...
        def all_gather_by_copies(
            self, sources: list[int], destinations: list[int], bytes: list[int], stream: int, number: int = 0
        ) -> None: ...

    def copy_and_mark(
        self, destinations: list[int], sources: list[int], bytes: list[int], flags: list[int], stream: int
    ) -> None: ...
    def state(self) -> dict[str, int | str | None]: ...
    def rank_order_sum(
        self, sources: list[int], destination: int, count: int, dtype: str, scale: float = 1.0, stream: int = 0
    ) -> None: ...

cuda: _Cuda | None

class _Launch(ModuleType):
    class Kernel:
        """One compiled variant.

        Args:
            arguments: the C types, in order, of the parameters that are not constants: "ptr", "i1" to "i64", "u1" to
                "u64", "fp32", "fp64", and "tensordesc:" followed by the parameter's entry of Triton's metadata
                `tensordesc_meta` as JSON.
        """

        def __init__(
            self,
            name: str,
            cubin: bytes,
            arguments: list[str],
            shared_bytes: int,
            warps: int,
            registers: int,
        ) -> None: ...

    class Dispatcher:
        """The variants of one jit function. `constants` are pairs of name and value, whose order counts."""

        def __init__(self, name: str, parameters: list[str], unspecialised: list[str]) -> None: ...
        def add(self, key: bytes, kernel: _Launch.Kernel) -> None: ...
        def key(self, arguments: tuple, constants: tuple) -> bytes: ...
        def launch(self, grid: tuple[int, ...], arguments: tuple, constants: tuple, stream: int) -> bool: ...

    def driver(self) -> dict[str, bool | int | str | None]: ...
    def kind(self, arguments: tuple, options: dict[str, object], tensors: list[Tensor]) -> bytes | None: ...

launch: _Launch
