"""DataParallel: in the place of torch's DistributedDataParallel. Wiring only; `weft.data_parallel` does the work."""

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils._pytree import tree_leaves

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.data_parallel.bucket_comm import transport_to
from weft.data_parallel.buckets import Slot
from weft.data_parallel.comm_hooks import ByHook, Hook
from weft.data_parallel.join import Shadow, tell
from weft.data_parallel.module_state import OfWrapper, Trained, broadcast
from weft.data_parallel.param_prefetch import FirstUse
from weft.data_parallel.reducer import Reducer
from weft.data_parallel.sharded_optimizer import Shards
from weft.data_parallel.wrap_checks import check_wrap, mark_wrapped
from weft.replicas import check_replicas

_MIB = 1 << 20


class DataParallel(nn.Module, Joinable):
    """The module on every rank, each with its own part of the batch; gradients are averaged over the ranks.

        model = weft.DataParallel(model)
        loss(model(inputs), targets).backward()  # gradients are reduced when this returns
        optimizer.step()

    Gradients are views of flat buckets in symmetric memory; a bucket is reduced as soon as backward has filled it.
    Sums are in fp32 in the order of ranks, the same bits on every rank, whatever `bucket_mb` and `overlap` are. The
    module's parameters and buffers become rank 0's. `state_dict` has DDP's names, which start with "module."; those of
    `model.module` are the module's own. Compile the module inside, not the wrapper. See docs/data_parallel.md.

    Args:
        module: the same on every rank, on one device. Its trainable parameters are those that require gradients; they
            may be frozen and unfrozen later (not under shard_optimizer or main_grad), on every rank alike.
        group: the ranks; None is the default group. Under tensor parallelism, mesh["dp"].
        bucket_mb: MiB of gradients that travel together.
        wire_dtype: bfloat16 or float16 halves what fp32 gradients send: they are rounded to it, summed in fp32, and the
            result is rounded to it.
        average: divide the sums by the number of ranks.
        shard_optimizer: each rank keeps the optimizer's state of its part of the parameters only (ZeRO stage 1); make
            the optimizer with `model.optimizer(torch.optim.AdamW, lr=...)`. After backward, `.grad` of the module's
            parameters refers to this rank's pieces; `model.clip_grad_norm_` clips.
        overlap_param_gather: with shard_optimizer, the optimizer's step() returns before the parameters are gathered,
            and each is waited for where forward first needs it. Whoever reads or writes one elsewhere calls
            `wait_for_parameters` first, unless by `parameters()` of this wrapper, a state_dict or a checkpoint, which
            wait by themselves. A module with buffers wants broadcast_buffers=False, or forward waits for all at once.
        unused_parameters: "error" names parameters that got no gradient on some rank, on every rank, at the end of
            backward; "zero" counts such gradients as zeros.
        main_grad: gradients are added up in fp32 `parameter.main_grad` instead of `.grad` (weft.ParallelLinear adds
            its products straight to it); `model.zero_grad()` zeroes them. With shard_optimizer the optimizer steps fp32
            copies of the parameters by them.
        broadcast_buffers: before each forward in training, buffers become rank 0's.
        overlap: False reduces after backward instead of meanwhile.
        check_gradients: each rank also looks at its own gradients before they travel, which costs a pass, so that
            `nonfinite_parameters` knows the ranks.

    Raises:
        ValueError: nothing to train, a module that is wrapped already or on several devices, of any rank and on every
            rank; an option's value.
        CollectiveMismatchError: ranks wrap different modules, or with different options; on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group = None,
        bucket_mb: float = 25,
        wire_dtype: torch.dtype | None = None,
        average: bool = True,
        shard_optimizer: bool = False,
        overlap_param_gather: bool = False,
        unused_parameters: str = "error",
        main_grad: bool = False,
        broadcast_buffers: bool = True,
        overlap: bool = True,
        check_gradients: bool = False,
    ):
        super().__init__()
        Joinable.__init__(self)
        options = {
            "bucket_mb": bucket_mb,
            "wire_dtype": wire_dtype,
            "average": average,
            "shard_optimizer": shard_optimizer,
            "overlap_param_gather": overlap_param_gather,
            "unused_parameters": unused_parameters,
            "main_grad": main_grad,
            "broadcast_buffers": broadcast_buffers,
        }
        self.ranks = communicator(group)
        device = check_wrap(module, self.ranks, options)
        self.module = module
        self.require_backward_grad_sync = True  # DDP's name
        self._broadcasts = broadcast_buffers
        self._divides_by_all = True  # though some ranks have run out of inputs
        self._trained = Trained(module)
        mark_wrapped(module, self)
        broadcast([*module.parameters(), *module.buffers()], self.ranks)

        named = enumerate(module.named_parameters())
        slots = [Slot(number, name, parameter, into_main_grad=main_grad) for number, (name, parameter) in named]
        self._fixed = shard_optimizer or main_grad  # the layout, which others than the reducer know
        self.reducer = Reducer(
            slots,
            transport_to(device, self.ranks)(self.ranks, wire_dtype, average, shard_optimizer),
            bucket_bytes=max(1, int(bucket_mb * _MIB)),
            overlap=overlap,
            unused=unused_parameters,
            check_gradients=check_gradients,
        )
        if self._fixed:  # before any gradient has come: as backward gives them, were it to run the module in its order
            self.reducer.lay_out([slot for slot in reversed(slots) if slot.parameter.requires_grad])
        self._shards = self._sharded(overlap_param_gather) if shard_optimizer else None
        self._first_use = FirstUse(module, self._shards) if self._shards and overlap_param_gather else None

    def _sharded(self, overlap_param_gather: bool) -> Shards:
        shards = self.reducer.owner = Shards(self.reducer.buckets, self.reducer.transport, overlap_param_gather)
        hook = self.module.register_load_state_dict_post_hook(OfWrapper(lambda *_: shards.reload()))
        weakref.finalize(self, hook.remove)
        return shards

    # In each step.

    def forward(self, *inputs: Any, **options: Any) -> Any:
        trains = torch.is_grad_enabled()
        if trains:
            self._prepare()
        with self._first_use.watched() if self._first_use is not None else nullcontext():
            output = self.module(*inputs, **options)
        if trains:
            self.reducer.begin_at([x for x in _tensors_in(output) if x.grad_fn is not None])
        return output

    def _prepare(self) -> None:
        if self._trained.check():
            if self._fixed:
                raise ValueError(
                    "DataParallel: parameters were frozen or unfrozen after wrapping, which shard_optimizer and "
                    "main_grad do not allow: freeze first, then wrap"
                )
            self.reducer.watch()
        self.reducer.sync = self.require_backward_grad_sync
        shares = self._broadcasts and self.module.training and self.reducer.sync and any(True for _ in self.buffers())
        root: int | None = 0 if shares else None
        if self._join_config.enable:
            Join.notify_join_context(self)
            told = tell(self, takes_part=True, reduces=self.reducer.sync, shares=shares)
            self.reducer.among = self.ranks.world_size if self._divides_by_all else told.active
            root = told.root
        self.share_buffers(root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of what goes forward inside add up on each rank; the next backward outside reduces them all."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the module's parameters, pieces and main_grads alike."""
        self.module.zero_grad(set_to_none)
        if self._shards is not None:
            self._shards.zero_grad()
        for slot in self.reducer.slots:
            if slot.into_main_grad and slot.view is not None:
                slot.view.zero_()
                slot.reduced = slot.touched = False

    # What gradients say after backward.

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients together as the last backward left them, or as clip_grad_norm_ found them since: a
        float64 scalar, the same on every rank. Under tensor parallelism shards count once each and whole parameters
        once in all; of a weft.LayerSplit, those of every rank."""
        return self.reducer.norm_squared.sqrt().squeeze(0)

    @property
    def found_nonfinite(self) -> torch.Tensor:
        """1.0 where a gradient is infinite or NaN, else 0.0: float32 [1], as torch.amp.GradScaler keeps it."""
        return (~self.reducer.norm_squared.isfinite()).float()

    def nonfinite_parameters(self) -> dict[str, list[int]]:
        """The parameters of whose gradient an element is infinite or NaN, with the ranks whose own gradient it was
        (with check_gradients=True; else there are none). A collective call."""
        return self.reducer.nonfinite()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients so that their norm is at most max_norm; returns what it was, measured now: a GradScaler
        may have unscaled them since backward. A collective call."""
        self.reducer.measure_anew()
        norm = self.grad_norm
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if factor.is_cuda or factor != 1:
            for flat in self.reducer.held():
                flat.mul_(factor)
        return norm

    # The sharded optimizer.

    @property
    def shards_optimizer(self) -> bool:
        return self._shards is not None

    def optimizer(
        self, kind: type, parameters: Iterable | None = None, *, elementwise: bool | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of the class `kind` that steps this rank's part, whose step() ends with every parameter whole.

        It is an instance of that class: schedules, its state_dict (of this rank's part) and its hooks are as usual.

        Args:
            kind: of torch.optim, or any class of that interface.
            parameters: the module's parameters or groups of them; None is all.
            elementwise: True says of a class that is not torch's that it updates each element by itself.
            options: of the class.

        Raises:
            TypeError: a class that needs whole parameters. ValueError: the model was made with shard_optimizer=False.
        """
        if self._shards is None:
            raise ValueError("model.optimizer() is for shard_optimizer=True; without it, pass model.parameters() to it")
        return self._shards.optimizer(kind, parameters, elementwise, options)

    def pieces(self) -> list[nn.Parameter]:
        """This rank's pieces of the parameters, which a sharded optimizer steps; none without one."""
        shards = self._shards
        return [] if shards is None else [piece for each in self.reducer.buckets for piece, _ in shards.pieces_of(each)]

    def wait_for_parameters(self) -> None:
        """Until every parameter is whole; see overlap_param_gather."""
        if self._shards is not None:
            self._shards.wait()

    def check_replicas(self) -> None:
        """See `weft.check_replicas`."""
        self.wait_for_parameters()
        check_replicas(self)

    @property
    def replicas(self) -> Communicator:
        return self.ranks

    def named_parameters(self, *options: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.wait_for_parameters()
        return super().named_parameters(*options, **named)

    # Hooks and uneven inputs.

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """DDP's interface: hook(state, bucket) -> Future of the reduced bucket, which is the hook's to average.

        Raises:
            ValueError: a hook is there already, or an option that the hook would have to know.
        """
        transport = self.reducer.transport
        if isinstance(transport, ByHook):
            raise ValueError("register_comm_hook: a hook is registered already; there can be one")
        if transport.scatter or transport.wire_dtype is not None:
            raise ValueError("register_comm_hook goes with shard_optimizer=False and wire_dtype=None: the hook decides")
        self.reducer.transport = ByHook(self.ranks, None, True, False, state, hook)

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """For ranks with different numbers of inputs, as DDP's:

            with model.join():
                for batch in batches: ...

        A rank that has run out of inputs takes part with gradients of zero until all have; then all have the parameters
        of the last. divide_by_initial_world_size=False averages over the ranks that have inputs left.
        """
        if self._shards is not None:
            raise ValueError("join() goes with shard_optimizer=False: a rank without inputs would not step its part")
        self._divides_by_all = divide_by_initial_world_size
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **options: Any) -> Shadow:
        return Shadow(self, options.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def join_process_group(self):
        return self.ranks.group

    def share_buffers(self, root: int | None) -> None:
        """Every rank's buffers become the root's; None leaves them."""
        if root is not None:
            broadcast(self.buffers(), self.ranks, root)

    def adopt(self, root: int) -> None:
        """Parameters and buffers become the root's."""
        broadcast([*self.parameters(), *self.buffers()], self.ranks, root)

    def __deepcopy__(self, memo):
        raise TypeError("a DataParallel cannot be copied, since its gradients have their place: copy model.module")

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a DataParallel cannot be pickled, since it is these ranks': save model.module, or a state_dict"
        )


def _tensors_in(output) -> list[torch.Tensor]:
    """The tensors that a module returned: in lists, dicts, dataclasses and what else torch takes for a tree."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _tensors_in([getattr(leaf, one.name) for one in dataclasses.fields(leaf)])
    return found
