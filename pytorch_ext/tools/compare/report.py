"""The result of a comparison, and its words."""

from dataclasses import dataclass

from weft.tools.compare.rank_recording import PARAMETER
from weft.tools.compare.seen import Key

MOST = 8  # findings: those behind them follow from them


@dataclass(frozen=True)
class Mismatch:
    """A tensor of one rank that is not the reference's.

    Attributes:
        what: the tensor, in words.
        module: the module that it belongs to.
        error: relative difference.
        rounding: relative difference of two runs of the reference that sum in other orders; 0 if nothing is measured.
        symptom: what the difference looks like; "" if it looks like nothing known.
    """

    what: str
    module: str
    step: int
    rank: int
    error: float
    rounding: float
    symptom: str

    def __str__(self) -> str:
        at = f"step {self.step}, rank {self.rank}: {self.what}"
        if not self.rounding:
            return f"{at}: {self.symptom}"
        looks = f": {self.symptom}" if self.symptom else ""
        times = self.error / self.rounding
        return f"{at} differs by {self.error:.1e} ({times:.1e} times what rounding allows){looks}"


@dataclass(frozen=True)
class ComparedRuns:
    """Result of a comparison.

    Attributes:
        findings: in the order of the reference's program; the first is where the runs part.
        compared: number of tensors that were compared.
        unknown: names of modules and parameters of the reference that the other run does not have.
        not_recorded: what ran and cannot be compared.
    """

    findings: tuple[Mismatch, ...]
    compared: int
    unknown: tuple[str, ...]
    not_recorded: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.compared} tensors compared"]
        if self.unknown:
            names = ", ".join(self.unknown[:8]) + (", ..." if len(self.unknown) > 8 else "")
            lines.append(f"not in the run, so not compared: {names}")
        if self.not_recorded:
            lines.append(f"not recorded, so not compared: {', '.join(self.not_recorded)}")
        if self.ok:
            return "\n".join(["the runs agree", *lines])
        first, others = self.findings[0], len(self.findings) - 1
        if others:
            lines.append(f"{others} more differ" + (", at least" if others >= MOST - 1 else ""))
        return "\n".join([f"the runs part in {first.module or 'the model'}", f"  {first}", *lines])


def words_of(key: Key) -> str:
    if key.kind in ("norm", "loss"):
        return f"the {key.kind}"
    if key.kind == "state":
        return f"the optimizer's {key.item} of {key.module}"
    if key.kind in PARAMETER or key.kind == "dropout":
        return f"the {key.kind} of {key.module}"
    of = key.module or "the model"
    which = "" if key.item in (0, "0") else f" {key.item}"
    call = f", call {key.call}" if key.call else ""
    return f"the {key.kind}{which} of {of}{call}"
