"""The SURGE cost model: T = C * tau + N * c (arXiv 2605.01060, Theorem 1).

C encode calls over N texts cost a fixed ``tau`` seconds a call and ``c`` seconds a text. From a
fit of both on the worker's own device follow the smallest SuperBatch that is worth forming and
whether aggregation pays at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds a call (``tau``) and a text (``c``), with the fit's relative error."""

    tau: float
    c: float
    error: float = 0.0

    def seconds(self, calls: float, texts: float) -> float:
        """Predicted seconds of ``calls`` encode calls over ``texts`` texts together."""
        return calls * self.tau + texts * self.c

    @property
    def break_even_rows(self) -> float:
        """n* = tau / c: a partition below it spends more on its call than on its texts."""
        return self.tau / self.c if self.c > 0 else math.inf

    def min_rows(self, *, loss: float = 0.025, floor: int = 1, ceiling: int = 1 << 62) -> int:
        """B_min >= n* / loss: the rows that keep the call overhead under ``loss``."""
        wanted = self.break_even_rows / loss
        return int(max(floor, min(ceiling, math.ceil(min(wanted, 1 << 62)))))

    def aggregation_gain(self, mean_rows: float) -> float:
        """alpha = n* / mean partition rows: the gain of SuperBatches over a call a partition."""
        return self.break_even_rows / mean_rows if mean_rows > 0 else math.inf

    def worth_aggregating(self, mean_rows: float, *, cutoff: float = 0.05) -> bool:
        """The decision rule of section 6: aggregate where alpha reaches ``cutoff``."""
        return self.aggregation_gain(mean_rows) >= cutoff


def fit(calls: Sequence[float], texts: Sequence[float], seconds: Sequence[float]) -> CostModel:
    """Least squares of seconds against (calls, texts), neither cost below zero.

    Residuals are taken relative to each measurement, so that a long one does not drown the rest.

    Args:
      calls: encode calls of each measurement; at least two different ratios to ``texts``.
      texts: texts of each measurement.
      seconds: measured seconds, all positive.

    Raises:
      ValueError: fewer than two measurements, or lengths that differ.
    """
    design = np.array([calls, texts], dtype=np.float64).T
    target = np.array(seconds, dtype=np.float64)
    if len(target) < 2 or len(design) != len(target):
        raise ValueError("a cost model needs two measurements or more, of equal lengths")
    weighted, ones = design / target[:, None], np.ones(len(target))
    solution, *_ = np.linalg.lstsq(weighted, ones, rcond=None)
    for axis in (0, 1):
        if solution[axis] < 0:
            solution = np.zeros(2)
            other = weighted[:, 1 - axis]
            solution[1 - axis] = max(0.0, float(other @ ones / (other @ other)))
            break
    predicted = design @ solution
    error = float(np.max(np.abs(predicted - target) / target))
    return CostModel(tau=float(solution[0]), c=float(solution[1]), error=error)
