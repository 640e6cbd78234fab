"""Steps of attention over a pool, and what they should give in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import strategies as st

from surge_beam.gpu.attention import TorchAttention
from surge_beam.gpu.attention_plan import only_rows, plan_attention, share_groups

# Largest error, relative to the largest value.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@dataclasses.dataclass
class Step:
    """A step over a pool whose slots hold NaN where no token is."""

    tables: list[np.ndarray]
    context: list[int]
    counts: list[int]
    page_size: int
    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float

    def plan(self, *, window=None, share=True, node_cost=0, merge_cost=0):
        groups = share_groups(self.tables, self.context, self.page_size) if share else None
        return plan_attention(
            self.tables,
            self.context,
            self.counts,
            self.page_size,
            window=window,
            groups=groups,
            node_cost=node_cost,
            merge_cost=merge_cost,
        )

    def run(
        self,
        *,
        attention=TorchAttention,
        times=1,
        rows=None,
        **how,
    ) -> torch.Tensor:
        """The result of a backend, which is built as ``TorchAttention`` is, on the plan of ``how``,
        where only ``rows`` are read if they are given; the pool is left as it was."""
        plan = self.plan(**how)
        if rows is not None:
            plan = only_rows(plan, rows)
        run = attention(plan, self.keys, heads=self.query.shape[1], scale=self.scale)
        for _ in range(times):
            out = run.run(self.keys.clone(), self.values.clone(), self.query, self.key, self.value)
        return out

    def reference(self, window=None) -> torch.Tensor:
        """Float64, sequence after sequence and query after query."""
        heads, dim = self.query.shape[1:]
        group = heads // self.keys.shape[0]
        rows, row = [], 0
        for table, start, count in zip(self.tables, self.context, self.counts, strict=True):
            at = torch.arange(start)
            slots = torch.as_tensor(table).long()[at // self.page_size] * self.page_size
            slots = (slots + at % self.page_size).to(self.keys.device)
            new = slice(row, row + count)
            k, v = (
                torch.cat([pool[:, slots], fresh[new].transpose(0, 1)], 1).double()
                for pool, fresh in ((self.keys, self.key), (self.values, self.value))
            )
            for p in range(start, start + count):
                low = 0 if window is None else max(0, p - window + 1)
                q = self.query[row].double().view(-1, group, dim)
                weights = (q @ k[:, low : p + 1].mT * self.scale).softmax(-1)
                rows.append((weights @ v[:, low : p + 1]).reshape(-1))
                row += 1
        return torch.stack(rows)


def make_step(
    sequences,
    *,
    page_size=16,
    heads=6,
    kv_heads=2,
    dim=64,
    dtype=torch.float32,
    scattered=True,
    device="cpu",
    seed=0,
) -> Step:
    """A step of sequences (parent, pages taken from it, own tokens in the pool, new tokens)."""
    random = np.random.default_rng(seed)
    tables, context, counts, pages = [], [], [], 0
    for parent, taken, own, count in sequences:
        taken_pages = tables[parent][:taken] if taken else []
        context.append(taken * page_size + own)
        counts.append(count)
        fresh = -(-(own + count) // page_size)
        tables.append(np.array([*taken_pages, *range(pages, pages + fresh)], np.int32))
        pages += fresh
    if scattered:
        place = random.permutation(2 * pages + 3).astype(np.int32)
        tables, pages = [place[table] for table in tables], len(place)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    pool = torch.full((2, kv_heads, pages * page_size, dim), torch.nan, dtype=dtype, device=device)
    for table, tokens in zip(tables, context, strict=True):
        at = np.arange(tokens)
        slots = torch.from_numpy(
            table.astype(np.int64)[at // page_size] * page_size + at % page_size
        )
        empty = slots[pool[0, 0, slots.to(device), 0].isnan().cpu()].to(device)
        pool[:, :, empty] = normal(2, kv_heads, len(empty), dim)
    total = sum(counts)
    return Step(
        tables,
        context,
        counts,
        page_size,
        pool[0],
        pool[1],
        normal(total, heads, dim),
        normal(total, kv_heads, dim),
        normal(total, kv_heads, dim),
        dim**-0.5,
    )


def check_only_rows(step: Step, attention=TorchAttention, **how) -> None:
    """The last rows of every second sequence, then of none, then some in the middle too."""
    ends = np.cumsum(step.counts)
    expected = step.reference(how.get("window"))
    middle = np.arange(0, ends[-1], 3)
    for rows in (ends[::2] - 1, ends[:0], np.unique(np.concatenate([ends - 1, middle]))):
        out = step.run(attention=attention, rows=rows, **how)[rows].double()
        limit = TOLERANCE[step.query.dtype] * expected.abs().max()
        assert len(rows) == 0 or (out - expected[rows]).abs().max() < limit


def check(step: Step, out: torch.Tensor, window=None, tolerance=None) -> None:
    assert out.dtype == step.query.dtype and out.shape == step.query.flatten(1).shape
    expected = step.reference(window)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < (tolerance or TOLERANCE[out.dtype])


# Sequences (parent, pages taken from it, own tokens in the pool, new tokens), pages of 16.
CASES = {
    "one token": [(-1, 0, 0, 1)],
    "decode, nothing shared": [(-1, 0, n, 1) for n in (1, 15, 16, 17, 63, 64, 65, 200, 0)],
    "prefill of empty sequences": [(-1, 0, 0, n) for n in (1, 16, 17, 70)],
    "prefill in chunks": [(-1, 0, 33, 40), (-1, 0, 16, 16), (-1, 0, 100, 2)],
    # A prefix of 15 tokens fills no page, one of 17 fills one and leaves a token to each sequence.
    "prefix of a page less one": [(-1, 0, 15, 1), (-1, 0, 15, 1), (-1, 0, 15, 1)],
    "prefix of a page": [(-1, 0, 16, 1), (0, 1, 0, 1), (0, 1, 5, 1)],
    "prefix of a page and one": [(-1, 0, 17, 1), (0, 1, 1, 1), (0, 1, 1, 1)],
    "group of one": [(-1, 0, 64, 1), (-1, 0, 80, 1)],
    "request equal to the prefix": [(-1, 0, 64, 1), (0, 4, 0, 1), (0, 4, 30, 1)],
    "nested levels": [
        (-1, 0, 96, 1),
        (0, 2, 40, 1),
        (0, 2, 64, 1),
        (2, 5, 3, 1),
        (2, 6, 0, 1),
        (0, 6, 20, 1),
        (-1, 0, 70, 1),
        (6, 3, 1, 1),
    ],
    "decode beside prefill": [
        (-1, 0, 96, 1),
        (0, 6, 10, 20),
        (0, 6, 0, 33),
        (-1, 0, 0, 50),
        (0, 2, 15, 1),
        (-1, 0, 20, 30),
    ],
    "group that only prefills": [(-1, 0, 64, 5), (0, 4, 0, 18), (0, 3, 9, 2), (0, 3, 0, 31)],
}


@st.composite
def trees(draw):
    """Sequences of a random tree, of pages of 4 tokens."""
    sequences, full = [], []
    for s in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(-1, s - 1))
        taken = draw(st.integers(0, full[parent])) if parent >= 0 else 0
        own = draw(st.integers(0, 30))
        sequences.append((parent, taken, own, draw(st.sampled_from([1, 1, 1, 3, 9]))))
        full.append(taken + own // 4)
    return sequences
