from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.gpu.kv_cache import OutOfPages, PagePool
from surge_beam.records import SurgeError

SIZE = 4


def _ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def _hold(pool: PagePool, ids: np.ndarray) -> tuple[list[int], int]:
    """A block table over ids with all its full pages registered; and pages found."""
    digests = pool.digests(ids, [], len(ids) // SIZE)
    table = pool.match(ids, digests, [])
    found = len(table)
    table += pool.allocate(pool.pages_for(len(ids)) - found)
    for at in range(found, len(digests)):
        assert pool.register(ids, digests, table, at)
    return table, found


def test_pages_of_equal_prefixes_are_shared_and_come_back():
    pool = PagePool(8, SIZE)
    first, _ = _hold(pool, _ids(*range(10)))
    second, found = _hold(pool, _ids(*range(8), 99, 98))
    assert found == 2 and second[:2] == first[:2] and second[2] != first[2]
    pool.check([first, second])
    assert pool.used == 4
    pool.release(first)
    pool.release(second)
    assert pool.used == 0 and pool.available == 8
    third, found = _hold(pool, _ids(*range(9)))
    assert found == 2 and third[:2] == first[:2], "what nobody holds is retained"


def test_a_page_is_shared_only_after_the_same_tokens():
    pool = PagePool(8, SIZE)
    _hold(pool, _ids(1, 1, 1, 1, 2, 2, 2, 2))
    _, found = _hold(pool, _ids(3, 3, 3, 3, 2, 2, 2, 2))
    assert found == 0


def test_equal_digests_of_unequal_tokens_share_nothing():
    pool = PagePool(8, SIZE)
    ids, other = _ids(*range(8)), _ids(*range(8, 16))
    digests = pool.digests(ids, [], 2)
    table = pool.allocate(2)
    assert pool.register(ids, digests, table, 0) and pool.register(ids, digests, table, 1)
    assert pool.match(other, digests, []) == []
    mixed = np.concatenate([ids[:4], other[:4]])
    shared = pool.match(mixed, digests, [])
    assert shared == table[:1]
    mine = shared + pool.allocate(1)
    assert not pool.register(mixed, digests, mine, 1)
    pool.check([table, mine])


def test_retained_pages_make_room_oldest_and_deepest_first():
    pool = PagePool(4, SIZE)
    old, _ = _hold(pool, _ids(*range(8)))
    pool.release(old)
    new, _ = _hold(pool, _ids(*range(50, 58)))
    pool.release(new)
    pool.allocate(1)
    digests = pool.digests(_ids(*range(8)), [], 2)
    assert pool.match(_ids(*range(8)), digests, []) == old[:1], "its tail went, its head is there"
    pool.release(old[:1])
    held = pool.match(_ids(*range(50, 58)), pool.digests(_ids(*range(50, 58)), [], 2), [])
    assert held == new


def test_an_equal_page_that_came_later_gives_way():
    pool = PagePool(4, SIZE)
    ids = _ids(*range(4))
    digests = pool.digests(ids, [], 1)
    one, two = pool.allocate(1), pool.allocate(1)
    assert pool.register(ids, digests, one, 0) and pool.register(ids, digests, two, 0)
    assert two == one and pool.references[one[0]] == 2
    pool.check([one, two])


def test_neighbours_are_preferred_and_exhaustion_takes_nothing():
    pool = PagePool(6, SIZE, share=False)
    pages = pool.allocate(6)
    pool.release([pages[0], pages[2], pages[3], pages[4]])
    assert pool.allocate(3) == [2, 3, 4]
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    assert pool.available == 1
    assert pool.allocate(0) == []
    with pytest.raises(SurgeError, match="kv_bytes"):
        PagePool(0, SIZE)


def test_withdrawn_pages_are_not_found():
    pool = PagePool(4, SIZE)
    ids = _ids(*range(8))
    table, _ = _hold(pool, ids)
    pool.withdraw(table)
    assert pool.match(ids, pool.digests(ids, [], 2), []) == []
    pool.release(table)
    assert pool.used == 0


def test_pages_that_continue_withdrawn_ones_go_with_them():
    pool = PagePool(8, SIZE)
    ids = _ids(*range(12))
    first, _ = _hold(pool, ids[:8])
    second, _ = _hold(pool, ids)
    pool.release(second)
    pool.withdraw(first)
    pool.check([first])
    assert pool.available == 6
    again, found = _hold(pool, ids)
    assert found == 0
    pool.check([first, again])


@settings(max_examples=150)
@given(data=st.data(), pages=st.integers(1, 12), share=st.booleans())
def test_pages_are_conserved(data, pages, share):
    """Random holders over few distinct prefixes: the pool agrees with the tables at every step,
    and a page found holds the tokens it was found for.
    """
    pool = PagePool(pages, SIZE, share=share)
    held: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            ids = _ids(*data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE)))
            full = len(ids) // SIZE
            digests = pool.digests(ids, [], full)
            table = pool.match(ids, digests, [])
            for at, page in enumerate(table):
                assert content[page] == tuple(ids[: (at + 1) * SIZE])
            wanted = pool.pages_for(len(ids)) - len(table)
            if wanted > pool.available:
                pool.release(table)
                with pytest.raises(OutOfPages):
                    pool.allocate(pool.available + 1)
                continue
            found = len(table)
            table += pool.allocate(wanted)
            for at in range(found, full):
                assert pool.register(ids, digests, table, at) == share
                content[table[at]] = tuple(ids[: (at + 1) * SIZE])
            held.append(table)
        pool.check(held)
    for table in held:
        pool.release(table)
    pool.check([])
    pool.clear()
    assert pool.available == pages
