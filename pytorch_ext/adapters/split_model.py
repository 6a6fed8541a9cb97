"""What a Trainer must do otherwise where its model's parameters are shards."""

from transformers import TrainerCallback, TrainingArguments

from weft.gradient_norm import clip_grad_norm_


class SavedByAll(TrainingArguments):
    """Arguments by which every rank comes to where Trainer saves a model, and is refused there like the first."""

    @property
    def should_save(self) -> bool:
        return True


class SplitModel(TrainerCallback):
    """Clips and logs the norm of the whole model's gradients; refuses save_pretrained, which would write shards."""

    def __init__(self, max_grad_norm: float):
        self.max_norm = max_grad_norm if max_grad_norm > 0 else float("inf")
        self.norm: float | None = None

    def on_init_end(self, args, state, control, model=None, **_):
        model.save_pretrained = refuse_to_save

    on_train_begin = on_init_end  # a model_init makes another model

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.norm = clip_grad_norm_(model, self.max_norm).item()

    def on_log(self, args, state, control, logs=None, **_):
        for told in (logs, state.log_history[-1]):
            if "grad_norm" in told:
                told["grad_norm"] = self.norm


def refuse_to_save(*_, **__):
    raise ValueError(
        "save_pretrained would write this rank's shards as if they were the model: call weft.save_checkpoint, and "
        "weft.export_safetensors makes one file of whole tensors of that"
    )
