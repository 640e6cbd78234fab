"""How long a step of the decode engine takes, by what it holds.

The linear models of Threshold-Based Exclusive Batching (arXiv 2606.00516): prefill, decode and
mixed steps, each a fixed cost and a cost a token. Two things differ from the paper. The cost of a
decode row grows with its context, since one slope fitted at one context overestimates throughput
at others. And the mixed model is fitted to step times: one fitted to inverse throughput holds the
fixed cost already, and the choice of phase would subtract it a second time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Coefficients of the three step models; seconds, and seconds a token or row.

    Attributes:
      alpha_p, beta_p: a prefill step: fixed, and a prompt token.
      alpha_d, b0, b1: a decode step: fixed, a row, and a row and token of its context.
      alpha_m: a mixed step: fixed.
      beta_m_decode, beta_m_prefill: a decode row (without its context, which costs ``b1``), and
        a prompt token of a mixed step.
      curvature: the paper's c in beta_MB^e(r) = a + b r + c r^2, where r is the share of decode
        rows among the step's tokens; a is ``beta_m_prefill`` and b is the other slope minus a.
      error: largest relative error of the fit over its measurements.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    b0: float
    b1: float = 0.0
    alpha_m: float
    beta_m_decode: float
    beta_m_prefill: float
    curvature: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number from 0 up, not {value!r}")

    def beta_d(self, context: float) -> float:
        """Seconds of a decode row whose KV holds ``context`` tokens."""
        return self.b0 + self.b1 * context

    def beta_m(self, decode_share: float, context: float) -> float:
        """beta_MB^e(r): seconds a token of mixed steps with a share of decode rows, in [0, 1]."""
        slope = self.beta_m_decode + self.b1 * context - self.beta_m_prefill
        return self.beta_m_prefill + slope * decode_share + self.curvature * decode_share**2

    def prefill_seconds(self, tokens: float) -> float:
        return self.alpha_p + self.beta_p * tokens

    def decode_seconds(self, rows: float, context: float) -> float:
        return self.alpha_d + self.beta_d(context) * rows

    def mixed_seconds(self, decode_rows: float, prefill_tokens: float, context: float) -> float:
        tokens = decode_rows + prefill_tokens
        return self.alpha_m + self.beta_m(decode_rows / tokens, context) * tokens

    def step_seconds(self, decode_rows: int, prefill_tokens: int, context: float) -> float:
        """Predicted seconds of a step by the model of its kind; 0 for an empty one.

        Args:
          decode_rows: sequences decoding one token each.
          prefill_tokens: prompt tokens.
          context: mean tokens of the decoding sequences.
        """
        if decode_rows and prefill_tokens:
            return self.mixed_seconds(decode_rows, prefill_tokens, context)
        if decode_rows:
            return self.decode_seconds(decode_rows, context)
        return self.prefill_seconds(prefill_tokens) if prefill_tokens else 0.0

    def to_dict(self) -> dict[str, float]:
        """As a plain dict, for a profile."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> StepCosts:
        """Raises ValueError, with the key named, if one is missing, unknown or no cost."""
        if not isinstance(content, Mapping):
            raise ValueError(f"step costs must be a mapping, not {type(content).__name__}")
        fields = dataclasses.fields(cls)
        for key in content:
            if key not in {field.name for field in fields}:
                raise ValueError(f"step costs have no key {key!r}")
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in content:
                raise ValueError(f"step costs lack the key {field.name!r}")
        return cls(**content)


# Of a device nobody has measured. Mixing saves a fixed cost a step and nothing else, so that EB+
# stays with mixed batching; the magnitudes are those of a small model on a few CPU cores.
CAUTIOUS = StepCosts(
    alpha_p=10e-3,
    beta_p=0.8e-3,
    alpha_d=20e-3,
    b0=1.0e-3,
    alpha_m=20e-3,
    beta_m_decode=1.0e-3,
    beta_m_prefill=0.8e-3,
)


