"""The plan of one step's attention: which keys are read once for which queries.

A plan is numpy alone, so that any backend can run it. It is made once per step and layer window
and run in every layer, after FlashInfer's plan and run (arXiv 2501.01005). What to read once is
found in the block tables themselves, as PAT does (arXiv 2511.22333), at any depth of the tree of
prefixes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = np.ndarray[Any, np.dtype[np.int64]]

# Costs of a part of its own, in keys read for one sequence: launching its operations, and merging
# its result into that of one query. Measured on two AVX2 cores in float32.
NODE_COST = 384
MERGE_COST = 8


@dataclasses.dataclass(frozen=True)
class SharedPages:
    """Pages ``[begin, end)`` of the block tables of ``ShareGroups.order[first:last]``, equal in
    all of them and full.

    ``parent`` is the node, by its index, that ends where this one begins; -1 if this one begins
    at page 0.
    """

    begin: int
    end: int
    first: int
    last: int
    parent: int


@dataclasses.dataclass(frozen=True)
class ShareGroups:
    """The tree of prefixes of sequences that run together.

    Attributes:
      order: int64 [n], the sequences such that the members of every node are neighbours; equal
        ones keep their order.
      nodes: every node after its parent.
    """

    order: Ints
    nodes: tuple[SharedPages, ...]


def share_groups(
    block_tables: Sequence[npt.NDArray[np.integer]], context: npt.ArrayLike, page_size: int
) -> ShareGroups:
    """Finds the tree of shared prefixes: the equal leading page ids of block tables.

    Only pages that ``context`` fills are shared, as the others are still to be written. So the
    result holds until a sequence comes, goes or changes a page it has filled.

    Args:
      block_tables: page ids of every sequence, integers of shape [pages]; page i holds the
        positions from ``i * page_size``.
      context: tokens of every sequence in the pool, integers of shape [n].
      page_size: tokens of a page.
    """
    full = np.asarray(context, np.int64) // page_size
    n = len(block_tables)
    # Big-endian, so that the order of the bytes is that of the ids.
    table = np.full((n, int(full.max(initial=0))), -1, ">i4")
    for row, pages, count in zip(table, block_tables, full.tolist(), strict=True):
        row[:count] = pages[:count]
    keys = [row.tobytes() for row in table]
    order = np.array(sorted(range(n), key=keys.__getitem__), np.int64)
    equal = np.logical_and.accumulate(table[order[1:]] == table[order[:-1]], axis=1).sum(1)
    common = np.minimum(equal, np.minimum(full[order[1:]], full[order[:-1]]))

    # The intervals of the array of longest common prefixes are the nodes of the tree
    # (Abouelhoda, Kurtz, Ohlebusch 2004, algorithm 4.1).
    found: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int]] = []
    for last, depth in enumerate([*common.tolist(), 0], start=1):
        first = last - 1
        while opened and opened[-1][0] > depth:
            end, first = opened.pop()
            begin = max(depth, opened[-1][0] if opened else 0)
            found.append((first, end, begin, last))
        if depth > (opened[-1][0] if opened else 0):
            opened.append((depth, first))

    nodes: list[SharedPages] = []
    path: list[int] = []
    for first, end, begin, last in sorted(found):
        while path and nodes[path[-1]].last <= first:
            path.pop()
        nodes.append(SharedPages(begin, end, first, last, path[-1] if path else -1))
        path.append(len(nodes) - 1)
    return ShareGroups(order, tuple(nodes))


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Work items of one step, for the layers of one window.

    Item i lets some query rows see some keys of the pool: the rows
    ``rows[row_offsets[i]:row_offsets[i + 1]]`` of the T packed tokens, and the ``keys[i]`` keys
    from position ``first_key[i]``, in the pages ``pages[page_offsets[i]:page_offsets[i + 1]]``,
    whose first one holds that position. A row at position p sees the item's keys at positions
    k with ``p - window < k <= p``. Every row sees at least one key of each of its items, and over
    all items every key it may see exactly once; a row without items has no result. A row's result
    is merged from its items'; its place in ``rows`` numbers that partial result.

    The last items are the sequences' own, in their order; the items before them are shared.

    Attributes:
      page_size: tokens of a page.
      window: keys that a query sees, itself included; None is all.
      positions: int64 [T], of the packed tokens in their sequences.
      slots: int64 [T], where their keys and values go in the pool.
      first_key, keys: int64 [items].
      pages: int64 [page_offsets[-1]].
      rows: int64 [row_offsets[-1]].
      page_offsets, row_offsets: int64 [items + 1].
      masked: bool [items], whether a row does not see all keys of its item.
      kv_tokens_read: keys that a layer reads.
      kv_tokens_unshared: keys that it would read sequence by sequence.
    """

    page_size: int
    window: int | None
    positions: Ints
    slots: Ints
    first_key: Ints
    keys: Ints
    pages: Ints
    page_offsets: Ints
    rows: Ints
    row_offsets: Ints
    masked: np.ndarray[Any, np.dtype[np.bool_]]
    kv_tokens_read: int
    kv_tokens_unshared: int


