"""Attention over the paged KV pool in torch: what a plan reads once is one matrix product.

Every part of a row's keys gives the softmax over that part and the natural logarithm of its
normaliser (log-sum-exp), both float32; parts are merged by these (Hydragen, arXiv 2402.05099,
section 3.2; FlashInfer, arXiv 2501.01005, section 2.2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.attention_plan import AttentionPlan, Ints, ranges

# Keys that a lone query takes as one part, rounded up to pages. A constant, so that the order of
# its sums depends on the row's own length only.
SPLIT_TOKENS = 64
# Limits what a block of operations holds at once, so that it stays in a cache: numbers of K, and
# of scores.
MAX_GATHERED = 1 << 19
MAX_SCORES = 1 << 19
# Query rows of a prefill that go through one call: it computes the part above the diagonal too.
PREFILL_ROWS = 256


def merge_parts(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """Merges softmax results over disjoint sets of keys into the one over their union.

    Args:
      outputs: [rows, parts, dim] float32, finite.
      log_sums: [rows, parts] float32, the log-sum-exp of each part's scaled scores; -inf where a
        part is empty. A row whose parts are all empty gives their mean.

    Returns:
      [rows, dim] float32.
    """
    weights = torch.softmax(log_sums.clamp(min=torch.finfo(log_sums.dtype).min), dim=1)
    return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where to read keys and values of shape [batch, keys, head_dim].

    Without ``index`` the slots ``[start, stop)`` of every head are read in place. Otherwise
    ``index`` names pages, head after head, that are gathered, and ``[start, stop)`` is cut from
    each batch entry. ``unused`` are gathered slots that hold no key and may hold anything.
    """

    batch: int
    start: int
    stop: int
    page_size: int
    index: Tensor | None = None
    unused: Tensor | None = None

    def read(self, pool: Tensor, scratch: Tensor) -> Tensor:
        """Uses scratch [slots, head_dim] where it gathers."""
        if self.index is None:
            return pool[:, self.start : self.stop]
        width = self.page_size * pool.shape[2]
        gathered = scratch[: len(self.index) * self.page_size]
        torch.index_select(pool.view(-1, width), 0, self.index, out=gathered.view(-1, width))
        if self.unused is not None:
            gathered.index_fill_(0, self.unused, 0.0)
        return gathered.view(self.batch, -1, pool.shape[2])[:, self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class _Product:
    """Parts ``[start, stop)`` from one batched product of queries and keys.

    ``bias`` is added to the scores, [batch or 1, query rows or 1, keys] float32.
    """

    start: int
    stop: int
    bias: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Prefill:
    """Rows ``[start, stop)`` of the packed tokens, all of whose keys are ``[first, last)`` of a
    source; ``bias`` [rows, keys] is added to the scores, and without it they are causal.
    """

    start: int
    stop: int
    first: int
    last: int
    bias: Tensor | None


@dataclasses.dataclass(frozen=True)
class _Merge:
    """Merges parts ``index`` [rows * heads * parts] into ``rows``, None being all in order.

    ``padding`` [rows * heads, parts] is -inf at parts to leave out.
    """

    rows: Tensor | None
    parts: int
    index: Tensor
    padding: Tensor | None


class TorchAttention:
    """Runs a plan on tensors of one shape, layer after layer.

    A part is the work of one query head group of one row over some keys. Parts of a shared item
    come from one product of all its rows with its keys, read in place where its pages lie one
    after another and gathered once otherwise. Lone queries, the decoding rows, take
    ``SPLIT_TOKENS`` keys a part, so that all of them are one batched product, whatever their
    lengths. A prefill whose rows have nothing to merge goes through torch's fused attention.

    Equal calls give bit-equal results. Slots that the plan does not name may hold NaN.
    """

    def __init__(self, plan: AttentionPlan, keys: Tensor, *, heads: int, scale: float) -> None:
        """Prepares index tensors.

        Args:
          plan: of this step and of the layers' window.
          keys: any layer's keys, [kv_heads, slots, head_dim], contiguous; gives the shape, dtype
            and device of all.
          heads: query heads, a multiple of kv_heads; head h reads KV head
            ``h // (heads // kv_heads)``.
          scale: factor of the scores.
        """
        self._kv_heads, self._slots, self._dim = keys.shape
        self._group = heads // self._kv_heads
        self._scale, self._device, self._dtype = scale, keys.device, keys.dtype
        self._plan = plan
        self._new_slots = self._tensor(plan.slots)
        self._products: list[tuple[_Source, list[_Product]]] = []
        self._prefills: list[tuple[_Source, list[_Prefill]]] = []
        # Of every part of KV head 0: its row, its number, and how far the next head's is.
        self._parts: list[tuple[Ints, Ints, int]] = []
        self._query_index: list[Ints] = []
        self._count = 0

        sizes = np.diff(plan.row_offsets)
        items_of_row = np.bincount(plan.rows, minlength=len(plan.positions))
        for i in np.flatnonzero(sizes > 1).tolist():
            rows = plan.rows[plan.row_offsets[i] : plan.row_offsets[i + 1]]
            if items_of_row[rows].max() == 1 and rows[-1] - rows[0] == len(rows) - 1:
                self._add_prefill(i, rows)
            else:
                self._add_shared(i, rows)
        lone = np.flatnonzero(sizes == 1)
        self._add_lone(lone)
        # Decoding rows have many parts and the others few: two tables need less padding than one.
        decoding = np.unique(plan.rows[plan.row_offsets[lone]])
        merged = np.unique(np.concatenate([decoding[:0], *(rows for rows, _, _ in self._parts)]))
        self._merges = [
            self._merge(rows) for rows in (decoding, np.setdiff1d(merged, decoding)) if len(rows)
        ]
        # Memory that every layer uses again: fresh pages cost as much as filling them.
        sources = [source for source, _ in (*self._products, *self._prefills)]
        gathered = max((len(s.index) for s in sources if s.index is not None), default=0)
        self._gathered_keys = keys.new_empty(gathered * plan.page_size, self._dim)
        self._gathered_values = torch.empty_like(self._gathered_keys)
        if self._count:
            scores = [
                (product.stop - product.start) * (source.stop - source.start)
                for source, products in self._products
                for product in products
            ]
            self._scores = keys.new_empty(max(scores), dtype=torch.float32)
            self._queries = self._tensor(np.concatenate(self._query_index))
            self._outputs = keys.new_empty(self._count, self._dim, dtype=torch.float32)
            self._peaks = keys.new_empty(self._count, dtype=torch.float32)
            self._sums = torch.empty_like(self._peaks)

    def run(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Appends a layer's new keys and values to the pool, then attends.

        Args:
          keys, values: the layer's pool, [kv_heads, slots, head_dim], contiguous.
          query: [T, heads, head_dim].
          key, value: [T, kv_heads, head_dim].

        Returns:
          [T, heads * head_dim] in the query's dtype.
        """
        keys.index_copy_(1, self._new_slots, key.transpose(0, 1).to(keys.dtype))
        values.index_copy_(1, self._new_slots, value.transpose(0, 1).to(values.dtype))
        out = torch.empty_like(query, memory_format=torch.contiguous_format).flatten(1)
        for source, prefills in self._prefills:
            k = source.read(keys, self._gathered_keys)
            v = source.read(values, self._gathered_values)
            self._run_prefills(prefills, k, v, query, out)
        if not self._count:
            return out
        self._run_products(keys, values, query)
        log_sums = self._sums.log().add_(self._peaks)
        self._outputs.div_(self._sums.unsqueeze(1))
        for merge in self._merges:
            merged = self._outputs.index_select(0, merge.index).view(-1, merge.parts, self._dim)
            if merge.parts > 1:
                weights = log_sums.index_select(0, merge.index).view(-1, merge.parts)
                if merge.padding is not None:
                    weights.add_(merge.padding)
                merged = merge_parts(merged, weights)
            merged = merged.view(-1, out.shape[1]).to(out.dtype)
            if merge.rows is None:
                return merged
            out.index_copy_(0, merge.rows, merged)
        return out

    def _run_products(self, keys: Tensor, values: Tensor, query: Tensor) -> None:
        """Fills outputs, peaks and sums: of every part the softmax's numerator, the highest score
        and the sum of ``exp(score - highest)``."""
        heads = query.reshape(-1, self._group * self._dim)
        queries = heads.index_select(0, self._queries).float().mul_(self._scale)
        queries = queries.view(-1, self._dim)
        for source, products in self._products:
            k = source.read(keys, self._gathered_keys).float()
            v = source.read(values, self._gathered_values).float()
            for product in products:
                part = slice(product.start, product.stop)
                shape = (source.batch, -1, self._dim)
                q = queries[part].view(shape)
                scores = self._scores[: q.shape[0] * q.shape[1] * k.shape[1]]
                scores = scores.view(*q.shape[:2], k.shape[1])
                if product.bias is None:
                    torch.bmm(q, k.mT, out=scores)
                else:
                    torch.baddbmm(product.bias, q, k.mT, out=scores)
                peaks = self._peaks[part].view(source.batch, -1)
                torch.amax(scores, 2, out=peaks)
                scores.sub_(peaks.unsqueeze(2)).exp_()
                torch.sum(scores, 2, out=self._sums[part].view(source.batch, -1))
                torch.bmm(scores, v, out=self._outputs[part].view(shape))

    def _run_prefills(
        self, prefills: list[_Prefill], k: Tensor, v: Tensor, query: Tensor, out: Tensor
    ) -> None:
        """Writes rows of out."""
        shape = (self._kv_heads, self._group, -1, self._dim)
        for prefill in prefills:
            rows = query[prefill.start : prefill.stop]
            q = rows.view(-1, *shape[:2], self._dim).permute(1, 2, 0, 3)
            part = slice(prefill.first, prefill.last)
            o = F.scaled_dot_product_attention(
                q,
                k[:, None, part].expand(shape),
                v[:, None, part].expand(shape),
                attn_mask=prefill.bias,
                is_causal=prefill.bias is None,
                scale=self._scale,
            )
            out[prefill.start : prefill.stop].view(-1, *shape[:2], self._dim).copy_(
                o.permute(2, 0, 1, 3)
            )

    def _add_prefill(self, item: int, rows: Ints) -> None:
        """An item that is all its rows have: one sequence's new tokens over its own keys."""
        plan = self._plan
        prefills = []
        for start in range(0, len(rows), PREFILL_ROWS):
            part = rows[start : start + PREFILL_ROWS]
            at = plan.positions[part]
            first = int(plan.first_key[item])
            low = first if plan.window is None else max(first, int(at[0]) - plan.window + 1)
            bias = None
            if low < at[0] or (plan.window is not None and len(part) > plan.window):
                bias = self._bias(part, low, int(at[-1]) + 1 - low).to(self._dtype)
            prefills.append(
                _Prefill(
                    int(part[0]), int(part[-1]) + 1, low - first, int(at[-1]) + 1 - first, bias
                )
            )
        self._prefills.append((self._source(item), prefills))

    def _add_shared(self, item: int, rows: Ints) -> None:
        """An item whose rows have others too."""
        plan, count = self._plan, int(self._plan.keys[item])
        products = []
        step = max(1, MAX_SCORES // (self._kv_heads * self._group * count))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            bias = None
            if plan.masked[item]:
                bias = self._bias(part, int(plan.first_key[item]), count)
                bias = bias.repeat_interleave(self._group, 0)[None]
            products.append(self._product(part, bias))
        self._products.append((self._source(item), products))

    def _add_lone(self, items: Ints) -> None:
        """Items of one row each, cut into parts of as many pages each."""
        plan = self._plan
        page_size = plan.page_size
        span = -(-SPLIT_TOKENS // page_size)
        page_counts = np.diff(plan.page_offsets)[items]
        part_counts = -(-page_counts // span)
        item = np.repeat(items, part_counts)
        before = ranges(np.zeros_like(items), part_counts) * span  # pages of the item before a part
        page = before[:, None] + np.arange(span)
        page = np.where(page < np.repeat(page_counts, part_counts)[:, None], page, before[:, None])
        pages = plan.pages[plan.page_offsets[item][:, None] + page]
        key = before[:, None] * page_size + np.arange(span * page_size)
        key -= (plan.first_key % page_size)[item][:, None]
        used = (key >= 0) & (key < plan.keys[item][:, None])

        size = span * page_size
        step = max(1, MAX_GATHERED // (self._kv_heads * size * self._dim))
        for start in range(0, len(item), step):
            part = slice(start, start + step)
            hidden = np.tile(~used[part], (self._kv_heads, 1))
            bias = unused = None
            if hidden.any():
                bias = torch.zeros(*hidden[:, None].shape, device=self._device)
                bias.masked_fill_(self._tensor(hidden)[:, None], -torch.inf)
                unused = self._tensor(np.flatnonzero(hidden))
            index = self._all_heads(pages[part].reshape(-1))
            source = _Source(len(hidden), 0, size, page_size, index, unused)
            rows = plan.rows[plan.row_offsets[item[part]]]
            self._products.append((source, [self._product(rows, bias)]))

    def _product(self, rows: Ints, bias: Tensor | None) -> _Product:
        """Numbers the parts of one product: head after head, row after row, group after group."""
        start, size = self._count, len(rows) * self._group
        self._count += self._kv_heads * size
        self._parts.append((rows, start + np.arange(len(rows)) * self._group, size))
        self._query_index.append(
            (rows * self._kv_heads + np.arange(self._kv_heads)[:, None]).reshape(-1)
        )
        return _Product(start, self._count, bias)

    def _merge(self, rows: Ints) -> _Merge:
        row = np.concatenate([rows for rows, _, _ in self._parts])
        first = np.concatenate([first for _, first, _ in self._parts])
        stride = np.concatenate([np.full(len(rows), size) for rows, _, size in self._parts])
        by_row = np.argsort(row, kind="stable")
        begins = np.searchsorted(row[by_row], rows)
        counts = np.searchsorted(row[by_row], rows, side="right") - begins
        nth = np.arange(counts.max())
        padding = nth >= counts[:, None]
        part = by_row[begins[:, None] + np.where(padding, 0, nth)][:, None, None]
        # Of shape [rows, kv_heads, group, parts].
        index = first[part] + stride[part] * np.arange(self._kv_heads)[:, None, None]
        index = index + np.arange(self._group)[:, None]
        bias = None
        if padding.any():
            padding = np.repeat(padding, self._kv_heads * self._group, axis=0)
            bias = torch.zeros(padding.shape, device=self._device)
            bias.masked_fill_(self._tensor(padding), -torch.inf)
        everything = len(rows) == len(self._plan.positions)
        return _Merge(
            None if everything else self._tensor(rows),
            len(nth),
            self._tensor(index.reshape(-1)),
            bias,
        )

    def _source(self, item: int) -> _Source:
        """An item's keys, of every head."""
        plan, heads = self._plan, self._kv_heads
        pages = plan.pages[plan.page_offsets[item] : plan.page_offsets[item + 1]]
        lead, count = int(plan.first_key[item]) % plan.page_size, int(plan.keys[item])
        if (np.diff(pages) == 1).all():
            start = int(pages[0]) * plan.page_size + lead
            return _Source(heads, start, start + count, plan.page_size)
        return _Source(heads, lead, lead + count, plan.page_size, self._all_heads(pages))

    def _all_heads(self, pages: Ints) -> Tensor:
        """Pages of the pool [kv_heads * pages, page_size, head_dim], head after head."""
        heads = np.arange(self._kv_heads)[:, None] * (self._slots // self._plan.page_size)
        return self._tensor((heads + pages).reshape(-1))

    def _bias(self, rows: Ints, first: int, count: int) -> Tensor:
        """0 where a row sees a key and -inf elsewhere, [rows, count] float32."""
        at = self._tensor(self._plan.positions[rows])[:, None]
        key = torch.arange(first, first + count, device=self._device)
        hidden = key > at
        if self._plan.window is not None:
            hidden |= key <= at - self._plan.window
        return torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, -torch.inf)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
