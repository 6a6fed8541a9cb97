"""Metadata of a tensor or a module, in one attribute. A copy of a module keeps it."""

from typing import Any

ATTRIBUTE = "_weft"
KEYS = {
    # of a tensor
    "shard": "Shard: the place of a parameter or buffer in the whole one",
    "owners": "Owners: the ranks of a pipeline that hold a parameter",
    "piece": "Piece: the place of a sharded optimizer's parameter in the model's parameter",
    "place": "GradientPlace: of its gradients; kept until other metadata is set",
    "watched": "True: gradients of this parameter get their place",
    "summed_over": "Communicator: the ranks over which the gradient of a whole parameter is summed",
    "replaced_by": "str: the call that has put other parameters in the place of this one",
    "averaged": "True: the gradient of an expert's parameter is divided by the ranks of dp",
    "part": "(dimension, every rank's size, the ranks): of a module's output that is split over ranks",
    "invariant": "int: a parameter of a model with the same bits on any number of ranks, in that many units",
    "constant": "True: an argument that gets no gradient",
    "quantized": "(reason to keep it whole, columns with one scale): of a quantised weight's copy without values",
    # of a mesh
    "experts": "(mesh with ep, the group of ep and tp): of a mesh whose ranks of dp also hold experts",
    # of a module
    "name": "str: in the model, for random numbers that follow from it (rng.py)",
    "mesh": "dimension to size: of a model that parallelize put on a mesh",
    "plan": "AutomaticPlan: the plan that split it",
    "sharing": "Sharing: of a module that runs a sequence-sharing model in stages",
    "numbers": "attribute to every rank's number: of a module that counts this rank's features",
    "summed": "True: the gradients of a module's parameters are summed over the ranks",
    "sequence_notes": "kind to text: how a module handled its part of the sequence",
}


def metadata(x: object, key: str) -> Any:
    """Return the metadata of x under one of KEYS; None if there is none."""
    return getattr(x, ATTRIBUTE, {}).get(key)  # Dynamo cannot follow vars() of a tensor


def set_metadata(x: object, key: str, value: object) -> None:
    """Set metadata of x under one of KEYS. Shallow copies of x made before keep the old metadata."""
    if key not in KEYS:
        raise KeyError(key)
    kept = {name: known for name, known in vars(x).get(ATTRIBUTE, {}).items() if name != "place"}
    vars(x)[ATTRIBUTE] = {**kept, key: value}