def plan_attention(
    block_tables: Sequence[npt.NDArray[np.integer]],
    context: npt.ArrayLike,
    counts: npt.ArrayLike,
    page_size: int,
    *,
    window: int | None = None,
    groups: ShareGroups | None = None,
    node_cost: float = NODE_COST,
    merge_cost: float = MERGE_COST,
) -> AttentionPlan:
    """Plans the attention of one step.

    A node of the tree becomes an item of its own where that pays: with u separate reads below it,
    L tokens in it and q queries, where ``(u - 1) * L > node_cost + merge_cost * q``. Otherwise
    what is below it reads its pages too (the rule of FastTree and PAT with these costs).

    Args:
      block_tables: page ids of the n sequences, integers of shape [pages], with pages for all
        ``context + counts`` tokens.
      context: tokens of every sequence in the pool, integers of shape [n].
      counts: new tokens of every sequence, each at least 1; packed sequence after sequence.
      page_size: tokens of a page.
      window: a query at position p sees the keys at positions above ``p - window``; None: all.
      groups: what ``share_groups`` found; None shares nothing.
      node_cost: of an item, in keys read.
      merge_cost: of an item's every query, in keys read.

    Raises:
      ValueError: if a count or the window is below 1, or a block table is too short.
    """
    context, counts = np.asarray(context, np.int64), np.asarray(counts, np.int64)
    n = len(block_tables)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if n and counts.min() < 1:
        raise ValueError("every sequence needs at least one new token")
    table = np.concatenate([*block_tables, np.empty(0, np.int64)]).astype(np.int64)
    table_start = offsets([len(pages) for pages in block_tables])
    ends = context + counts
    if (np.diff(table_start) * page_size < ends).any():
        raise ValueError("a block table has too few pages for its sequence's tokens")

    row_start = offsets(counts)
    sequence = np.repeat(np.arange(n), counts)
    positions = np.arange(row_start[-1]) + (context - row_start[:-1])[sequence]
    slots = table[table_start[sequence] + positions // page_size] * page_size
    slots += positions % page_size
    lowest = np.zeros_like(positions) if window is None else positions - window + 1
    lowest = np.maximum(lowest, 0)  # the first key that a row sees
    own_begin = np.zeros(n, np.int64)  # in pages; before it, shared items give a sequence its keys

    item_rows: list[Ints] = []
    shared: list[tuple[int, int, int]] = []  # sequence whose table to read, key range
    if groups is not None:
        for begin, end, members in _worthwhile(
            groups, counts, lowest[row_start[:-1]], page_size, node_cost, merge_cost
        ):
            own_begin[members] = end
            rows = ranges(row_start[members], counts[members])
            rows = rows[lowest[rows] < end * page_size]
            item_rows.append(rows)
            first_key = max(begin * page_size, int(lowest[rows].min()))
            shared.append((int(members[0]), first_key, end * page_size))

    source, first, last = np.array(shared, np.int64).reshape(-1, 3).T
    source = np.concatenate([source, np.arange(n)])
    first_key = np.concatenate([first, np.maximum(own_begin * page_size, lowest[row_start[:-1]])])
    last_key = np.concatenate([last, ends])
    first_page = first_key // page_size
    page_counts = -(-last_key // page_size) - first_page
    row_offsets = offsets([len(rows) for rows in item_rows] + counts.tolist())
    item_rows.append(np.arange(row_start[-1]))
    rows = np.concatenate(item_rows)
    masked = np.empty(len(source), bool)
    for i in range(len(shared)):
        masked[i] = lowest[item_rows[i]].max() > first_key[i]
    masked[len(shared) :] = counts > 1
    return AttentionPlan(
        page_size=page_size,
        window=window,
        positions=positions,
        slots=slots,
        first_key=first_key,
        keys=last_key - first_key,
        pages=table[ranges(table_start[source] + first_page, page_counts)],
        page_offsets=offsets(page_counts),
        rows=rows,
        row_offsets=row_offsets,
        masked=masked,
        kv_tokens_read=int((last_key - first_key).sum()),
        kv_tokens_unshared=int((ends - lowest[row_start[:-1]]).sum()),
    )


def only_rows(plan: AttentionPlan, rows: npt.NDArray[np.integer]) -> AttentionPlan:
    """The plan of a layer of which only some rows are read: its items have no others, and no keys
    that these do not see. All new keys and values go to the pool.

    The statistics stay those of the whole plan.

    Args:
      rows: the rows that are read, of the T packed tokens.
    """
    read = np.zeros(len(plan.positions), bool)
    read[rows] = True
    kept = read[plan.rows]
    if kept.all():
        return plan
    sizes = np.diff(offsets(kept)[plan.row_offsets])
    items = np.flatnonzero(sizes)
    left, row_offsets = plan.rows[kept], offsets(sizes[items])
    first, last = plan.first_key[items], plan.first_key[items] + plan.keys[items]
    first_key, masked = first, np.zeros(len(items), bool)
    if len(items):
        at = plan.positions[left]
        lowest = np.minimum.reduceat(at, row_offsets[:-1])
        highest = np.maximum.reduceat(at, row_offsets[:-1])
        last = np.minimum(last, highest + 1)
        masked = lowest + 1 < last
        if plan.window is not None:
            first_key = np.maximum(first, lowest - plan.window + 1)
            masked |= highest - plan.window + 1 > first_key
    first_page = first_key // plan.page_size
    page_counts = -(-last // plan.page_size) - first_page
    base = plan.page_offsets[items] - first // plan.page_size
    return dataclasses.replace(
        plan,
        first_key=first_key,
        keys=last - first_key,
        pages=plan.pages[ranges(base + first_page, page_counts)],
        page_offsets=offsets(page_counts),
        rows=left,
        row_offsets=row_offsets,
        masked=masked,
    )


def _worthwhile(
    groups: ShareGroups,
    counts: Ints,
    lowest: Ints,
    page_size: int,
    node_cost: float,
    merge_cost: float,
) -> list[tuple[int, int, Ints]]:
    """The nodes that become items: pages [begin, end) and the sequences that see some of them.

    begin lies before the node's own one where nodes above it do not become items.
    """
    nodes = groups.nodes
    members = [groups.order[node.first : node.last] for node in nodes]
    # Separate reads below a node: of sequences, or of a node below it that pays by itself.
    reads = [node.last - node.first for node in nodes]

    def pays(i: int, begin: int) -> bool:
        end = nodes[i].end * page_size
        seeing = members[i][lowest[members[i]] < end]
        if not len(seeing):
            return False
        tokens = end - max(begin * page_size, int(lowest[seeing].min()))
        cost = node_cost + merge_cost * int(counts[seeing].sum())
        return (min(reads[i], len(seeing)) - 1) * tokens > cost

    for i in reversed(range(len(nodes))):
        if nodes[i].parent >= 0:
            saved = nodes[i].last - nodes[i].first - (1 if pays(i, nodes[i].begin) else reads[i])
            reads[nodes[i].parent] -= saved
    placed: list[tuple[int, int, Ints]] = []
    covered: list[int] = []  # first page that no item from node i upwards covers
    for i, node in enumerate(nodes):
        begin = covered[node.parent] if node.parent >= 0 else 0
        if pays(i, begin):
            placed.append((begin, node.end, members[i]))
            begin = node.end
        covered.append(begin)
    return placed


def offsets(lengths: npt.ArrayLike) -> Ints:
    """Where consecutive ranges of these lengths begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """The integers of ``[start, start + length)``, range after range."""
    places = offsets(lengths)
    return np.arange(places[-1]) + np.repeat(starts - places[:-1], lengths)
