"""Lightning's "ddp" strategy with weft.DataParallel instead of DistributedDataParallel."""

import importlib
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.distributed as dist

from weft.adapters import need
from weft.data_parallel.data_parallel import DataParallel

# One library under two names, with separate classes: take the name that the script has imported.
_NAMES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
_here = [name for name, package in _NAMES.items() if find_spec(name.partition(".")[0])] or list(_NAMES)
_name = next((name for name in _here if name in sys.modules), _here[0])
need("weft.adapters.lightning", _NAMES[_name], "2.6")
_strategies = importlib.import_module(f"{_name}.strategies")

# Options of Lightning's DDPStrategy.
_OF_STRATEGY = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "timeout", "start_method"),
)


class WeftStrategy(_strategies.DDPStrategy):  # type: ignore[name-defined,misc]
    """Data parallelism by weft.DataParallel, on the weft backend.

        Trainer(accelerator="cpu", devices=2, strategy=WeftStrategy(bucket_mb=10)).fit(module, data)

    It is also registered as strategy="weft".

    Args:
        options: options of weft.DataParallel and of Lightning's DDPStrategy (start_method, timeout,
            cluster_environment, ...). The process group's backend is "weft", or "cpu:weft,cuda:nccl" on GPUs, unless
            process_group_backend is given.

    Raises:
        ValueError: shard_optimizer or main_grad is given. They need an optimizer that Lightning cannot make.
        ImportError: Lightning is older than 2.6.
    """

    def __init__(self, **options):
        for name in ("shard_optimizer", "main_grad"):
            if options.get(name):
                raise ValueError(
                    f"WeftStrategy: {name}=True needs an optimizer made by model.optimizer(...) or steps by main_grad, "
                    "and Lightning makes and steps its own; leave it out, or write the loop around weft.DataParallel"
                )
        super().__init__(**{name: options.pop(name) for name in _OF_STRATEGY if name in options})
        self._options = options

    def _get_process_group_backend(self) -> str:
        on_cpu = self.root_device.type == "cpu"
        return self._process_group_backend or ("weft" if on_cpu else "cpu:weft,cuda:nccl")

    def _setup_model(self, model) -> DataParallel:
        return DataParallel(model, **self._options)

    def _register_ddp_hooks(self) -> None:
        """Do nothing: weft.DataParallel has its own register_comm_hook."""

    def reduce(self, tensor, group=None, reduce_op="mean"):
        """Reduce a tensor; round averages of integers (of logged counts) towards zero, as gloo does."""
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if not mean or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / dist.get_world_size(group))

    @contextmanager
    def block_backward_sync(self):
        """Do not reduce gradients while Lightning accumulates them."""
        if not isinstance(self.model, DataParallel):  # outside of fit
            yield
            return
        with self.model.no_sync():
            yield

    def teardown(self) -> None:
        if isinstance(self.model, DataParallel):  # type: ignore[has-type]
            self.model = self.lightning_module
        super().teardown()


_strategies.StrategyRegistry.register("weft", WeftStrategy, description="weft.DataParallel on the weft backend")
