"""Admission: which waiting request joins the batch next, and when to stop adding.

After Requests of a Feather Must Flock Together (arXiv 2605.06046): where the batch shares a long
prefix, a request without it can cost more than it brings. A gate says add or stop about the best
candidate of the prefix tree: one that learns it online, one that computes it, and one that always
adds. All are deterministic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Protocol

from surge_beam.policy.prefix_digests import CHUNK
from surge_beam.policy.prefix_tree import Candidate, PrefixTree
from surge_beam.policy.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class AdmissionView:
    """What a gate sees.

    Attributes:
      running: sequences in the batch, at least 1.
      candidate: the request in question; ``before`` > ``after``, it costs some common prefix.
      reads: KV tokens that a decode step of the batch reads now.
      reads_added: how many more it would read with the candidate (``reads_added`` below).
    """

    running: int
    candidate: Candidate
    reads: int = 0
    reads_added: int = 0


class Gate(Protocol):
    """Add or stop, and what came of it."""

    def add(self, view: AdmissionView) -> bool:
        """Whether the candidate joins the batch; if not, nobody does before the next step."""

    def observe(self, rows: int, seconds: float, prefill_tokens: int, context: float) -> None:
        """A step has ended.

        Args:
          rows: sequences that decoded one token each.
          seconds: the step's time.
          prefill_tokens: prompt tokens in the same step.
          context: mean tokens of the decoding sequences.
        """


class AlwaysAdd:
    """Fills the batch. With ``Admission(prefix_order=False)`` this is first come, first served."""

    def add(self, view: AdmissionView) -> bool:
        return True

    def observe(self, rows: int, seconds: float, prefill_tokens: int, context: float) -> None:
        pass


class CostGate:
    """Adds while the predicted tokens a second of decoding rise: the learner's baseline.

    A decode step of B rows that reads R tokens of KV takes T = alpha_d + b0 B + b1 R. (B + 1) over
    (T + b0 + b1 dR) exceeds B / T exactly if b0 + b1 dR < T / B.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def add(self, view: AdmissionView) -> bool:
        costs = self._costs
        step = costs.alpha_d + costs.b0 * view.running + costs.b1 * view.reads
        return (costs.b0 + costs.b1 * view.reads_added) * view.running <= step

    def observe(self, rows: int, seconds: float, prefill_tokens: int, context: float) -> None:
        pass


def reads_added(
    candidate: Candidate, tokens: int, running: int, *, tree: bool, chunk: int = CHUNK
) -> int:
    """KV tokens that a decode step reads more if a candidate joins.

    Args:
      candidate: as the prefix tree gave it.
      tokens: its length.
      running: sequences in the batch without it.
      tree: whether attention reads every shared prefix once; if not, it reads only the prefix
        common to all of them once, and the rest row by row.
      chunk: tokens of a chunk.
    """
    if tree:
        return tokens - candidate.held * chunk
    lost = (candidate.before - candidate.after) * chunk
    return lost * max(0, running - 1) + tokens - candidate.after * chunk


@dataclasses.dataclass
class _Arm:
    """Discounted count and sum of rewards."""

    count: float = 0.0
    total: float = 0.0


class Learner:
    """Feather's bandit over (batch size, prefix lost, peers), with its known defects mended.

    Discounted UCB (Garivier and Moulines, arXiv 0805.3415) in each context. The reward is decode
    tokens a second from one round of decisions to the next, and:

    - it is taken relative to the highest of late, so that its unit does not matter;
    - a context forgets with every reward it gets, so that it follows drift;
    - of a step that also prefilled, only the share that decoding had, by the step costs, counts;
      without them such steps say nothing. Prefill was needed anyway and is not held against "add";
    - it counts the rows that really decoded, and once a round for each context and action.

    Contexts are logarithmic where the paper's are linear, some 200 in place of 2,662, each of
    which has to be tried.

    Args:
      costs: to take the prefill out of mixed steps.
      discount: what a context's earlier rewards are worth at each new one, in (0, 1); the memory
        is about 1 / (1 - discount) rewards.
      exploration: how much less the other action may have brought, as a share of the reward,
        before it is hardly tried any more.
    """

    def __init__(
        self, costs: StepCosts | None = None, *, discount: float = 0.98, exploration: float = 0.05
    ) -> None:
        if not 0.0 < discount < 1.0:
            raise ValueError(f"discount must be in (0, 1), not {discount}")
        if not exploration > 0.0:
            raise ValueError(f"exploration must be above 0, not {exploration}")
        self._costs, self._discount, self._exploration = costs, discount, exploration
        self._arms: dict[tuple[int, int, int], dict[bool, _Arm]] = {}
        self._round: set[tuple[tuple[int, int, int], bool]] = set()
        self._tokens = self._seconds = self._scale = 0.0

    def add(self, view: AdmissionView) -> bool:
        if self._seconds > 0.0:
            self._settle()
        context = _context(view)
        arms = self._arms.setdefault(context, {True: _Arm(), False: _Arm()})
        # the first of equals, and so an untried "add" before an untried "stop"
        action = max((True, False), key=lambda a: self._score(arms, a))
        self._round.add((context, action))
        return action

    def observe(self, rows: int, seconds: float, prefill_tokens: int, context: float) -> None:
        if not rows or not seconds > 0.0:
            return
        if prefill_tokens:
            if self._costs is None:
                return
            whole = self._costs.step_seconds(rows, prefill_tokens, context)
            part = self._costs.step_seconds(rows, 0, context)
            seconds *= min(1.0, part / whole) if whole > 0.0 else 1.0
        self._tokens += rows
        self._seconds += seconds

    def _settle(self) -> None:
        """Credits what was decoded since to the decisions of the last round."""
        reward = self._tokens / self._seconds
        self._tokens = self._seconds = 0.0
        if self._round:
            self._scale = max(reward, self._scale * self._discount)
        for context, action in sorted(self._round):
            for arm in self._arms[context].values():
                arm.count *= self._discount
                arm.total *= self._discount
            self._arms[context][action].count += 1.0
            self._arms[context][action].total += reward
        self._round.clear()

    def _score(self, arms: dict[bool, _Arm], action: bool) -> float:
        arm = arms[action]
        if arm.count == 0.0:
            return math.inf
        rounds = arms[True].count + arms[False].count
        bonus = math.sqrt(math.log1p(rounds) / arm.count)
        return arm.total / arm.count / self._scale + self._exploration * bonus


