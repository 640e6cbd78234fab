"""Which waiting request fits best into the running batch: Feather's Chunked Hash Tree.

After arXiv 2605.06046, with another structure: requests hang in a radix tree over their chained
chunk digests, an edge standing for all chunks up to where requests part. Equal digests mean equal
prefixes, so an edge is compared by its last digest and split by halving, and an operation touches
the nodes of one path, whose number does not grow with the prompt.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Hashable, Sequence

# (chunks, age): which of two waiting requests is the better one, the smaller first
_Rank = tuple[int, int]

# entries that a heap may have beyond two for each that waits
_SLACK = 16


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A waiting request, and what admitting it would do; counts in chunks.

    Attributes:
      key: the request.
      before: the prefix common to all active requests; 0 if there are none.
      after: the same if this one joined; its own chunks if it would be the first.
      held: its chunks that some active request has.
      missing: its other chunks.
      peers: other waiting requests that share the ``after`` chunks.
    """

    key: Hashable
    before: int
    after: int
    held: int
    missing: int
    peers: int


class _Node:
    """Chunks [parent.end, end) of ``digests``, which is the list of some request through here.

    ``far`` ranks waiting requests at or below the node by all their chunks: of each child the
    best, of the node itself all. ``near`` ranks the best below each active child by the chunks it
    misses. Entries that no longer hold are dropped when they come to the top.
    """

    __slots__ = (
        "active",
        "children",
        "digests",
        "end",
        "far",
        "far_best",
        "near",
        "near_best",
        "parent",
        "waiting",
    )

    def __init__(self, parent: _Node | None, digests: Sequence[int], end: int) -> None:
        self.parent, self.digests, self.end = parent, digests, end
        self.children: dict[int, _Node] = {}
        self.waiting = self.active = 0
        self.far: list[_Rank] = []
        self.near: list[_Rank] = []
        self.far_best: _Rank | None = None  # as the parent has it
        self.near_best: _Rank | None = None


class _Request:
    __slots__ = ("age", "key", "node", "waiting")

    def __init__(self, key: Hashable, age: int, node: _Node) -> None:
        self.key, self.age, self.node, self.waiting = key, age, node, True


