"""The next token of each row from its logits.

A row's token depends on its own logits, parameters and uniform number alone, not on which rows
stand beside it: whatever adds numbers up does so within a row, in float64 and in a fixed order.

Order of the steps: repetition penalty (CTRL, arXiv 1909.05858, as in transformers), temperature,
top-k, top-p (nucleus, arXiv 1904.09751) over what top-k left, min-p (arXiv 2407.01082). Equal
logits rank by id, so that top-k keeps exactly k. The token is where the running sum of what is
left first exceeds the uniform number times the whole sum: sums run by rank where a filter is
asked for, by id elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from surge_beam.gpu.randomness import uniforms
from surge_beam.gpu.runner import Sampled, SampleRow
from surge_beam.gpu.transfer import to_device
from surge_beam.records import SamplingParams, TokenLogprob

_BLOCK = 128  # ids summed up together in the running sum over a vocabulary
_WIDTH = 128  # ranks looked at first where a filter is asked for
_WIDEN = 16  # times as many where those do not settle a row

_Array = np.ndarray[Any, np.dtype[Any]]


class Chooser(Protocol):
    """Chooses tokens where the logits are."""

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest logit of each row, float32 [R], and the lowest id that has it, int64 [R]."""

    def draw(
        self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``argmax``; where the temperature, float64 [R], is not 0 and the largest logit is
        finite, the id is that of the uniform number, float64 [R], among all tokens."""


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], chooser: Chooser | None = None
) -> Sampled:
    """Chooses a token a row; ``logits`` is not changed.

    A row whose logits hold a NaN or +inf, or nothing but -inf, is listed as bad and gets token -1
    and no log-probability. Log-probabilities are of the raw logits, before penalty and
    temperature.

    Args:
      logits: float32 [R, V], on any device.
      rows: R of them. One with a repetition penalty needs its history, ids below V.
      chooser: for logits on a GPU, which are then waited for once, unless a row asks for a filter
        or for log-probabilities.
    """
    scores = _penalized(logits, rows)
    hot = [r for r, row in enumerate(rows) if row.params.temperature > 0.0]
    if chooser is None:
        best, token_ids = _likeliest(scores)
    else:
        plain = [r for r in hot if not _filters(rows[r].params, logits.shape[1])]
        best, token_ids = _chosen(chooser, scores, rows, plain)
        hot = sorted(set(hot).difference(plain))
    fine = np.isfinite(best)
    token_ids[~fine] = -1
    drawn = [r for r in hot if fine[r]]
    if drawn:
        token_ids[drawn] = _draw(_take(scores, drawn), best[drawn], [rows[r] for r in drawn])
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    asked = [r for r, row in enumerate(rows) if row.params.logprobs is not None and fine[r]]
    if asked:
        counts = np.array([rows[r].params.logprobs for r in asked])
        found = _logprobs(_take(logits, asked), token_ids[asked], counts)
        for r, logprob in zip(asked, found, strict=True):
            logprobs[r] = logprob
    return Sampled(token_ids, logprobs, np.flatnonzero(~fine).tolist())


def _take(matrix: torch.Tensor, rows: Sequence[int] | _Array) -> torch.Tensor:
    if len(rows) == len(matrix):
        return matrix
    return matrix[to_device(np.array(rows, dtype=np.int64), matrix.device)]


def _filters(params: SamplingParams, vocabulary: int) -> bool:
    """Whether some tokens are left out before one is drawn."""
    return 0 < params.top_k < vocabulary or params.top_p < 1.0 or params.min_p > 0.0


def _penalized(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Positive logits of tokens seen are divided by the penalty, negative ones multiplied."""
    wanted = [r for r, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if not wanted:
        return logits
    histories = []
    for r in wanted:
        history = rows[r].history
        if history is None:
            raise ValueError(f"row {r} has a repetition penalty but no history")
        histories.append(history.astype(np.int64))
    lengths = [len(history) for history in histories]
    row = to_device(np.repeat(wanted, lengths), logits.device)
    token = to_device(np.concatenate(histories), logits.device)
    penalties = np.array([rows[r].params.repetition_penalty for r in wanted], dtype=np.float32)
    penalty = to_device(np.repeat(penalties, lengths), logits.device)
    scores = logits.clone()
    seen = scores[row, token]
    scores[row, token] = torch.where(seen < 0, seen * penalty, seen / penalty)
    return scores


def _likeliest(scores: torch.Tensor) -> tuple[_Array, _Array]:
    """Largest score [R] and the lowest id that has it [R]; NaN counts as largest."""
    if scores.device.type == "cpu":  # numpy's is several times as fast as torch's there
        matrix = scores.numpy()
        ids = matrix.argmax(axis=1).astype(np.int64)
        return matrix[np.arange(len(matrix)), ids], ids
    values, indices = scores.max(dim=1)
    return _fetched(values, indices)


def _chosen(
    chooser: Chooser, scores: torch.Tensor, rows: Sequence[SampleRow], drawn: Sequence[int]
) -> tuple[_Array, _Array]:
    """As ``_likeliest``, but that some rows' ids are drawn among all tokens."""
    if not drawn:
        return _fetched(*chooser.argmax(scores))
    temperature, uniform = np.zeros((2, len(rows)))
    temperature[drawn] = [rows[r].params.temperature for r in drawn]
    uniform[drawn] = uniforms([rows[r].key for r in drawn], [rows[r].position for r in drawn])
    sent = to_device(np.stack([temperature, uniform]), scores.device)
    return _fetched(*chooser.draw(scores, sent[0], sent[1]))


def _fetched(values: torch.Tensor, ids: torch.Tensor) -> tuple[_Array, _Array]:
    """Both in one copy: float64 holds every float32 and every id."""
    both = torch.stack([values.double(), ids.double()]).cpu().numpy()
    return both[0].astype(np.float32), both[1].astype(np.int64)


def _draw(scores: torch.Tensor, best: _Array, rows: Sequence[SampleRow]) -> _Array:
    """Token ids of rows with a temperature; ``best`` is the largest score of each."""
    vocabulary = scores.shape[1]
    params = [row.params for row in rows]
    best = best.astype(np.float64)
    temperature = np.array([p.temperature for p in params])
    top_k = np.array([min(p.top_k or vocabulary, vocabulary) for p in params])
    top_p = np.array([p.top_p for p in params])
    min_p = np.array([p.min_p for p in params])
    uniform = uniforms([row.key for row in rows], [row.position for row in rows])

    ids = np.empty(len(rows), dtype=np.int64)
    total = np.full(len(rows), np.nan)
    filtered = (top_k < vocabulary) | (top_p < 1.0) | (min_p > 0.0)
    summed = np.flatnonzero(~filtered | ((top_k == vocabulary) & (top_p < 1.0)))
    if summed.size:
        weights = _weights(_take(scores, summed), best[summed], temperature[summed])
        edges = weights.sum(dim=2).cpu().numpy().cumsum(axis=1)
        total[summed] = edges[:, -1]
        whole = np.flatnonzero(~filtered[summed])
        ids[summed[whole]] = _draw_by_id(weights, edges, whole, uniform[summed[whole]])

    pending = np.flatnonzero(filtered)
    largest_k = max((k for k in top_k[pending].tolist() if k < vocabulary), default=0)
    width = min(vocabulary, max(_WIDTH, largest_k + 1))
    while pending.size:
        ranked, values, certain = _ranked(_take(scores, pending), width)
        with np.errstate(over="ignore"):  # to -inf, at a temperature near 0
            weights = np.exp((values - best[pending, None]) / temperature[pending, None])
        weights[np.arange(width) >= top_k[pending, None]] = 0.0
        running = weights.cumsum(axis=1)
        before = np.hstack([np.zeros((len(pending), 1)), running[:, :-1]])
        mass = np.where(top_k[pending] < vocabulary, running[:, -1], total[pending])
        kept = (weights > 0.0) & (weights >= min_p[pending, None])
        kept &= (before < (top_p[pending] * mass)[:, None]) | (top_p[pending, None] == 1.0)
        size = kept.sum(axis=1)
        # Beyond the certain ranks stand some of several tokens that are equally likely.
        settled = size <= certain
        target = uniform[pending] * running[np.arange(len(pending)), size - 1]
        rank = (running <= target[:, None]).sum(axis=1)
        ids[pending[settled]] = ranked[np.arange(len(pending)), rank][settled]
        pending = pending[~settled]
        width = min(vocabulary, width * _WIDEN)
    return ids


def _weights(scores: torch.Tensor, best: _Array, temperature: _Array) -> torch.Tensor:
    """exp((score - best) / temperature), float64 [rows, blocks, _BLOCK], zeros at the end."""
    padding = -scores.shape[1] % _BLOCK
    if padding:
        scores = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
    weights = scores.to(torch.float64, copy=True)
    weights.sub_(to_device(best, scores.device)[:, None])
    weights.div_(to_device(temperature, scores.device)[:, None])
    return weights.exp_().view(len(scores), -1, _BLOCK)


def _draw_by_id(weights: torch.Tensor, edges: _Array, rows: _Array, uniform: _Array) -> _Array:
    """Inverse of the running sum: first the block, then the id in it.

    Args:
      weights: [S, blocks, _BLOCK].
      edges: running sum over the blocks, [S, blocks].
      rows: which of the S to draw, [n].
      uniform: numbers in [0, 1), [n].
    """
    edges = edges[rows]
    target = uniform * edges[:, -1]
    block = (edges <= target[:, None]).sum(axis=1)
    index = to_device(np.stack([rows, block]), weights.device)
    inside = weights[index[0], index[1]].cpu().numpy()
    before = np.where(block > 0, edges[np.arange(len(rows)), block - 1], 0.0)
    running = before[:, None] + inside.cumsum(axis=1)
    offset = (running <= target[:, None]).sum(axis=1)
    # The two sums of a block may differ in the last bit: never past its last possible token.
    last = _BLOCK - 1 - (inside[:, ::-1] > 0.0).argmax(axis=1)
    return block * _BLOCK + np.minimum(offset, last)


def _ranked(scores: torch.Tensor, width: int) -> tuple[_Array, _Array, _Array]:
    """The ``width`` largest scores of each row, falling, equal ones by id.

    Returns:
      ids int64 [rows, width]; scores float64 [rows, width]; and how many leading ones are certain
      [rows]: of tokens that tie with the last one, some may be missing.
    """
    top = scores.topk(width, dim=1)
    ids, values = top.indices.cpu().numpy(), top.values.cpu().numpy().astype(np.float64)
    order = np.lexsort((ids, -values))
    ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
    if width == scores.shape[1]:
        return ids, values, np.full(len(ids), width)
    return ids, values, (values > values[:, -1:]).sum(axis=1)


def _logprobs(logits: torch.Tensor, token_ids: _Array, counts: _Array) -> list[TokenLogprob]:
    """Of the chosen tokens [n], and of the ``counts`` [n] likeliest of each row."""
    vocabulary = logits.shape[1]
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logprobs.gather(1, to_device(token_ids, logits.device)[:, None])
    counts = np.minimum(counts, vocabulary)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    if counts.any():
        width = min(vocabulary, int(counts.max()) + 1)
        ranked, _, certain = _ranked(logits, width)
        while (certain < counts).any():
            width = min(vocabulary, width * _WIDEN)
            ranked, _, certain = _ranked(logits, width)
        values = logprobs.gather(1, to_device(ranked, logits.device)).tolist()
        tops = [
            tuple(zip(i[:n], v[:n], strict=True))
            for i, v, n in zip(ranked.tolist(), values, counts.tolist(), strict=True)
        ]
    return [
        TokenLogprob(token, logprob, top)
        for token, (logprob,), top in zip(token_ids.tolist(), chosen.tolist(), tops, strict=True)
    ]
