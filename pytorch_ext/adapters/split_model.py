"""The mark of a Trainer whose model several ranks hold together."""

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainerCallback

from weft.checkpoint.pretrained_files import save_pretrained
from weft.comm.communicator import Communicator
from weft.comm.registry import communicator
from weft.data_parallel.data_parallel import DataParallel
from weft.pipeline import Pipeline
from weft.sharding.shard import shard_of
from weft.tensor_parallel.peft_wrappers import without_peft


class SplitModel(TrainerCallback):
    """Callback that marks a Trainer, and makes the model's save_pretrained write the whole model.

    Attributes:
        replicas: the ranks that share a batch; None if all ranks compute with all rows.
        pipeline: runs the model's stages; None if each rank runs all layers.
        reducing: reduces the model's gradients over the replicas, from the start of the training on.
    """

    def __init__(self, mesh: DeviceMesh, pipeline: Pipeline | None = None):
        self.pipeline = pipeline
        self.reducing: DataParallel | None = None
        shared = "dp" in (mesh.mesh_dim_names or ()) and mesh["dp"].size() > 1
        self.replicas: Communicator | None = communicator(mesh["dp"]) if shared else None

    def on_init_end(self, args, state, control, model: Any = None, **_):
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"weft.adapters.trainer: {type(model).__name__} has no save_pretrained, and Trainer.save_model would "
                "write a rank's shards: derive the model from transformers.PreTrainedModel, or write a loop of your "
                'own. On a mesh with dp, give Trainer weft.parallelize(model, mesh["cp", "tp"]), not wrapped, or one '
                "with zero=3"
            )
        if not has_adapters(model):  # adapters/peft.py saves those
            held = model if self.pipeline is None else self.pipeline
            model.save_pretrained = partial(save_pretrained, model, held)
        elif self.pipeline is not None:
            raise ValueError(
                "weft.adapters.trainer: the files of adapters in stages are not written; use a mesh without pp"
            )

    def on_train_begin(self, args, state, control, model: Any = None, **more):
        self.on_init_end(args, state, control, model, **more)  # a model_init makes another model
        inner: Any = without_peft(model)
        fused = "fused_lm_head" in getattr(getattr(inner.forward, "__code__", None), "co_varnames", ())
        if fused and shard_of(inner.get_output_embeddings().weight) is not None:
            raise ValueError(
                "weft.adapters.trainer: TRL's fused head multiplies by the head's own weight, and each rank has a part "
                "of it: leave the head (lm_head, and a tied embedding) out of the plan, as docs/adapters.md shows"
            )


def mark_of(trainer: Trainer) -> SplitModel | None:
    """Return the callback that marks the Trainer; None for any other Trainer."""
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, SplitModel)), None)


def has_adapters(model: Any) -> bool:
    """Return whether the model is a PeftModel."""
    return without_peft(model) is not model
