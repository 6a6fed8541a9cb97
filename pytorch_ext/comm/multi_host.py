"""Collectives of a group on several machines: shared memory inside each machine, gloo between machines.

H is the number of machines. L, the number of lanes, is the smallest number of ranks on any machine. Lane i connects the
i-th rank of every machine over gloo, and carries one L-th of the data between machines:

    all_reduce(x [n])   1 inside    reduce_scatter in rank order: lane i holds its pieces of the machine's sum, in fp32
                        2 between   all_to_all: piece h goes to machine h, which sums in the order of machines
                        3 between   all_gather of the summed pieces, rounded once
                        4 inside    all_gather of the lanes' pieces

A machine sends 2 (H-1)/H n elements, which is the minimum. The other collectives use the same steps. All ranks compare
their calls before any data moves.

The order of summation is fixed, and every rank gets the same bits. They equal the bits of one machine if each machine
has one rank, and may differ from them by rounding otherwise.
"""

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from weft import _C
from weft.comm.dtypes import AVERAGE, OP_NAMES, SUM, dtype_code
from weft.comm.engine import Engine, check, check_same_dtype, contiguous_outputs, copy_back
from weft.comm.fusion import Fusion
from weft.comm.inter_host import InterHost, Later, Message
from weft.comm.purpose import purpose

_HEADER_BYTES = 192
_CHUNK_BYTES = 4 << 20  # of a lane's part; smaller chunks wait for more messages, larger chunks overlap less


