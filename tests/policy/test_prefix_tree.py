from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.policy.prefix_tree import Candidate, PrefixTree

Path = tuple[int, ...]


def chain(symbols: Path) -> list[int]:
    """Digests that are equal exactly where all symbols up to there are."""
    return [hash(symbols[: i + 1]) for i in range(len(symbols))]


def common(a: Path, b: Path) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class Oracle:
    """The definitions, over all requests, in order of age."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.active: set[int] = set()

    @property
    def waiting(self) -> list[int]:
        return [key for key in self.paths if key not in self.active]

    def _prefix(self) -> Path:
        paths = [self.paths[key] for key in self.active]
        return paths[0][: min(common(paths[0], p) for p in paths)]

    def candidate(self, key: int) -> Candidate:
        path = self.paths[key]
        if self.active:
            prefix = self._prefix()
            before, after = len(prefix), common(prefix, path)
            missing = len(path) - max(common(path, self.paths[a]) for a in self.active)
        else:
            before, after, missing = 0, len(path), len(path)
        peers = sum(common(path, self.paths[w]) >= after for w in self.waiting) - 1
        return Candidate(key, before, after, len(path) - missing, missing, peers)

    def oldest(self) -> Candidate | None:
        return self.candidate(self.waiting[0]) if self.waiting else None

    def best(self) -> Candidate | None:
        if not self.active:
            return self.oldest()
        found = map(self.candidate, self.waiting)
        # min keeps the first, which is the oldest
        return min(found, key=lambda c: (-c.after, c.missing), default=None)


@settings(max_examples=300)
@given(st.data())
def test_every_answer_is_that_of_the_definitions(data):
    tree, oracle = PrefixTree(), Oracle()
    paths = st.lists(st.integers(0, 1), max_size=7).map(tuple)
    for key in range(data.draw(st.integers(1, 40))):
        kinds = ["insert", "insert"]
        if oracle.waiting:
            kinds += ["best", "activate", "remove"]
        if oracle.active:
            kinds += ["finish", "deactivate"]
        kind = data.draw(st.sampled_from(kinds))
        if kind == "insert":
            oracle.paths[key] = data.draw(paths)
            tree.insert(key, chain(oracle.paths[key]))
        elif kind in ("best", "activate"):
            chosen = tree.best_candidate().key
            if kind == "activate":
                chosen = data.draw(st.sampled_from(oracle.waiting))
            oracle.active.add(chosen)
            tree.activate(chosen)
        elif kind == "remove":
            chosen = data.draw(st.sampled_from(oracle.waiting))
            del oracle.paths[chosen]
            tree.remove(chosen)
        else:
            chosen = data.draw(st.sampled_from(sorted(oracle.active)))
            oracle.active.remove(chosen)
            if kind == "finish":
                del oracle.paths[chosen]
            getattr(tree, kind)(chosen)
        assert (tree.waiting, tree.active) == (len(oracle.waiting), len(oracle.active))
        assert len(tree) == len(oracle.paths)
        assert tree.oldest_candidate() == oracle.oldest()
        assert tree.best_candidate() == oracle.best()


def test_a_long_run_with_deep_shared_prefixes():
    """Many requests of few families: splits, prunings and stale entries."""
    draw = random.Random(3)
    tree, oracle = PrefixTree(), Oracle()
    families = [tuple(draw.randrange(3) for _ in range(30)) for _ in range(4)]
    for key in range(1500):
        if oracle.active and draw.random() < 0.45:
            chosen = draw.choice(sorted(oracle.active))
            oracle.active.remove(chosen)
            if draw.random() < 0.8:
                del oracle.paths[chosen]
                tree.finish(chosen)
            else:
                tree.deactivate(chosen)
        elif oracle.waiting and draw.random() < 0.55:
            chosen = (
                tree.best_candidate().key if draw.random() < 0.7 else draw.choice(oracle.waiting)
            )
            oracle.active.add(chosen)
            tree.activate(chosen)
        else:
            tail = tuple(draw.randrange(3) for _ in range(draw.randrange(5)))
            oracle.paths[key] = draw.choice(families)[: draw.randrange(31)] + tail
            tree.insert(key, chain(oracle.paths[key]))
        if key % 5 == 0:
            assert tree.best_candidate() == oracle.best()
            assert tree.oldest_candidate() == oracle.oldest()
    for key in list(oracle.paths):
        (tree.finish if key in oracle.active else tree.remove)(key)
    assert len(tree) == 0 and not tree._root.children and tree.best_candidate() is None


def test_what_is_gone_leaves_nothing_behind():
    """One that stays at the top of every heap does not keep stale entries alive beneath it."""
    tree = PrefixTree()
    tree.insert("stays", chain((1,)))
    tree.insert("running", chain((1, 1, 5)))
    tree.activate("running")
    for key in range(2000):
        tree.insert(key, chain((1, 1, 10 + key, 3)))
        if key % 2:
            tree.activate(key)
            tree.finish(key)
        else:
            tree.remove(key)
    nodes = [tree._root]
    for node in nodes:
        nodes += node.children.values()
    assert len(nodes) <= 5
    assert sum(len(node.far) + len(node.near) for node in nodes) < 40 * len(nodes)
    assert tree.best_candidate() == Candidate("stays", 3, 1, 1, 0, 0)


def test_a_long_relative_goes_before_a_short_stranger():
    tree = PrefixTree()
    tree.insert("running", chain((1,) * 200))
    tree.activate("running")
    tree.insert("stranger", chain((2, 2)))
    tree.insert("relative", chain((1,) * 200 + (3, 3, 3)))
    assert tree.best_candidate() == Candidate("relative", 200, 200, 200, 3, 0)


def test_who_was_preempted_can_be_chosen_again():
    tree = PrefixTree()
    for key in "ab":
        tree.insert(key, chain((1, 2)))
    tree.activate("a")
    tree.deactivate("a")
    assert tree.best_candidate() == Candidate("a", 0, 2, 0, 2, 1)


def test_a_request_can_only_do_what_its_state_allows():
    tree = PrefixTree()
    tree.insert("a", [1])
    with pytest.raises(KeyError):
        tree.insert("a", [2])
    for wrong in (tree.finish, tree.deactivate):
        with pytest.raises(KeyError):
            wrong("a")
    tree.activate("a")
    for wrong in (tree.activate, tree.remove):
        with pytest.raises(KeyError):
            wrong("a")
    tree.finish("a")
    with pytest.raises(KeyError):
        tree.remove("a")


def test_equal_digests_of_unequal_prompts_only_mislead_the_order():
    """Whoever shares KV compares tokens; the tree must merely stay consistent."""
    tree = PrefixTree()
    for key in range(3):
        tree.insert(key, [7, 7, 7][: key + 1])
    tree.activate(0)
    assert tree.best_candidate() is not None
    tree.activate(1)
    tree.finish(0)
    tree.finish(1)
    tree.remove(2)
    assert len(tree) == 0


def lines_run(call) -> int:
    """Lines of the tree's code that a call runs: time, without a clock."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename.endswith("prefix_tree.py"):
            count += event == "line"
            return trace
        return None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def _work(waiting: int, shared: int) -> int:
    tree = PrefixTree()
    prefix = (1,) * shared
    for key in range(waiting):
        tree.insert(key, chain((*prefix, 10 + key)))
    work = lines_run(lambda: tree.insert("last", chain((*prefix, 2, 3))))
    for key in range(4):
        work += lines_run(lambda key=key: tree.activate(key))
        work += lines_run(tree.best_candidate)
    return work + lines_run(lambda: tree.finish(0)) + lines_run(lambda: tree.deactivate(1))


def test_work_does_not_grow_with_those_that_wait_nor_with_the_prefix():
    small = _work(20, 4)
    assert _work(2000, 4) < 3 * small
    assert _work(20, 400) < 3 * small