def _context(view: AdmissionView) -> tuple[int, int, int]:
    """Batch size by halves of a power of two; peers by powers of two; chunks lost by powers of
    four, since a chunk may be a page or many.
    """
    lost = view.candidate.before - view.candidate.after
    return (
        round(2 * math.log2(view.running)),
        min((lost.bit_length() + 1) // 2, 4),
        min(view.candidate.peers.bit_length(), 4),
    )


class Admission:
    """Chooses the next request to admit.

    First come, first served is ``prefix_order=False`` with ``AlwaysAdd``. In prefix order the gate
    is asked only where there is something to lose: not below ``floor`` running sequences, as a
    batch that is too small wastes more than any prefix saves; not where the candidate keeps all
    of the common prefix, which is always so if there is none. So where nothing is shared every
    request is admitted at once, first come, first served.

    Nothing starves: once the oldest waiting request was passed over by ``patience`` admissions, or
    by ``patience_stops`` refusals, it is next, whatever it shares and whatever the gate says (with
    admissions alone this is k-LPM, arXiv 2502.04677).

    Args:
      gate: add or stop.
      prefix_order: the best candidate of the tree is next; else the oldest.
      floor: running sequences below which one is always added, at least 2.
      patience, patience_stops: how long the oldest lets others go first.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        prefix_order: bool = True,
        floor: int = 8,
        patience: int = 64,
        patience_stops: int = 512,
    ) -> None:
        if floor < 2:
            # all of a single request's prompt counts as common, and everybody would lose some
            raise ValueError(f"floor must be at least 2, not {floor}")
        if min(patience, patience_stops) < 1:
            raise ValueError("patience and patience_stops must be at least 1")
        self.gate = gate
        self._prefix_order, self._floor = prefix_order, floor
        self._patience, self._patience_stops = patience, patience_stops
        self._oldest: Hashable = None
        self._passed = self._stops = 0

    def anew(self) -> Admission:
        """Another with the same gate and limits, for another tree."""
        return Admission(
            self.gate,
            prefix_order=self._prefix_order,
            floor=self._floor,
            patience=self._patience,
            patience_stops=self._patience_stops,
        )

    def candidate(self, tree: PrefixTree) -> Candidate | None:
        """Who would be next; None if nobody waits."""
        if self._overdue(tree) or not self._prefix_order:
            return tree.oldest_candidate()
        best = tree.best_candidate()
        # of those that share nothing with the batch the tree's best is but the shortest
        return best if best is None or best.held else tree.oldest_candidate()

    def admit(self, tree: PrefixTree, view: AdmissionView) -> bool:
        """Decides about ``view.candidate``, which ``candidate`` just gave; activates it if so.

        After False ask again after the next step. ``view.running`` may be 0 here.
        """
        candidate = view.candidate
        needless = view.running < self._floor or candidate.after >= candidate.before
        if needless or self._overdue(tree) or self.gate.add(view):
            self._passed += 1
            tree.activate(candidate.key)
            return True
        self._stops += 1
        return False

    def _overdue(self, tree: PrefixTree) -> bool:
        oldest = tree.oldest_candidate()
        key = None if oldest is None else oldest.key
        if key != self._oldest:
            self._oldest, self._passed, self._stops = key, 0, 0
        return self._passed >= self._patience or self._stops >= self._patience_stops