class SpanningEngine:
    """Engine of a group on several machines, with the methods of `Engine`."""

    def __init__(
        self,
        local: Engine,
        hosts: list[list[int]],
        rank: int,
        store,
        name: str,
        timeout: timedelta,
        labels: Sequence[int],  # names of the ranks in errors
    ):
        self.local, self.hosts, self.rank, self._labels = local, hosts, rank, labels
        self.world_size = sum(len(host) for host in hosts)
        self.host = next(number for number, host in enumerate(hosts) if rank in host)
        self.lanes = min(len(host) for host in hosts)
        self._name, self._pid = name, os.getpid()
        self._calls = 0
        self._left = False
        self._one_at_a_time = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future | None = None
        lane = self._lane if self._in_lane else None
        self.between = InterHost(
            hosts,
            rank,
            lane,
            store,
            lambda: self._name,
            timeout,
            on_failure=local.abort,
            lost_ranks=self.lost_ranks,
            labels=labels,
        )
        self._run("join()", lambda: None, wait=True)
        self._calls = 0  # joining is not a call of the user's

    # Collectives; `Engine` describes each.

    def all_reduce(self, x: torch.Tensor, op: int = SUM, wait: bool = True, fusion: Fusion | None = None):
        check(x)
        _check_outputs(x)
        _C.check_reduction(dtype_code(x), op)

        def body() -> None:
            self._all_reduce(x, op, fusion)
            if fusion is not None and fusion.squared_norm is not None:
                fusion.squared_norm.fill_(x.double().square().sum())

        extra = "" if fusion is None else f", as {fusion.wire_dtype or x.dtype}, scaled by {fusion.scale}"
        return self._run(f"all_reduce({_like(x)}, {OP_NAMES[op]}{extra})", body, wait)

    def reduce(self, x: torch.Tensor, root: int, op: int = SUM, wait: bool = True):
        check(x)
        _check_outputs(x)
        self._check_rank(root)
        _C.check_reduction(dtype_code(x), op)

        def body() -> None:
            total = x.clone()
            self._all_reduce(total, op, None)
            if self.rank == root:
                x.copy_(total)

        return self._run(f"reduce({_like(x)}, {OP_NAMES[op]}, to rank {self._labels[root]})", body, wait)

    def reduce_scatter(self, parts: list[torch.Tensor], output: torch.Tensor, op: int = SUM, wait: bool = True):
        check(output, *parts)
        _check_outputs(output)
        check_same_dtype("reduce_scatter", output, parts)
        _C.check_reduction(dtype_code(output), op)
        counts = [part.numel() for part in parts]

        def body() -> None:
            flat = torch.cat([parts[rank].reshape(-1) for host in self.hosts for rank in host])
            piece = self._reduced_piece(flat, [sum(counts[rank] for rank in host) for host in self.hosts], op)
            pieces = [flat.new_empty(size) for size in self._lane_sizes(sum(counts[r] for r in self._neighbours))]
            self.local.all_gather(piece.to(output.dtype), pieces)
            part = torch.cat(pieces).split([counts[rank] for rank in self._neighbours])[self.local.rank]
            output.copy_(part.view(output.shape))

        return self._run(f"reduce_scatter({output.dtype}, {OP_NAMES[op]}, parts of {counts})", body, wait)

    def all_gather(self, x: torch.Tensor, parts: list[torch.Tensor], wait: bool = True):
        check(x, *parts)
        _check_outputs(*parts)
        check_same_dtype("all_gather", x, parts)
        counts = [part.numel() for part in parts]

        def body() -> None:
            inside = [x.new_empty(counts[rank]) for rank in self._neighbours]
            self.local.all_gather(x.reshape(-1), inside)
            together = torch.cat(inside)
            piece = together.split(_even(together.numel(), self.lanes))[self._lane] if self._in_lane else None
            whole = self._from_all_machines(piece, x, [sum(counts[rank] for rank in host) for host in self.hosts])
            in_order = [rank for host in self.hosts for rank in host]
            for rank, part in zip(in_order, whole.split([counts[rank] for rank in in_order]), strict=True):
                parts[rank].copy_(part.view(parts[rank].shape))

        return self._run(f"all_gather({x.dtype}, parts of {counts})", body, wait)

    def broadcast(self, x: torch.Tensor, root: int, wait: bool = True):
        check(x)
        _check_outputs(x)
        self._check_rank(root)

        def body() -> None:
            whole = x.contiguous()
            flat = whole.view(-1)
            from_host = next(number for number, host in enumerate(self.hosts) if root in host)
            if self.host == from_host:
                self.local.broadcast(flat, self._neighbours.index(root))
            pieces = list(flat.split(self._lane_sizes(flat.numel())))
            if self._in_lane and pieces[self._lane].numel():
                options = dist.BroadcastOptions()
                options.rootRank = from_host
                piece = pieces[self._lane].clone()
                self.between.finish(self.between.lane.broadcast([_bytes(piece)], options))
                pieces[self._lane].copy_(piece)
            if self.host != from_host:
                self.local.all_gather(pieces[self.local.rank].clone(), pieces)
            copy_back(x, whole)

        return self._run(f"broadcast({_like(x)}, from rank {self._labels[root]})", body, wait)

    def gather(self, x: torch.Tensor, parts: list[torch.Tensor], root: int, wait: bool = True):
        check(x, *parts)
        _check_outputs(*parts)
        self._check_rank(root)
        check_same_dtype("gather", x, parts)

        def body() -> None:
            options = dist.GatherOptions()
            options.rootRank = root
            targets = contiguous_outputs(parts)
            if x.numel():
                received = [[_bytes(target) for target in targets]] if self.rank == root else []
                self.between.finish(self.between.everyone.gather(received, [_bytes(x.contiguous())], options))
            for part, target in zip(parts, targets, strict=True):
                copy_back(part, target)

        return self._run(f"gather({_like(x)}, to rank {self._labels[root]})", body, wait)

    def scatter(self, parts: list[torch.Tensor], output: torch.Tensor, root: int, wait: bool = True):
        check(output, *parts)
        _check_outputs(output)
        self._check_rank(root)
        check_same_dtype("scatter", output, parts)

        def body() -> None:
            options = dist.ScatterOptions()
            options.rootRank = root
            (target,) = contiguous_outputs([output])
            if output.numel():
                sent = [[_bytes(part.contiguous()) for part in parts]] if self.rank == root else []
                self.between.finish(self.between.everyone.scatter([_bytes(target)], sent, options))
            copy_back(output, target)

        return self._run(f"scatter({_like(output)}, from rank {self._labels[root]})", body, wait)

    def all_to_all(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], wait: bool = True):
        check(*inputs, *outputs)
        _check_outputs(*outputs)
        check_same_dtype("all_to_all", inputs[0], [*inputs, *outputs])
        sent, expected = [x.numel() for x in inputs], [x.numel() for x in outputs]

        def body() -> None:
            sizes = torch.empty(self.world_size, 2, self.world_size, dtype=torch.int64)
            self.between.finish(self.between.everyone.allgather([list(sizes)], [torch.tensor([sent, expected])]))
            differ = (sizes[:, 0] != sizes[:, 1].t()).nonzero()  # [sender, receiver]
            if len(differ):
                sender, receiver = differ[0].tolist()
                raise _C.CollectiveMismatchError(
                    f'all_to_all #{self._calls} on group "{self._name}": rank {self._labels[sender]} sends '
                    f"{sizes[sender, 0, receiver]} elements to rank {self._labels[receiver]}, which expects "
                    f"{sizes[receiver, 1, sender]}."
                )
            flat = torch.cat([x.reshape(-1) for x in inputs])
            received = flat.new_empty(sum(expected))
            unit = flat.element_size()
            self.between.finish(
                self.between.everyone.alltoall_base(
                    _bytes(received), _bytes(flat), [n * unit for n in expected], [n * unit for n in sent]
                )
            )
            for output, part in zip(outputs, received.split(expected), strict=True):
                output.copy_(part.view(output.shape))

        return self._run(f"all_to_all({inputs[0].dtype})", body, wait)

    def barrier(self, wait: bool = True):
        return self._run("barrier()", lambda: None, wait)

    # Messages to ranks of the same machine also go over gloo: a receive from any rank then waits in one place.

    def send(self, x: torch.Tensor, destination: int, tag: int) -> Message:
        check(x)
        self._check_rank(destination)
        self._check_usable()
        data = _bytes(x.contiguous())
        operation = f"send to rank {self._labels[destination]}"
        return Message(self.between, operation, lambda: self.between.everyone.send([data], destination, tag))

    def receive(self, x: torch.Tensor, source: int | None, tag: int) -> Message:
        check(x)
        _check_outputs(x)
        if source is not None:
            self._check_rank(source)
        self._check_usable()
        (whole,) = contiguous_outputs([x])
        data = _bytes(whole)

        def start() -> dist.Work:
            if source is None:
                return self.between.everyone.recv_anysource([data], tag)
            return self.between.everyone.recv([data], source, tag)

        operation = f"receive from {'any rank' if source is None else f'rank {self._labels[source]}'}"
        return Message(self.between, operation, start, lambda: copy_back(x, whole))

    # Life of the group.

    def rename(self, name: str) -> None:
        self._name = name
        self.local.rename(name)

    def set_timeout(self, timeout: timedelta) -> None:
        self.local.set_timeout(timeout)
        self.between.set_timeout(timeout)

    def lost_ranks(self) -> list[int]:
        """Return the ranks of this machine that have died or left; other machines are not watched."""
        return [self._neighbours[lost] for lost in self.local.lost_ranks()]

    def abort(self) -> None:
        if self._pid == os.getpid():
            self.between.fail(_C.CommError(f'rank {self._labels[self.rank]} aborted group "{self._name}".'))

    def leave(self) -> None:
        if self._left or self._pid != os.getpid():
            return
        self._left = True
        busy = self._one_at_a_time.locked() or (self._last is not None and not self._last.done())
        if busy:
            self.abort()
        self.local.leave()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self.between.close()

    # How a call is run.

    @property
    def _neighbours(self) -> list[int]:
        return self.hosts[self.host]

    @property
    def _lane(self) -> int:
        return self.local.rank

    @property
    def _in_lane(self) -> bool:
        return self.local.rank < self.lanes

    def _run(self, text: str, body: Callable[[], None], wait: bool) -> Later | None:
        """Run a call after all earlier calls."""
        text += f" for {purpose()}" if purpose() else ""
        self._check_usable()
        if wait and (self._last is None or self._last.done()):
            self._execute(text, body)
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft")
        self._last = self._thread.submit(self._execute, text, body)
        if not wait:
            return Later(self._last)
        self._last.result()
        return None

    @torch.no_grad()
    def _execute(self, text: str, body: Callable[[], None]) -> None:
        with self._one_at_a_time:
            self._check_usable()
            self._calls += 1
            try:
                self._agree(text)
                body()
            except _C.CollectiveMismatchError:
                raise  # every rank raises it, and no data has moved
            except _C.CommError as error:
                raise self.between.fail(error) from error
            except RuntimeError as error:  # from gloo
                operation = f'{text.partition("(")[0]} #{self._calls} on group "{self._name}"'
                raise self.between.lost(operation, error) from error
            except BaseException as error:  # Ctrl-C or no memory: other ranks must not wait for this one
                self.between.fail(
                    _C.CommError(
                        f'rank {self._labels[self.rank]} was stopped in {text} on group "{self._name}": {error!r}'
                    )
                )
                raise

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise _C.CommError(
                f'group "{self._name}" belongs to the process that this one was forked from; a forked child cannot '
                "take part in its collectives."
            )
        if self._left:
            raise _C.CommError(f'group "{self._name}" was destroyed; create it again to use it.')
        failure = self.between.failure
        if failure is not None:
            raise type(failure)(*failure.args)  # a new exception has its own traceback

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not a rank of a group of {self.world_size}")

    def _agree(self, text: str) -> None:
        """Check that every rank makes the same call; raise CollectiveMismatchError on every rank otherwise."""
        header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        encoded = text.encode()
        if len(encoded) > _HEADER_BYTES:  # long lists of sizes
            encoded = encoded[: _HEADER_BYTES - 12] + f"... {zlib.crc32(encoded):08x}".encode()
        header[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        headers = torch.zeros(len(self.hosts), max(map(len, self.hosts)), _HEADER_BYTES, dtype=torch.uint8)
        self.local.all_gather(header, list(headers[self.host, : len(self._neighbours)]))
        if self._lane == 0:
            local_headers = headers[self.host].clone()
            self.between.finish(self.between.lane.allgather([list(headers)], [local_headers]))
        self.local.broadcast(headers, 0)
        callers: dict[str, list[int]] = {}
        for host, of_host in zip(self.hosts, headers, strict=True):
            for rank, row in zip(host, of_host, strict=False):
                callers.setdefault(bytes(row.tolist()).rstrip(b"\0").decode(), []).append(rank)
        if len(callers) > 1:
            calls = ", ".join(
                f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))} called {called}"
                for called, ranks in sorted(callers.items(), key=lambda item: min(item[1]))
            )
            raise _C.CollectiveMismatchError(f'call #{self._calls} on group "{self._name}": {calls}.')

    # Steps of the collectives.

    def _lane_sizes(self, count: int) -> list[int]:
        """Return the number of elements, of `count` in all, that each neighbour holds; ranks in no lane hold none."""
        return _even(count, self.lanes) + [0] * (len(self._neighbours) - self.lanes)

    def _all_reduce(self, x: torch.Tensor, op: int, fusion: Fusion | None) -> None:
        """Reduce x in place, by the steps at the top of this file.

        A lane's part of x is contiguous, and so is each machine's piece of that part.
        """
        wire = x.dtype if fusion is None or fusion.wire_dtype is None else fusion.wire_dtype
        flat = x.reshape(-1).to(wire)  # shares x's memory if possible
        wide = _widened(flat)
        lane_sizes = self._lane_sizes(flat.numel())
        if len(self._neighbours) == 1:
            lane_part = wide
        else:
            lane_part = wide.new_empty(lane_sizes[self._lane])
            self.local.reduce_scatter(list(wide.split(lane_sizes)), lane_part, _inner(op))
        scale = 1.0 if fusion is None else fusion.scale
        column = self._all_reduced_between(lane_part, wire, op, scale) if len(lane_part) else flat.new_empty(0)
        if len(self._neighbours) == 1:
            flat = column
        else:
            self.local.all_gather(column, list(flat.split(lane_sizes)))
        if flat.data_ptr() != x.data_ptr() or not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def _all_reduced_between(self, x: torch.Tensor, wire: torch.dtype, op: int, scale: float) -> torch.Tensor:
        """Return x reduced by `op` over the machines, times `scale`, as type `wire`; it may share x's memory.

        Works in chunks. While one chunk is summed, the next is arriving and the previous one is being sent.
        """
        total = x if x.dtype == wire else x.new_empty(len(x), dtype=wire)
        chunk = max(1, _CHUNK_BYTES // x.element_size())
        coming = None
        going: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        sources, targets = x.split(chunk), total.split(chunk)
        for number in range(len(sources) + 1):
            arrived = coming
            coming = self._exchange(sources[number], self._shares(sources[number])) if number < len(sources) else None
            if arrived is None:
                continue
            target = targets[number - 1]
            summed = self._sum(*arrived, op)
            if scale != 1.0:
                summed *= scale
            step = self._shares(target)[0]
            row = target.new_zeros(step)
            row[: len(summed)] = summed
            rows = target.new_empty([len(self.hosts), step])
            work = self.between.lane.allgather([[_bytes(part) for part in rows]], [_bytes(row)])
            for delivery in going:
                self._deliver(*delivery)
            going = [(work, rows, target)]
        for delivery in going:
            self._deliver(*delivery)
        return total

    def _deliver(self, work: dist.Work, rows: torch.Tensor, target: torch.Tensor) -> None:
        self.between.finish(work)
        target.copy_(rows.view(-1)[: len(target)])

    def _shares(self, x: torch.Tensor) -> list[int]:
        """Return the number of elements of x that each machine sums; only the last machines may have fewer."""
        most = -(-len(x) // len(self.hosts))
        return [min(most, max(0, len(x) - most * machine)) for machine in range(len(self.hosts))]

    def _reduced_piece(self, flat: torch.Tensor, sizes: Sequence[int], op: int) -> torch.Tensor:
        """Return this lane's piece of `flat` reduced by `op` over all ranks, not yet rounded.

        `sizes` are the numbers of elements in each machine's range of `flat`. The piece lies in this machine's range.
        It is empty on a rank that is in no lane.
        """
        wide = _widened(flat)
        pieces = [part.split(_even(part.numel(), self.lanes)) for part in wide.split(list(sizes))]
        parts = [torch.cat([of_host[lane] for of_host in pieces]) for lane in range(self.lanes)]
        parts += [wide.new_empty(0)] * (len(self._neighbours) - self.lanes)
        lane_part = torch.empty_like(parts[self._lane])
        self.local.reduce_scatter(parts, lane_part, _inner(op))
        if not len(lane_part):
            return lane_part
        return self._sum(*self._exchange(lane_part, [of_host[self._lane].numel() for of_host in pieces]), op)

    def _exchange(self, x: torch.Tensor, sizes: Sequence[int]) -> tuple[dist.Work, torch.Tensor]:
        """Start to send each machine its piece of x, of `sizes` elements.

        Returns the work and the tensor that receives this machine's pieces, one row per sending machine.
        """
        count, unit = sizes[self.host], x.element_size()
        received = x.new_empty([len(self.hosts), count])
        work = self.between.lane.alltoall_base(
            _bytes(received), _bytes(x), [count * unit] * len(self.hosts), [size * unit for size in sizes]
        )
        return work, received

    def _sum(self, work: dist.Work, received: torch.Tensor, op: int) -> torch.Tensor:
        """Return the rows reduced by `op` in the order of machines, after waiting for `work`."""
        self.between.finish(work)
        total = torch.empty_like(received[0])
        addresses = [row.data_ptr() for row in received]
        instruction_set = _C.instruction_sets()[0]
        _C.reduce(addresses, total.data_ptr(), len(total), dtype_code(total), _inner(op), instruction_set)
        rounding = None if total.is_floating_point() else "trunc"
        return total.div_(self.world_size, rounding_mode=rounding) if op == AVERAGE else total

    def _from_all_machines(self, piece: torch.Tensor | None, like: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the ranges of all machines, concatenated.

        Args:
            piece: this lane's piece of its machine's range; None on a rank that is in no lane.
            like: a tensor of the result's type.
            sizes: elements in each machine's range.
        """
        lane_sizes = [_even(size, self.lanes) for size in sizes]  # [machine][lane]
        totals = [sum(of_host[lane] for of_host in lane_sizes) for lane in range(self.lanes)]
        column = like.new_empty(0)
        if piece is not None:
            longest = max(of_host[self._lane] for of_host in lane_sizes)
            received = like.new_empty([len(sizes), longest])
            if longest:
                padded = like.new_zeros(longest)
                padded[: piece.numel()] = piece
                self.between.finish(self.between.lane.allgather([[_bytes(row) for row in received]], [_bytes(padded)]))
            column = torch.cat([row[: of_host[self._lane]] for row, of_host in zip(received, lane_sizes, strict=True)])
        columns = [like.new_empty(total) for total in totals]
        nothing = [like.new_empty(0)] * (len(self._neighbours) - self.lanes)
        self.local.all_gather(column, columns + nothing)
        offsets = [[0, *accumulate(of_host[lane] for of_host in lane_sizes)] for lane in range(self.lanes)]
        return torch.cat(
            [
                columns[lane][offsets[lane][host] : offsets[lane][host + 1]]
                for host in range(len(sizes))
                for lane in range(self.lanes)
            ]
        )


def _check_outputs(*tensors: torch.Tensor) -> None:
    """Raise ValueError for outputs that a copy cannot write to.

    Without this check the copy would raise later, and its error would be taken for one of gloo: a lost rank.
    """
    for x in tensors:
        if torch._debug_has_internal_overlap(x) == 1:  # the check that a copy makes
            raise ValueError(
                f"cannot write to a tensor of shape {tuple(x.shape)} and strides {x.stride()}: more than one element "
                "lies at the same place; clone() it first"
            )


def _inner(op: int) -> int:
    """Return the operator of a reduction's steps: the sum for an average, which divides at the end."""
    return SUM if op == AVERAGE else op


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _even(count: int, parts: int) -> list[int]:
    """Return balanced sizes, some perhaps 0 (`weft.split_sizes` refuses 0, because a layer must not be empty)."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def _like(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}, {x.numel()} elements"


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as uint8."""
    return x.detach().view(-1).view(torch.uint8)
