"""Whether what one layer of a plan gives is what the next one takes: told by sizes, before anything is changed."""

from collections.abc import Iterator, Mapping

from torch import nn

from weft.nn import ParallelEmbedding, ParallelLinear


def check_meeting(model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
    """Refuses a row layer that no column layer gives its part, and a column layer whose part a whole layer would get.

    Layers belong together by the number of features between them; of several, those in the smallest module around both.

    Raises:
        ValueError: with the layers' names and what to say instead.
    """
    layers = {**dict(model.named_modules()), **replacements}
    linear = {name: layer for name, layer in layers.items() if isinstance(layer, ParallelLinear)}
    columns = {name: one for name, one in linear.items() if one.style == "column" and not one.gather_output}
    rows = {name: one for name, one in linear.items() if one.style == "row" and not one.split_input}
    # Features may also be those of a convolution's channels, which a size does not tell.
    told = all(isinstance(layer, ParallelLinear | ParallelEmbedding) for layer in replacements.values())
    for name in replacements:
        if name in rows and told:
            _check_row(name, rows[name], columns)
        elif name in columns:
            _check_column(name, columns[name], model, rows, replacements)


def _check_row(name: str, row: ParallelLinear, columns: Mapping[str, ParallelLinear]) -> None:
    needed = row.shards["weight"].sizes
    for around in _around(name):
        near = {other: one for other, one in columns.items() if other.startswith(around)}
        if any(one.out_features > row.in_features and one.out_features % row.in_features == 0 for one in near.values()):
            return  # a fused projection, whose pieces sizes do not tell
        giving = {other: one for other, one in near.items() if row.in_features in _outputs(one)}
        if any(one.parts or one.shards["weight"].sizes == needed for one in giving.values()):
            return
        if giving:
            other = next(iter(giving))
            raise ValueError(
                f"parallelize: {name} takes {list(needed)} of its {row.in_features} input features on the ranks, and "
                f"{other} gives {list(giving[other].shards['weight'].sizes)}: give both the same unit"
            )
    raise ValueError(
        f"parallelize: {name} is a row layer, which takes a part of its {row.in_features} input features, and the plan "
        'splits no column layer that gives one: name that too, or say {"style": "row", "split_input": True}'
    )


def _outputs(column: ParallelLinear) -> tuple[int, ...]:
    return (column.out_features, *(column.parts or ()))


def _check_column(
    name: str,
    column: ParallelLinear,
    model: nn.Module,
    rows: Mapping[str, ParallelLinear],
    replacements: Mapping[str, nn.Module],
) -> None:
    sizes = _outputs(column)
    for around in _around(name):
        if any(other.startswith(around) and row.in_features in sizes for other, row in rows.items()):
            return
        for other, layer in model.get_submodule(around.rstrip(".")).named_modules():
            whole = f"{around}{other}"
            takes = type(layer) is nn.Linear and layer.in_features == column.out_features
            if takes and whole not in replacements and whole != name:
                raise ValueError(
                    f"parallelize: {name} gives each rank a part of its {column.out_features} output features, and "
                    f"{whole}, which is whole, takes all of them: make that a row layer, or say "
                    '{"style": "column", "gather_output": True}'
                )


def _around(name: str) -> Iterator[str]:
    """The modules around it, from the innermost, as beginnings of names; "" is the model."""
    components = name.split(".")[:-1]
    for count in range(len(components), -1, -1):
        yield "".join(f"{one}." for one in components[:count])
