"""Checkpoints that load on any other mesh, and weights from safetensors files into a model that is split."""

from weft.checkpoint.checkpoint import CheckpointError, export_safetensors, load_checkpoint, save_checkpoint
from weft.checkpoint.full_state import full_state_dict
from weft.checkpoint.pretrained_files import load_safetensors
from weft.checkpoint.state_hash import state_hash

__all__ = [
    "CheckpointError",
    "export_safetensors",
    "full_state_dict",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "state_hash",
]
