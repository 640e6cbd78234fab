"""Which KV page belongs to whom: a paged pool with shared, verified and retained prefixes.

It counts pages and knows no tensors; the runner that owns the tensors addresses them by page.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from surge_beam.policy.prefix_digests import extend_chain
from surge_beam.records import SurgeError


class OutOfPages(SurgeError):
    """More pages were asked for than are free or can be freed."""


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What a registered page holds: its tokens, after those of its parent page (-1: none)."""

    digest: int
    parent: int
    tokens: bytes


class PagePool:
    """Pages of the KV cache, counted by reference.

    A page whose tokens are complete may be registered: other sequences with the same tokens before
    and in it then share it. A registered page that nobody uses any more is retained until its room
    is needed, least recently used first. Hits are verified token by token, so that equal digests
    of unequal texts share nothing.

    Args:
      pages: pages in the pool.
      page_size: tokens of a page.
      share: whether pages are registered at all.
    """

    def __init__(self, pages: int, page_size: int, *, share: bool = True) -> None:
        if pages < 1:
            raise SurgeError("the KV pool has no room for a single page; give it more kv_bytes")
        self.pages, self.page_size, self.share = pages, page_size, share
        self.references = np.zeros(pages, np.int32)
        self._vacant = np.ones(pages, bool)
        self._vacancies = pages
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._index: dict[int, int] = {}
        self._shared: dict[int, _Shared] = {}

    @property
    def available(self) -> int:
        """Pages that an allocation could get: vacant or only retained."""
        return self._vacancies + len(self._retained)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - self.available

    @property
    def retained(self) -> int:
        """Pages that nobody holds but whose tokens are kept for whoever begins with them."""
        return len(self._retained)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def digests(self, ids: np.ndarray, known: list[int], pages: int) -> list[int]:
        """The chained digests of the first ``pages`` pages of ids, int32 [n]; extends ``known``."""
        return extend_chain(known, ids, self.page_size, pages)

    def match(self, ids: np.ndarray, digests: Sequence[int], table: Sequence[int]) -> list[int]:
        """Registered pages that continue a block table over the tokens ids, int32 [n].

        Args:
          ids: the sequence's tokens.
          digests: of its full pages that may be shared.
          table: the pages it has already; their tokens are all there.

        Returns:
          The pages, of which the caller holds a reference now.
        """
        if not self.share:
            return []
        found: list[int] = []
        parent = table[-1] if table else -1
        size = self.page_size
        for at in range(len(table), len(digests)):
            page = self._index.get(digests[at])
            if page is None:
                break
            held = self._shared[page]
            if held.parent != parent or held.tokens != ids[at * size : (at + 1) * size].tobytes():
                break
            if self.references[page] == 0:
                del self._retained[page]
            self.references[page] += 1
            found.append(page)
            parent = page
        return found

    def allocate(self, count: int) -> list[int]:
        """Pages with one reference each, neighbours where that is possible.

        Raises:
          OutOfPages: if fewer are available; then none is taken.
        """
        if count > self.available:
            raise OutOfPages(f"{count} KV pages wanted, {self.available} available")
        while self._vacancies < count:
            self._forget(next(iter(self._retained)))
        if count == 0:
            return []
        pages = [int(self._vacant.argmax())] if count == 1 else self._neighbours(count)
        self._vacant[pages] = False
        self._vacancies -= count
        self.references[pages] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference of each page of a block table's tail, or of all of it."""
        # from the end, so that a retained page is always younger than those that continue it
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] == 0:
                if page in self._shared:
                    self._retained[page] = None
                else:
                    self._vacate(page)

    def register(self, ids: np.ndarray, digests: Sequence[int], table: list[int], at: int) -> bool:
        """Makes page ``at`` of a block table known to others; its tokens are, or are about to be,
        all there.

        Where an equal page is known already, the table takes that one and gives its own back.

        Returns:
          False if the page cannot be registered, and so none that follows it.
        """
        if not self.share:
            return False
        page, parent = table[at], table[at - 1] if at else -1
        if page in self._shared:
            return True
        if parent >= 0 and parent not in self._shared:
            return False
        tokens = ids[at * self.page_size : (at + 1) * self.page_size].tobytes()
        known = self._index.get(digests[at])
        if known is None:
            self._index[digests[at]] = page
            self._shared[page] = _Shared(digests[at], parent, tokens)
            return True
        held = self._shared[known]
        if held.parent != parent or held.tokens != tokens:
            return False
        if self.references[known] == 0:
            del self._retained[known]
        self.references[known] += 1
        self.release([page])
        table[at] = known
        return True

    def withdraw(self, pages: Sequence[int]) -> None:
        """Takes back the registration of pages whose tokens did not come to be there, and of
        those that continue them.
        """
        gone = {page for page in pages if page in self._shared}
        while gone:
            for page in gone:
                del self._index[self._shared.pop(page).digest]
                if page in self._retained:
                    del self._retained[page]
                    self._vacate(page)
            gone = {page for page, shared in self._shared.items() if shared.parent in gone}

    def clear(self) -> None:
        """Forgets all retained pages."""
        while self._retained:
            self._forget(next(iter(self._retained)))

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless pages and the references of these tables agree."""
        expected = np.zeros(self.pages, np.int32)
        for table in tables:
            assert len(set(table)) == len(table), "a page stands twice in a block table"
            expected[list(table)] += 1
        assert np.array_equal(expected, self.references), "references and block tables differ"
        assert int(self._vacant.sum()) == self._vacancies
        assert self._vacancies + len(self._retained) + int((expected > 0).sum()) == self.pages
        assert not self._vacant[list(self._shared)].any(), "a registered page is vacant"
        for page, shared in self._shared.items():
            assert self._index[shared.digest] == page
            assert shared.parent < 0 or shared.parent in self._shared, "a prefix lost its head"

    def _neighbours(self, count: int) -> list[int]:
        """The first vacant pages that lie side by side; where there are none, the first ones."""
        vacant = np.flatnonzero(self._vacant)
        starts = np.flatnonzero(vacant[count - 1 :] - vacant[: len(vacant) - count + 1] < count)
        start = int(starts[0]) if len(starts) else 0
        return [int(p) for p in vacant[start : start + count]]

    def _forget(self, page: int) -> None:
        del self._retained[page]
        shared = self._shared.pop(page)
        del self._index[shared.digest]
        self._vacate(page)

    def _vacate(self, page: int) -> None:
        self._vacant[page] = True
        self._vacancies += 1
