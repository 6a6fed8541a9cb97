"""The cut of a batch into micro-batches, for a model that is called with any arguments."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_IGNORED = -100  # the label that a cross entropy does not count
# Patches of all images one after another, and the size of each image in patches, [images, 3] (transformers).
_PACKED = (
    *(("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")),
    *(("pixel_values", "grid_thw"), ("hidden_states", "grid_thw")),  # the images' model alone
)


def microbatches_of(call: tuple[tuple, dict], targets: Any, microbatches: int) -> Iterator[tuple[tuple, dict]]:
    """Yield the arguments of each micro-batch.

    Tensors are cut along the first dimension, which is the batch; numbers, flags and tensors without a dimension go to
    every micro-batch as they are. Patches of images are cut between images, one image an example.

    Args:
        call: arguments by place and by name.
        targets: a tensor [batch, ...], or None.

    Raises:
        ValueError: a tensor has another first dimension, or the batch cannot be cut into equal parts.
    """
    leaves, structure = tree_flatten(call)
    patches = _patches_of_images(call[1])
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0 and id(x) not in patches]
    if not tensors:
        raise ValueError("Pipeline: a batch needs a tensor [batch, ...] among its inputs")
    batch = tensors[0].size(0)
    named = [*call[0], *call[1].items(), ("targets", targets)]
    for name, x in (item if isinstance(item, tuple) else ("an input", item) for item in named):
        if id(x) in patches and len(patches[id(x)]) == batch:
            continue
        if isinstance(x, torch.Tensor) and x.dim() > 0 and x.size(0) != batch:
            raise ValueError(
                f"Pipeline: {name} is {tuple(x.shape)}, and the batch is {batch}, the first dimension of the first "
                "input: every tensor must have the batch as its first dimension (or none)"
            )
    if batch == 0 or batch % microbatches:
        fitting = [m for m in range(1, batch + 1) if batch % m == 0]
        raise ValueError(
            f"Pipeline: a batch of {batch} cannot be cut into {microbatches} equal micro-batches. "
            f"Pad or drop to a multiple of {microbatches}, or choose microbatches from {fitting}"
        )

    def part(x: Any, number: int) -> Any:
        if id(x) in patches:
            of_part = [sum(images.tolist()) for images in patches[id(x)].chunk(microbatches)]
            return x.split(of_part)[number].contiguous()
        whole = not isinstance(x, torch.Tensor) or x.dim() == 0
        return x if whole else x.chunk(microbatches)[number].contiguous()

    for number in range(microbatches):
        yield tree_unflatten([part(x, number) for x in leaves], structure)


def _patches_of_images(named: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return the number of patches of each image, by the id of the tensor that holds the patches of all."""
    found = {}
    for name, grid in _PACKED:
        x, sizes = named.get(name), named.get(grid)
        if isinstance(x, torch.Tensor) and isinstance(sizes, torch.Tensor) and x.size(0) == sizes.prod(-1).sum():
            found[id(x)] = sizes.prod(-1)
    return found


def check_means(named: Mapping[str, Any], microbatches: int) -> None:
    """Raise ValueError if the mean of micro-batches' losses is not the batch's mean loss.

    A model's own loss is a mean over the labels that count. Their number must be the same in every micro-batch, with
    and without the first one of each sequence, which a causal model does not predict.
    """
    if named.get("num_items_in_batch") is not None:
        raise ValueError(
            "Pipeline: num_items_in_batch divides the losses by a count of the whole batch, so that they add up: use "
            'Pipeline(reduction="sum")'
        )
    for name, labels in named.items():
        if "label" not in name or not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            continue
        for counted in [labels] if labels.dim() < 2 else [labels, labels[:, 1:]]:
            counts = [int((part != _IGNORED).sum()) for part in counted.chunk(microbatches)]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"Pipeline: the micro-batches have {counts} {name} that count, and the mean of their mean losses "
                    'is not the batch\'s mean loss. Use Pipeline(reduction="sum") and give the model the number of '
                    "labels that count in the whole batch (transformers: num_items_in_batch=(labels[:, 1:] != "
                    "-100).sum()), or a loss of your own that is divided by it"
                )
