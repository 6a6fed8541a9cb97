"""Changes to a Trainer for a model with sharded parameters."""

from functools import partial
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from weft.checkpoint.full_state import full_state_dict
from weft.tensor_parallel.peft_wrappers import without_peft


class SavedByAll(TrainingArguments):
    """Arguments that let every rank call save_pretrained when Trainer saves a model."""

    @property
    def should_save(self) -> bool:
        return True


class SplitModel(TrainerCallback):
    """Callback that makes save_pretrained write the whole model."""

    def on_init_end(self, args, state, control, model: Any = None, **_):
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"weft.adapters.trainer: {type(model).__name__} has no save_pretrained, and Trainer.save_model would "
                "write a rank's shards: derive the model from transformers.PreTrainedModel, or write a loop of your own"
            )
        has_adapters = without_peft(model) is not model
        if not has_adapters:  # adapters/peft.py saves those
            model.save_pretrained = partial(save_whole, model)

    on_train_begin = on_init_end  # a model_init makes another model


def save_whole(model: PreTrainedModel, folder: str, state_dict=None, is_main_process: bool = True, **options) -> None:
    """Write the unsplit model with the model's own save_pretrained, from the first rank. A collective call.

    Args:
        model: the split model, on every rank.
        folder: the folder to write.
        state_dict, is_main_process: ignored; the whole model's values and the first rank take their place.
        options: further options of save_pretrained.
    """
    whole = full_state_dict(model)
    type(model).save_pretrained(model, folder, state_dict=whole, is_main_process=dist.get_rank() == 0, **options)
    dist.barrier()
