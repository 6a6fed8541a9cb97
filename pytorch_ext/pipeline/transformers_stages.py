"""Models of transformers in stages: caches are turned off, and what stages cannot do is refused."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def without_caches(models: Sequence) -> Iterator[None]:
    """Turn off the caches of keys and values of these models, which a step has no use for."""
    configurations = [
        part
        for config in {id(model.config): model.config for model in models}.values()
        for part in [config, *vars(config).values()]
        if getattr(part, "use_cache", False) is True
    ]
    try:
        for config in configurations:
            config.use_cache = False
        yield
    finally:
        for config in configurations:
            config.use_cache = True


def refuse_layerdrop(models: Sequence) -> None:
    """Raise ValueError if a training model of transformers skips layers at random: stages have their layers."""
    holders = [part.config for part in models if part.training]
    for holder in [*holders, *(part for root in models[:1] for part in root.modules() if part.training)]:
        for name, value in vars(holder).items():
            if name.endswith("layerdrop") and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"Pipeline: {name}={value} of {type(models[0]).__name__} skips layers at random, and every "
                    f"micro-batch must run the layers of all stages: set {name} to 0"
                )


_RECORDS = ("output_attentions", "output_router_logits")


def refuse_records(models: Sequence, named: Mapping) -> None:
    """Raise ValueError if models of transformers are asked for values that they record inside of layers."""
    for name in _RECORDS if models else ():
        if named.get(name, any(getattr(model.config, name, False) for model in models)):
            raise ValueError(
                f"{type(models[0]).__name__}: {name} asks for what is recorded inside of the layers, and each rank "
                f"would return its own alone: call the model with {name}=False, or on a mesh with pp=1"
            )