class PrefixTree:
    """Waiting and active requests by their prefixes.

    A request is inserted as waiting, activated when it is admitted, deactivated when it goes back
    to wait, finished when it ends, or removed while it waits. Of the waiting ones that candidate
    is best which keeps the longest prefix common to all active ones; then the one with the fewest
    chunks that no active one has; then the oldest.
    """

    def __init__(self) -> None:
        self._root = _Node(None, (), 0)
        self._by_key: dict[Hashable, _Request] = {}
        self._by_age: dict[int, _Request] = {}
        self._active: dict[Hashable, _Request] = {}
        self._ages: list[int] = []
        self._next_age = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    @property
    def waiting(self) -> int:
        return self._root.waiting

    @property
    def active(self) -> int:
        return self._root.active

    def insert(self, key: Hashable, digests: Sequence[int]) -> None:
        """Adds a waiting request with its chained digests, as Python integers (``tolist``).

        Digests of any chunk do. The list is kept, not copied; it may grow. Raises KeyError if the
        key is known already.
        """
        if key in self._by_key:
            raise KeyError(f"{key!r} is in the tree already")
        node = self._place(digests)
        request = _Request(key, self._next_age, node)
        self._next_age += 1
        self._by_key[key] = self._by_age[request.age] = request
        heapq.heappush(self._ages, request.age)
        at: _Node | None = node
        while at is not None:
            at.waiting += 1
            at = at.parent
        # the heaps know a newcomer up to where it is not the best: cheaper than a refresh
        rank, at = (node.end, request.age), node
        while at is not None:
            heapq.heappush(at.far, rank)
            if len(at.far) > 2 * at.waiting + _SLACK:
                self._compact(at)
            if at.far_best is not None and at.far_best < rank:
                break
            at.far_best = rank
            at = at.parent
        if self._active:
            while not node.active:
                assert node.parent is not None
                node = node.parent
            self._refresh(node)

    def activate(self, key: Hashable) -> None:
        """A waiting request joins the batch. Raises KeyError if it does not wait."""
        request = self._known(key, waiting=True)
        request.waiting = False
        self._active[key] = request
        self._move(request.node, waiting=-1, active=1)

    def deactivate(self, key: Hashable) -> None:
        """An active request waits again, as old as it is. Raises KeyError if it is not active."""
        request = self._known(key, waiting=False)
        request.waiting = True
        del self._active[key]
        heapq.heappush(self._ages, request.age)
        heapq.heappush(request.node.far, (request.node.end, request.age))
        self._move(request.node, waiting=1, active=-1)

    def finish(self, key: Hashable) -> None:
        """An active request ends. Raises KeyError if it is not active."""
        request = self._known(key, waiting=False)
        del self._active[key]
        self._forget(request)
        self._move(request.node, waiting=0, active=-1)
        self._prune(request.node)

    def remove(self, key: Hashable) -> None:
        """A waiting request is given up. Raises KeyError if it does not wait."""
        request = self._known(key, waiting=True)
        self._forget(request)
        self._move(request.node, waiting=-1, active=0)
        self._prune(request.node)

    def best_candidate(self) -> Candidate | None:
        """The best waiting request; with nothing active the oldest. None if none waits."""
        if not self._active:
            return self.oldest_candidate()
        node = common = self._common()
        while not node.waiting:
            if node.parent is None:
                return None
            node = node.parent
        best = self._nearest(node)
        assert best is not None, "a waiting request that no heap knows"
        missing, age = best
        return self._candidate(self._by_age[age], common, node, missing)

    def oldest_candidate(self) -> Candidate | None:
        """The waiting request that was inserted first. None if none waits."""
        while self._ages and not self._waits(self._ages[0]):
            heapq.heappop(self._ages)
        if not self._ages:
            return None
        request = self._by_age[self._ages[0]]
        node = request.node
        if not self._active:
            return self._candidate(request, self._root, node, node.end)
        common = self._common()
        kept = node
        while kept.end > common.end or kept.active < len(self._active):
            assert kept.parent is not None
            kept = kept.parent
        return self._candidate(request, common, kept, self._missing(request))

    def _candidate(self, request: _Request, common: _Node, kept: _Node, missing: int) -> Candidate:
        return Candidate(
            key=request.key,
            before=common.end,
            after=kept.end,
            held=request.node.end - missing,
            missing=missing,
            peers=kept.waiting - 1,
        )

    # --- the tree ---

    def _place(self, digests: Sequence[int]) -> _Node:
        """The node where a request with these digests ends; made if it is not there."""
        node, at, length = self._root, 0, len(digests)
        while at < length:
            child = node.children.get(digests[at])
            if child is None:
                child = _Node(node, digests, length)
                node.children[digests[at]] = child
                return child
            low, high = at + 1, min(child.end, length)
            if digests[high - 1] == child.digests[high - 1]:
                low = high
            while low < high:
                middle = (low + high) // 2
                if digests[middle] == child.digests[middle]:
                    low = middle + 1
                else:
                    high = middle
            node = child if low == child.end else self._split(child, at, low)
            at = low
        return node

    def _split(self, child: _Node, begin: int, end: int) -> _Node:
        """Puts a node before ``child`` that takes its chunks up to ``end``."""
        parent = child.parent
        assert parent is not None
        upper = _Node(parent, child.digests, end)
        upper.waiting, upper.active = child.waiting, child.active
        upper.far_best, upper.near_best = child.far_best, child.near_best
        if child.far_best is not None:
            upper.far.append(child.far_best)
        if child.near_best is not None:
            upper.near.append(child.near_best)
        parent.children[child.digests[begin]] = upper
        upper.children[child.digests[end]] = child
        child.parent = upper
        return upper

    def _prune(self, node: _Node) -> None:
        at: _Node | None = node
        while at is not None and at.parent is not None and not (at.waiting or at.active):
            del at.parent.children[at.digests[at.parent.end]]
            at = at.parent

    def _common(self) -> _Node:
        """Where the prefix common to all active requests ends; there must be one."""
        node = next(iter(self._active.values())).node
        while node.active < len(self._active):
            assert node.parent is not None
            node = node.parent
        return node

    # --- who is best ---

    def _move(self, node: _Node, *, waiting: int, active: int) -> None:
        """Changes what is counted on the path to ``node``, and who is best along it."""
        at: _Node | None = node
        while at is not None:
            at.waiting += waiting
            at.active += active
            if not at.active:
                at.near.clear()
                at.near_best = None
            at = at.parent
        self._refresh(node, whole=active != 0)

    def _refresh(self, node: _Node, whole: bool = False) -> None:
        """Tells every parent on the path to ``node`` the new best of its child.

        It ends where nothing changed, unless nodes have turned active or inactive.
        """
        while node.parent is not None:
            parent, same = node.parent, True
            best = self._top(node)
            if best != node.far_best:
                node.far_best, same = best, False
                if best is not None:
                    heapq.heappush(parent.far, best)
            if node.active:
                best = self._nearest(node)
                if best != node.near_best:
                    node.near_best, same = best, False
                    if best is not None:
                        heapq.heappush(parent.near, best)
            if max(len(parent.far), len(parent.near)) > 2 * parent.waiting + _SLACK:
                self._compact(parent)
            if same and not whole:
                return
            node = parent

    def _compact(self, node: _Node) -> None:
        """Drops entries that no longer hold and those that stand twice."""
        node.far = sorted({rank for rank in node.far if self._waits(rank[1])})
        node.near = sorted({rank for rank in node.near if self._holds_near(rank)})

    def _top(self, node: _Node) -> _Rank | None:
        """(all its chunks, age) of the waiting request at or below a node with the fewest."""
        while node.far and not self._waits(node.far[0][1]):
            heapq.heappop(node.far)
        return node.far[0] if node.far else None

    def _nearest(self, node: _Node) -> _Rank | None:
        """(missing chunks, age) of the best waiting request at or below an active node.

        A request below an active child may stand in ``far`` too; there it only looks worse than
        in ``near``, so the smaller of the two is right.
        """
        while node.near and not self._holds_near(node.near[0]):
            heapq.heappop(node.near)
        far = self._top(node)
        if far is None:
            return None
        far = (far[0] - node.end, far[1])
        return min(far, node.near[0]) if node.near else far

    def _holds_near(self, rank: _Rank) -> bool:
        return self._waits(rank[1]) and self._missing(self._by_age[rank[1]]) == rank[0]

    def _missing(self, request: _Request) -> int:
        node = request.node
        while not node.active and node.parent is not None:
            node = node.parent
        return request.node.end - node.end

    # --- requests ---

    def _waits(self, age: int) -> bool:
        request = self._by_age.get(age)
        return request is not None and request.waiting

    def _known(self, key: Hashable, *, waiting: bool) -> _Request:
        request = self._by_key[key]
        if request.waiting != waiting:
            raise KeyError(f"{key!r} is {'not waiting' if waiting else 'not active'}")
        return request

    def _forget(self, request: _Request) -> None:
        request.waiting = False
        del self._by_key[request.key], self._by_age[request.age]
