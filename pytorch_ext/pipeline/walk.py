"""One run of a call through all stages, one after another, which finds the values that cross."""

from collections.abc import Callable
from typing import Any

import torch

from weft._C import CommError
from weft.pipeline.absent import AbsentValueError, origins_in
from weft.pipeline.forward_cut import ForwardCut
from weft.pipeline.forward_plan import ForwardPlan, LayerResult, Root
from weft.pipeline.stage_forward import StageTrial
from weft.pipeline.transfers import AllHere, Transfers


def walk(
    cut: ForwardCut,
    trial: Callable[[StageTrial], Any],
    transfers: Transfers | AllHere,
    kind: Callable[..., StageTrial] = StageTrial,
) -> tuple[ForwardPlan, Any]:
    """Run a call through all stages, and note what each needs. A collective call.

    A stage that needs a value asks for it, gets it from a rank that has it, and begins again.

    Args:
        trial: runs the forward of a stage of this rank, and returns the output.
        transfers: sends values between the ranks of the stages.
        kind: makes a trial.

    Returns:
        The plan, and the output on the rank of the last stage.

    Raises:
        ValueError: the forward calls other layers than when it was cut, or cannot be cut; on every rank.
    """
    plan, values, output = ForwardPlan(), dict[Root, torch.Tensor](), None  # values: that this rank has
    holders = dict[Root, int]()  # the last stage that has a value, so that gradients add up as in the plain model
    stage, cut.draws = 0, True
    while True:
        at, asked = cut.rank_of(stage), set[Root]()
        known, ran = dict[Root, torch.Tensor](), dict[int, LayerResult]()
        while True:
            found: Any = None
            if transfers.here(at):
                run = kind(cut, stage, plan, known, ran)
                found, output = _tried(run, trial)
                known |= run.made
            found = transfers.announced(found, at)
            if isinstance(found, ForwardPlan):
                break
            for root in found:
                source = cut.rank_of(holders.get(root, plan.maker_of(root)))
                value = transfers.moved(values.get(root), plan.made(root), source, at, cut.shared)
                if value is not None:
                    known[root] = value
                holders[root] = stage
            asked |= set(found)
        cut.names, cut.stages = found.names, found.stages
        plan.add(found, asked)
        values |= known
        if plan.whole:
            return plan, output
        stage += 1


def _tried(run: StageTrial, trial: Callable) -> tuple[ForwardPlan | list[Root] | Exception, Any]:
    """Return what a trial of a stage has found, the values of other stages that it needs, or its error."""
    try:
        output = trial(run)
        if missing := origins_in(output):
            raise AbsentValueError(missing, "the output needs values of another stage")
        return run.found(), output
    except AbsentValueError as error:
        asked = {origin for origin in error.origins if isinstance(origin, tuple)}
        names = [origin for origin in error.origins if not isinstance(origin, tuple)]
        others = [name for name in names if not run.gives(name)]
        if not others and (names or asked - run.known.keys()):
            return sorted(asked - run.known.keys()), None
        why = f"{others[0]} is used outside of its layer, which another stage has" if others else str(error)
        uncut = ValueError(
            f"{run.cut.caller}: the forward of {type(run.cut.model).__name__} cannot be cut here: {why}. "
            f"{run.cut.way_out}"
        )
        return uncut, None
    except CommError:  # the other ranks have it already, or cannot be reached
        raise
    except Exception as error:
        return error, None