def fit_prefill(tokens: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(alpha_p, beta_p) from the tokens and seconds of prefill steps.

    Like the other fits: least squares of relative residuals; a coefficient that comes out
    negative is zero, and the others are fitted again.

    Raises:
      ValueError: fewer measurements than coefficients, lengths that differ, or a time that is not
        positive.
    """
    alpha, beta = _fit([np.ones(len(tokens)), tokens], seconds)
    return alpha, beta


def fit_decode(
    rows: Sequence[float], context: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """(alpha_d, b0, b1) from rows, mean context and seconds of decode steps.

    All at one context tell nothing about its slope: then ``b1`` is 0. Raises as ``fit_prefill``.
    """
    active = np.asarray(rows, dtype=np.float64)
    if len(set(context)) < 2:
        alpha, slope = _fit([np.ones(len(active)), active], seconds)
        return alpha, slope, 0.0
    read = active * np.asarray(context, dtype=np.float64)
    alpha, b0, b1 = _fit([np.ones(len(active)), active, read], seconds)
    return alpha, b0, b1


def fit_mixed(
    decode_rows: Sequence[float],
    prefill_tokens: Sequence[float],
    context: Sequence[float],
    seconds: Sequence[float],
    *,
    b1: float,
) -> tuple[float, float, float]:
    """(alpha_m, beta_m_decode, beta_m_prefill) from the times of mixed steps.

    What reading the context costs, ``b1`` of the decode fit, is taken off first. Raises as
    ``fit_prefill``, and where that leaves nothing of a step's time.
    """
    rows = np.asarray(decode_rows, dtype=np.float64)
    rest = np.asarray(seconds, dtype=np.float64) - b1 * rows * np.asarray(context)
    alpha, decode, prefill = _fit([np.ones(len(rows)), rows, prefill_tokens], rest)
    return alpha, decode, prefill


def fit(
    prefill: Sequence[tuple[float, float]],
    decode: Sequence[tuple[float, float, float]],
    mixed: Sequence[tuple[float, float, float, float]],
) -> StepCosts:
    """All three models from measured steps. Raises as ``fit_prefill``.

    Args:
      prefill: (prompt tokens, seconds) of each step.
      decode: (rows, mean context, seconds).
      mixed: (decode rows, prompt tokens, mean context, seconds).
    """
    alpha_p, beta_p = fit_prefill([x[0] for x in prefill], [x[1] for x in prefill])
    alpha_d, b0, b1 = fit_decode(*([x[i] for x in decode] for i in range(3)))
    alpha_m, beta_m_decode, beta_m_prefill = fit_mixed(
        *([x[i] for x in mixed] for i in range(4)), b1=b1
    )
    costs = StepCosts(
        alpha_p=alpha_p,
        beta_p=beta_p,
        alpha_d=alpha_d,
        b0=b0,
        b1=b1,
        alpha_m=alpha_m,
        beta_m_decode=beta_m_decode,
        beta_m_prefill=beta_m_prefill,
    )
    errors = [abs(costs.prefill_seconds(n) / s - 1) for n, s in prefill]
    errors += [abs(costs.decode_seconds(n, c) / s - 1) for n, c, s in decode]
    errors += [abs(costs.mixed_seconds(d, p, c) / s - 1) for d, p, c, s in mixed]
    return dataclasses.replace(costs, error=max(errors))


def _fit(columns: Sequence[Any], seconds: Sequence[float] | np.ndarray) -> list[float]:
    target = np.asarray(seconds, dtype=np.float64)
    if any(len(column) != len(target) for column in columns):
        raise ValueError("measurements of a step must have equal lengths")
    if len(target) < len(columns):
        raise ValueError(f"{len(columns)} coefficients need as many measurements or more")
    if not (np.isfinite(target).all() and (target > 0).all()):
        raise ValueError("step times must be positive")
    design = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    weighted, ones = design / target[:, None], np.ones(len(target))
    scale = np.maximum(np.linalg.norm(weighted, axis=0), np.finfo(np.float64).tiny)
    kept = list(range(len(columns)))
    solution = np.zeros(len(columns))
    while kept:
        found, *_ = np.linalg.lstsq((weighted / scale)[:, kept], ones, rcond=None)
        if found.min() >= 0:
            solution[kept] = found
            break
        kept.pop(int(found.argmin()))
    return [float(x) for x in solution / scale]
