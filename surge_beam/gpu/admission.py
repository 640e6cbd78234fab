"""Who waits for a slot, and who is next: the prefix trees of an engine, by priority."""

from __future__ import annotations

import bisect
import dataclasses
import heapq

from surge_beam.gpu.loading import step_costs
from surge_beam.gpu.sequence import Sequence, State
from surge_beam.policy.feather import (
    Admission,
    AdmissionView,
    AlwaysAdd,
    CostGate,
    Gate,
    Learner,
    reads_added,
)
from surge_beam.policy.prefix_tree import PrefixTree
from surge_beam.records import EngineConfig


def load_admission(config: EngineConfig) -> Admission:
    """The admission of a recipe, over the step times of its profile.

    Raises:
      SurgeError: if the profile cannot be read.
    """
    gate: Gate = AlwaysAdd()
    if config.admission == "cost":
        gate = CostGate(step_costs(config.profile))
    elif config.admission == "learned":
        # the cautious costs of no device would take the wrong share of prefill out of its steps
        gate = Learner(step_costs(config.profile) if config.profile else None)
    return Admission(gate, prefix_order=config.admission != "fcfs")


@dataclasses.dataclass
class _Level:
    """Sequences of one priority; ``begun`` is a heap of (-decoded, index, sequence)."""

    admission: Admission
    tree: PrefixTree = dataclasses.field(default_factory=PrefixTree)
    begun: list[tuple[int, int, Sequence]] = dataclasses.field(default_factory=list)


class WaitingRoom:
    """Sequences that wait for a slot, and those that have one.

    The highest priority is next; of it those that were evicted or came with output, most decoded
    first, since then the least work is done again; then the others, as ``Admission`` chooses by
    their prefixes. Each priority has a tree of its own, which knows the rest of the batch only by
    its size and reads. Without digests nothing is shared, and this is first come, first served.

    A parked sequence counts as one with a slot: nobody is admitted before it is back.

    Args:
      admission: who is next and when to stop; a priority gets its like.
      page_size: tokens of a page, which is the trees' chunk.
    """

    def __init__(self, admission: Admission, page_size: int) -> None:
        self._admission, self._page_size = admission, page_size
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of those that wait, ascending
        self._waiting = 0

    def __len__(self) -> int:
        """Sequences that wait."""
        return self._waiting

    def enter(self, sequence: Sequence, digests: list[int]) -> None:
        """A sequence comes to wait, with the chained digests of its pages that may be shared."""
        level = self._levels.get(sequence.request.priority)
        if level is None:
            level = _Level(self._admission.anew())
            self._levels[sequence.request.priority] = level
        level.tree.insert(sequence, digests)
        if sequence.decoded:
            heapq.heappush(level.begun, (-sequence.decoded, sequence.index, sequence))
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """An evicted sequence waits again."""
        level = self._levels[sequence.request.priority]
        level.tree.deactivate(sequence)
        heapq.heappush(level.begun, (-sequence.decoded, sequence.index, sequence))
        self._count(sequence, 1)

    def first(self) -> Sequence | None:
        """Who is next; None if nobody waits."""
        if not self._priorities:
            return None
        level = self._levels[self._priorities[-1]]
        while level.begun and not _waits(level.begun[0][2]):
            heapq.heappop(level.begun)
        if level.begun:
            return level.begun[0][2]
        candidate = level.admission.candidate(level.tree)
        assert candidate is not None and isinstance(candidate.key, Sequence)
        return candidate.key

    def admit(self, sequence: Sequence, *, running: int, reads: int) -> bool:
        """Whether ``sequence``, whom ``first`` just gave, joins the batch; it has a slot then.

        Args:
          running: sequences in the batch.
          reads: KV tokens that they hold, shared ones counted once.
        """
        level = self._levels[sequence.request.priority]
        if level.begun and level.begun[0][2] is sequence:
            heapq.heappop(level.begun)
            level.tree.activate(sequence)
        else:
            candidate = level.admission.candidate(level.tree)
            assert candidate is not None and candidate.key is sequence
            added = reads_added(
                candidate, sequence.length, running, tree=True, chunk=self._page_size
            )
            view = AdmissionView(running, candidate, reads, added)
            if not level.admission.admit(level.tree, view):
                return False
        self._count(sequence, -1)
        return True

    def leave(self, sequence: Sequence) -> None:
        """A sequence is about to end, wherever it is; does nothing if it never came."""
        level = self._levels.get(sequence.request.priority)
        if level is None or sequence not in level.tree:
            return
        if _waits(sequence):
            level.tree.remove(sequence)
            self._count(sequence, -1)
        else:
            level.tree.finish(sequence)
        if not level.tree:
            del self._levels[sequence.request.priority]

    def observe(self, rows: int, seconds: float, prefill_tokens: int, context: float) -> None:
        """A step has ended; as ``Gate.observe``."""
        self._admission.gate.observe(rows, seconds, prefill_tokens, context)

    def clear(self) -> None:
        """Forgets all."""
        self._levels.clear()
        self._priorities.clear()
        self._waiting = 0

    def _count(self, sequence: Sequence, change: int) -> None:
        """After one more of its priority waits, or one less."""
        self._waiting += change
        priority = sequence.request.priority
        waiting = self._levels[priority].tree.waiting
        if change > 0 and waiting == 1:
            bisect.insort(self._priorities, priority)
        elif waiting == 0:
            self._priorities.remove(priority)


def _waits(sequence: Sequence) -> bool:
    return sequence.state in (State.QUEUED, State.EVICTED)
