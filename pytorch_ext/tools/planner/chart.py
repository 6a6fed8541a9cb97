"""A picture of plans: memory by part, and time against memory. Needs matplotlib."""

from weft.tools.planner.layout_search import Plan, describe


def plot(plans: list[Plan], path: str) -> None:
    """Draw the plans to a file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'weft[plot]'") from error
    figure = Figure(figsize=(13, 1.5 + 0.45 * max(6, len(plans))), layout="constrained")
    bars, trade = figure.subplots(1, 2, width_ratios=[3, 2])
    names = [f"{describe(plan.layout)}   {number}" for number, plan in enumerate(plans, start=1)]
    left = [0.0] * len(plans)
    for part in plans[0].memory.split():
        sizes = [plan.memory.split()[part] / 2**30 for plan in plans]
        bars.barh(names, sizes, left=left, label=part)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    limit = plans[0].job.hardware.memory_bytes / 2**30
    bars.axvline(limit, color="black", linestyle="--", label="there is")
    bars.invert_yaxis()
    bars.set_xlabel("GiB on the fullest rank")
    figure.legend(loc="outside lower center", ncols=9, fontsize="small")
    trade.scatter(left, [plan.step.seconds for plan in plans])
    for number, (total, plan) in enumerate(zip(left, plans, strict=True), start=1):
        trade.annotate(str(number), (total, plan.step.seconds), textcoords="offset points", xytext=(5, 3))
    trade.set_xlabel("GiB on the fullest rank")
    trade.set_ylabel("seconds a step")
    figure.suptitle(f"{plans[0].job.model.name} on {plans[0].layout.ranks} x {plans[0].job.hardware.name}")
    figure.savefig(path)
