"""DataParallel, the replacement of torch's DistributedDataParallel. It connects the parts of `weft.data_parallel`."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.comm.communicator import Communicator
from weft.comm.registry import Group, communicator
from weft.data_parallel.batch_units import BatchUnits
from weft.data_parallel.bucket_comm import transport_to
from weft.data_parallel.buckets import Slot, ranks_that_reduce
from weft.data_parallel.comm_hooks import ByHook, Hook
from weft.data_parallel.consensus import mark_of_batch
from weft.data_parallel.grad_norm import mark_invariant
from weft.data_parallel.module_state import OfWrapper, Trained, broadcast_buffers, broadcast_first
from weft.data_parallel.reducer import Reducer
from weft.data_parallel.sharded_optimizer import Shards
from weft.data_parallel.wrap_checks import check_wrap, mark_wrapped
from weft.invariant.unit_outputs import tensors_of
from weft.replicas import check_replicas

_MIB = 1 << 20


class DataParallel(nn.Module):
    """Module on every rank, with gradients averaged over the ranks. Each rank runs its own part of the batch.

        model = weft.DataParallel(model)
        loss(model(inputs), targets).backward()  # gradients are reduced when this returns
        optimizer.step()

    Gradients are views of flat buckets in symmetric memory. A bucket is reduced as soon as backward has filled it. Sums
    are in fp32, in the order of ranks. All ranks get the same bits, for any `bucket_mb` and `overlap`.

    At construction the module's parameters and buffers become rank 0's. Names in `state_dict` start with "module.", as
    DDP's; `model.module.state_dict()` has the module's own. Compile the module inside, not the wrapper. See
    docs/data_parallel.md.

    Args:
        module: the same module on every rank, on one device. The parameters that require gradients are trained. They
            may be frozen and unfrozen later, in the same way on every rank, except with shard_optimizer or main_grad.
        group: ranks that average; None is the default group. Under tensor parallelism, mesh["dp"].
        bucket_mb: MiB of gradients that travel together.
        wire_dtype: type of fp32 gradients on the wire. bfloat16 or float16 halves the traffic: gradients are rounded to
            it, summed in fp32, and the result is rounded to it. None keeps fp32.
        average: divide the sums by the number of ranks.
        shard_optimizer: keep on each rank only the optimizer's state of its part of the parameters (ZeRO stage 1). Make
            the optimizer with `model.optimizer(torch.optim.AdamW, lr=...)`. After backward, `.grad` of the module's
            parameters refers to this rank's pieces; clip with `model.clip_grad_norm_`.
        unused_parameters: "error" raises on every rank, at the end of backward, and names the parameters that got no
            gradient on some rank; "zero" counts such gradients as zeros. If the group serves GPUs alone ("nccl"), only
            that rank raises then; all ranks raise in their next forward and name it.
        main_grad: add gradients up in fp32 `parameter.main_grad` instead of `.grad`. weft.ParallelLinear adds its
            products straight to it, and `model.zero_grad()` zeroes it. With shard_optimizer the optimizer steps fp32
            copies of the parameters with these gradients.
        broadcast_buffers: copy rank 0's buffers to all ranks before each forward in training.
        overlap: reduce buckets during backward; False reduces them after it.
        check_gradients: check this rank's own gradients before they travel, which costs a pass over them.
            `nonfinite_parameters` then names the ranks.
        invariant: a number V of units of the batch, which the number of ranks must divide. The module then runs on one
            unit at a time, and gradients have the same bits on every such number of ranks, one included. `in_units`
            computes a loss in the same way. On CPUs (docs/invariance.md).

    Attributes:
        module: the wrapped module.
        ranks: communicator of `group`.
        reducer: reducer of the gradients; with `invariant` there is none.
        require_backward_grad_sync: the backward of the next forward reduces gradients; `no_sync` sets it to False. The
            name is DDP's.

    Raises:
        ValueError: an option has an invalid value; or, raised on every rank, some rank's module has nothing to train,
            is wrapped already or is on several devices.
        CollectiveMismatchError: ranks wrap different modules or have different options; raised on every rank.

    Examples:
        >>> model = weft.DataParallel(nn.Linear(4, 1, bias=False))
        >>> model(torch.full((2, 4), float(dist.get_rank()))).mean().backward()
        >>> model.module.weight.grad  # the average over the ranks
        tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group = None,
        bucket_mb: float = 25,
        wire_dtype: torch.dtype | None = None,
        average: bool = True,
        shard_optimizer: bool = False,
        unused_parameters: str = "error",
        main_grad: bool = False,
        broadcast_buffers: bool = True,
        overlap: bool = True,
        check_gradients: bool = False,
        invariant: int | None = None,
    ):
        super().__init__()
        options = {
            "bucket_mb": bucket_mb,
            "wire_dtype": wire_dtype,
            "average": average,
            "shard_optimizer": shard_optimizer,
            "unused_parameters": unused_parameters,
            "main_grad": main_grad,
            "broadcast_buffers": broadcast_buffers,
            "invariant": invariant,
        }
        self.ranks = communicator(group)
        device = check_wrap(module, self.ranks, options)
        self.module = module
        self._sync = True
        self._broadcasts = broadcast_buffers
        self._trained = Trained(module)
        mark_wrapped(module, self)
        broadcast_first(module, self.ranks)

        bucket_bytes = max(1, int(bucket_mb * _MIB))
        self._shards = self._batch = None
        self._fixed = shard_optimizer or main_grad  # the layout is known outside the reducer, so it must not change
        if invariant is not None:
            self._batch = BatchUnits(module, self.ranks, invariant, average, unused_parameters, bucket_bytes)
            mark_invariant(module, invariant)
            return
        named = enumerate(module.named_parameters())
        slots = [Slot(number, name, parameter, into_main_grad=main_grad) for number, (name, parameter) in named]
        self.reducer = Reducer(
            slots,
            transport_to(device, self.ranks)(
                self.ranks, wire_dtype, self.ranks.world_size if average else 1, shard_optimizer
            ),
            bucket_bytes=bucket_bytes,
            overlap=overlap,
            unused=unused_parameters,
            check_gradients=check_gradients,
        )
        if self._fixed:  # in the order of gradients if forward uses the parameters in the module's order
            self.reducer.lay_out([slot for slot in reversed(slots) if slot.parameter.requires_grad])
        self._shards = self._sharded() if shard_optimizer else None

    def _sharded(self) -> Shards:
        shards = self.reducer.owner = Shards(self.reducer.buckets)
        hook = self.module.register_load_state_dict_post_hook(OfWrapper(lambda *_: shards.reload()))
        weakref.finalize(self, hook.remove)
        return shards

    # In each step.

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module on this rank's inputs, and prepare the reduction of the gradients of its backward.

        Args:
            *inputs: passed to the module.
            **options: passed to the module.

        Returns:
            Output of the module.

        Raises:
            ValueError: a parameter was added, removed, replaced, converted, or frozen where that is not allowed.
        """
        if self._batch is not None:
            return self.in_units(self.module, *inputs, **options)
        self._prepare(inputs, options)
        output = self.module(*inputs, **options)
        self._begin_at(output)
        return output

    def follow(self) -> None:
        """Reduce gradients also of calls of the module itself, as long as this wrapper lives."""
        prepare, begin_at = weakref.WeakMethod(self._prepare), weakref.WeakMethod(self._begin_at)
        for handle in (
            self.module.register_forward_pre_hook(OfWrapper(lambda _, *call: prepare()(*call)), with_kwargs=True),  # type: ignore[misc]
            self.module.register_forward_hook(OfWrapper(lambda _, inputs, output: begin_at()(output))),  # type: ignore[misc]
        ):
            weakref.finalize(self, handle.remove)

    def _begin_at(self, output: Any) -> None:
        if torch.is_grad_enabled():
            self.reducer.begin_at([x for x in tensors_of(output) if x.grad_fn is not None])

    def _prepare(self, inputs: tuple, options: dict) -> None:
        if not torch.is_grad_enabled():
            return
        if self._trained.check():
            if self._fixed:
                raise ValueError(
                    "DataParallel: parameters were frozen or unfrozen after wrapping, which shard_optimizer and "
                    "main_grad do not allow: freeze first, then wrap"
                )
            self._gradients.watch()
        if self._batch is None:
            self.reducer.check_earlier()  # before any collective call that a rank with an error would not join
            if self.reducer.learns and not torch.compiler.is_compiling():
                self.reducer.batch = mark_of_batch((inputs, options))
        if self._broadcasts and self.module.training and self._sync and self._trained.members.has_buffers():
            broadcast_buffers(self.module, self.ranks)

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._sync = sync
        if self._batch is None:
            self.reducer.set_sync(sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients add up on each rank without a reduction.

        It applies to the backward of each forward inside the context, wherever that backward runs. The next backward of
        a forward outside reduces all gradients.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def in_units(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call a function with each unit of the batch, for a model made with `invariant`. A collective call.

            loss = model.in_units(lambda x, y: F.cross_entropy(model(x), y), x, y)

        The function may call this model. Losses that are computed in it have the same bits on any number of ranks.

        Args:
            function: called with each unit that this rank has, or with several at once where that has the same bits.
            *args: passed to the function. In tensors, also in lists and dicts, the first dimension is this rank's part
                of the batch and is cut; a scalar, or a first dimension of 1, is passed whole.
            **kwargs: as args.

        Returns:
            What the function returns: tensors joined along the first dimension, scalars averaged over all units of all
            ranks, equal numbers and strings as they are, and other objects as a list, one for each call.

        Raises:
            ValueError: the model was made without invariant; the batch is not so many equal units; a tensor has another
                first dimension.
            TypeError: a scalar is not floating point.
        """
        if self._batch is None:
            raise ValueError("in_units: make the model with weft.DataParallel(..., invariant=V)")
        if self._batch.inside:
            return function(*args, **kwargs)
        self._prepare(args, kwargs)
        return self._batch.run(function, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the module's parameters, pieces and `main_grad` included.

        Args:
            set_to_none: set `.grad` to None instead of zeros. A `main_grad` is always zeroed.
        """
        self.module.zero_grad(set_to_none)
        if self._shards is not None:
            self._shards.zero_grad()
        for slot in self.reducer.slots if self._batch is None else ():
            if slot.into_main_grad and slot.view is not None:
                slot.view.zero_()
                slot.reduced = slot.touched = False

    # Norms and checks of gradients, after backward.

    @property
    def _gradients(self) -> Reducer | BatchUnits:
        return self.reducer if self._batch is None else self._batch

    @property
    def grad_norm(self) -> torch.Tensor:
        """Norm of all gradients together, a float64 scalar with the same value on every rank.

        It is measured at the end of backward, and again by `clip_grad_norm_` before it clips. Under tensor parallelism
        each shard counts once, and each whole parameter once in all. For a weft.LayerSplit the gradients of every rank
        count.
        """
        return self._gradients.norm_squared.sqrt().squeeze(0)

    @property
    def found_nonfinite(self) -> torch.Tensor:
        """Float32 [1]: 1.0 if a gradient is infinite or NaN, else 0.0. torch.amp.GradScaler has the same flag."""
        return (~self._gradients.norm_squared.isfinite()).float()

    def nonfinite_parameters(self) -> dict[str, list[int]]:
        """Return the parameters with an infinite or NaN element in their gradient. A collective call.

        Returns:
            {name: ranks}, with the ranks that had such an element in their own gradient before the reduction. The lists
            are empty without check_gradients=True.
        """
        return self._gradients.nonfinite()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most max_norm. A collective call.

        The norm is measured in this call, because a GradScaler may have unscaled the gradients since backward.

        Args:
            max_norm: largest norm of all gradients together.

        Returns:
            The norm before clipping, a float64 scalar with the same value on every rank.
        """
        self._gradients.measure_anew()
        norm = self.grad_norm
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if factor.is_cuda or factor != 1:
            for flat in self._gradients.held():
                flat.mul_(factor)
        return norm

    # The sharded optimizer.

    @property
    def shards_optimizer(self) -> bool:
        """The model was made with shard_optimizer=True."""
        return self._shards is not None

    def optimizer(
        self, kind: type, parameters: Iterable | None = None, *, elementwise: bool | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Return an optimizer that steps this rank's part of the parameters and then gathers all parts.

        It is an instance of `kind`, so schedules, hooks and its state_dict (of this rank's part) work as usual. Every
        parameter is whole after step().

        Args:
            kind: class of torch.optim, or any class with that interface.
            parameters: parameters of the module or groups of them; None is all.
            elementwise: True vouches that a class that is not torch's updates each element by itself.
            **options: options of the class.

        Returns:
            The optimizer over this rank's pieces.

        Raises:
            TypeError: the class needs whole parameters.
            ValueError: the model was made with shard_optimizer=False, or a parameter is not of the module.
        """
        if self._shards is None:
            raise ValueError(
                "model.optimizer() is for shard_optimizer=True; otherwise make the optimizer of model.parameters()"
            )
        return self._shards.optimizer(kind, parameters, elementwise, options)

    def pieces(self) -> list[nn.Parameter]:
        """Return this rank's pieces of the parameters, which a sharded optimizer steps; [] without one."""
        shards = self._shards
        return [] if shards is None else [piece for each in self.reducer.buckets for piece, _ in shards.pieces_of(each)]

    def check_replicas(self) -> None:
        """Check that all ranks have the same parameters and buffers; see `weft.check_replicas`."""
        check_replicas(self)

    @property
    def replicas(self) -> Communicator:
        """Communicator of the ranks that have copies of the module."""
        return self.ranks

    # Hooks.

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce buckets by a communication hook with DDP's interface.

        Args:
            state: passed to the hook.
            hook: hook(state, bucket) returns a Future of the reduced bucket. The hook also averages.

        Raises:
            ValueError: a hook is registered already, or the model has an option that conflicts with a hook.
        """
        if self._batch is not None:
            raise ValueError("register_comm_hook needs invariant=None: a hook adds gradients in its own order")
        transport = self.reducer.transport
        if isinstance(transport, ByHook):
            raise ValueError("register_comm_hook: a hook is registered already, and only one is possible")
        if self._has_experts_apart():
            raise ValueError('register_comm_hook: no hook knows that experts over "ep" are reduced by fewer ranks')
        if transport.scatter or transport.wire_dtype is not None:
            raise ValueError(
                "register_comm_hook needs shard_optimizer=False and wire_dtype=None: the hook decides how "
                "gradients travel"
            )
        self.reducer.transport = ByHook(self.ranks, None, self.ranks.world_size, False, state, hook)

    def _has_experts_apart(self) -> bool:
        return any(ranks_that_reduce(parameter, self.ranks) != self.ranks for parameter in self.module.parameters())

    def __deepcopy__(self, memo):
        raise TypeError(
            "a DataParallel cannot be copied, because its gradients lie in shared buckets: copy model.module"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a DataParallel cannot be pickled, because it belongs to these ranks: save model.module, or a state_dict"
        )
