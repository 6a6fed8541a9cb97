"""What weft knows of a tensor or a module, in one attribute of it. Copying a module takes it along."""

from typing import Any

_ATTRIBUTE = "_weft"
KEYS = {
    # of a tensor
    "shard": "Shard: where a parameter or buffer stands in the whole one",
    "owners": "Owners: the ranks of a pipeline that hold a parameter",
    "piece": "Piece: of which parameter a sharded optimizer's parameter is a piece",
    "watched": "True: gradients of this parameter become ShardedGradients",
    "summed_over": "Communicator: the ranks over which the gradient of a whole parameter is summed",
    "part": "(dimension, every rank's size, the ranks): of what a module returned, where ranks have parts of it",
    "constant": "True: an argument that gets no gradient",
    # of a module
    "mesh": "dimension to size: of a model that parallelize put on a mesh",
    "plan": "AutomaticPlan: by which it was split",
    "sharing": "Sharing: of a module that runs in stages a model which shares its sequence",
    "numbers": "attribute to every rank's number: of a module that counts this rank's features",
    "summed": "True: the gradients of a module's parameters are summed over the ranks",
    "sequence_notes": "kind to text: what a module did with its part of the sequence",
}


def metadata(x: object, key: str) -> Any:
    """What is known of x under one of KEYS; None where nothing is."""
    return vars(x).get(_ATTRIBUTE, {}).get(key)


def set_metadata(x: object, key: str, value: object) -> None:
    """A shallow copy of x keeps what it had."""
    if key not in KEYS:
        raise KeyError(key)
    vars(x)[_ATTRIBUTE] = {**vars(x).get(_ATTRIBUTE, {}), key: value}
