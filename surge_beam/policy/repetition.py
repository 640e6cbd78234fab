"""Finds out that a completion has run into a loop."""

from __future__ import annotations

from collections.abc import Sequence


def loop_period(
    ids: Sequence[int], *, max_period: int = 64, min_tokens: int = 256, min_repeats: int = 8
) -> int | None:
    """Length of the shortest cycle that the end of ``ids`` repeats, or None.

    It counts only if it fills the last ``min_tokens`` tokens and the last ``min_repeats`` cycles;
    a longer period than ``max_period`` is not looked for. Looks at the last
    max(min_tokens, min_repeats * max_period) tokens only, so the cost does not grow with ``ids``.
    """
    tail = list(ids[-max(min_tokens, min_repeats * max_period) :])
    for period in range(1, min(max_period, len(tail) - 1) + 1):
        span = max(min_tokens, min_repeats * period)
        if span > len(tail):
            return None
        if tail[-1] == tail[-1 - period] and tail[-span:-period] == tail[period - span :]:
            return period
    return None
