"""Which kind of step comes next: exclusive, mixed, or whichever pays (arXiv 2606.00516).

A controller sees counts and answers with a plan; the engine and the simulator drive it alike:
``plan`` before a step, ``stepped`` after it, ``completed`` for every request that ended.

- ``mb`` puts prefill and decode into every step.
- ``eb`` decodes until enough slots are free, then only prefills until they are filled.
- ``eb+`` estimates the load and runs as one or the other; it begins with ``mb``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Protocol

import numpy as np

from surge_beam.policy.batching import (
    Workload,
    memory_safe_slots,
    refill_size,
    round_to_budget,
    should_refill,
    theta0,
    theta_sqrt,
    throughput_eb,
    throughput_mb,
)
from surge_beam.policy.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class PhaseView:
    """What a controller sees before a step.

    Attributes:
      waiting: requests not admitted.
      prefilling: requests admitted whose prompt is not finished.
      decoding: requests with a finished prompt and a slot.
      slots: most requests admitted at once, at least 1.
      kv_short: the KV pool is under pressure; it is best not to admit.
      now: seconds of the engine's clock.
    """

    waiting: int
    prefilling: int
    decoding: int
    slots: int
    kv_short: bool
    now: float

    @property
    def occupied(self) -> int:
        return self.prefilling + self.decoding


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What the next step holds.

    Attributes:
      prefill: prompt tokens of those prefilling, and of those admitted now.
      decode: a token of every decoding request.
      admit: most waiting requests to admit now; 0 unless ``prefill``.
    """

    prefill: bool
    decode: bool
    admit: int


IDLE = StepPlan(prefill=False, decode=False, admit=0)


class PhaseController(Protocol):
    """Attributes: ``name`` of the schedule; ``phase`` of the last plan, for statistics:
    ``prefill``, ``decode``, ``mixed`` or ``idle``.
    """

    name: str
    phase: str

    def plan(self, view: PhaseView) -> StepPlan:
        """The next step; prefill or decode, or both, unless there is nothing to do."""

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended.

        Args:
          prompt_tokens: of its prompt, those that had to be prefilled; tokens found in shared
            pages cost neither time nor memory.
          output_tokens: decoded.
        """

    def stepped(
        self, decode_rows: int, prefill_tokens: int, seconds: float, completions: int
    ) -> None:
        """A step has run: what it held, how long it took, how many requests ended with it."""


def make_controller(
    schedule: str,
    costs: StepCosts,
    *,
    kv_tokens: int,
    page_size: int,
    prefill_budget: int | None = None,
) -> PhaseController:
    """The controller of a schedule.

    Args:
      schedule: ``eb``, ``mb`` or ``eb+``.
      costs: step times of the device.
      kv_tokens: capacity of the KV pool.
      page_size: tokens of a page.
      prefill_budget: most prompt tokens in a step; refills are rounded to whole steps.

    Raises:
      ValueError: another schedule.
    """
    if schedule == "mb":
        return MixedBatching()
    if schedule not in ("eb", "eb+"):
        raise ValueError(f"schedule must be eb, mb or eb+, not {schedule!r}")
    exclusive = ExclusiveBatching(
        costs, kv_tokens=kv_tokens, page_size=page_size, prefill_budget=prefill_budget
    )
    return exclusive if schedule == "eb" else AdaptiveBatching(costs, exclusive)


PRIOR_OUTPUT = 256.0  # mean decode steps, before there is data
WINDOW = 500  # completions that an estimate rests on, at least
CHUNKS = 8  # pieces in which the window moves
MIN_SAMPLES = 30  # completions before the first estimate
PERIOD = 100  # completions from one estimate to the next


class LoadEstimator:
    """Lengths of recent requests, from completions and from exposure.

    A mean over recent completions alone is wrong while the load changes: at first only short
    requests have ended, at last only long ones are left, by factors of 10 and 3. The hazard
    p0 = completions / active slot-steps counts the unfinished ones and is right throughout.
    """

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._chunks: deque[tuple[int, int]] = deque(maxlen=CHUNKS)
        self._rows = 0
        self._ended = 0

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        self._lengths.append((prompt_tokens, output_tokens))

    def stepped(self, decode_rows: int, completions: int) -> None:
        self._rows += decode_rows
        self._ended += completions
        # No fewer than the rows, or requests in step with each other would end outside of it.
        if self._ended * CHUNKS >= max(WINDOW, decode_rows):
            self._chunks.append((self._rows, self._ended))
            self._rows = self._ended = 0

    @property
    def hazard(self) -> float:
        """p0, completions a slot-step, in (0, 0.5]; of the prior as long as nothing has ended."""
        rows = self._rows + sum(rows for rows, _ in self._chunks)
        ended = self._ended + sum(ended for _, ended in self._chunks)
        if not ended:
            return 1.0 / PRIOR_OUTPUT
        return min(0.5, ended / rows) if rows else 0.5

    def workload(self) -> Workload | None:
        """The estimate; None before ``MIN_SAMPLES`` completions.

        The age of a slot is that of memoryless lengths or more: lengths that vary less are in
        step with each other for a while, and those that vary more are older.
        """
        if len(self._lengths) < MIN_SAMPLES:
            return None
        prompts, outputs = np.array(self._lengths, dtype=np.float64).T
        output = 1.0 / self.hazard
        first, second, third = (float(np.mean(outputs**n)) for n in (1, 2, 3))
        age = max(1.0, second / (2.0 * first**2)) if first > 0 else 1.0
        variance = max(1.0, third / (3.0 * first**3) - age**2) if first > 0 else 1.0
        return Workload(
            prompt=float(np.mean(prompts)),
            output=output,
            prompt_variance=float(np.var(prompts)),
            age=output * age,
            age_variance=output**2 * variance,
        )


class MixedBatching:
    """MB: every step holds what there is of prefill and decode."""

    name = "mb"

    def __init__(self) -> None:
        self.phase = "idle"

    def plan(self, view: PhaseView) -> StepPlan:
        admit = max(0, min(view.waiting, view.slots - view.occupied))
        if view.kv_short and view.occupied:
            admit = 0
        plan = StepPlan(
            prefill=bool(view.prefilling or admit), decode=view.decoding > 0, admit=admit
        )
        self.phase = _phase(plan)
        return plan

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def stepped(
        self, decode_rows: int, prefill_tokens: int, seconds: float, completions: int
    ) -> None:
        pass


class ExclusiveBatching:
    """EB: a step holds prefill or decode.

    Decodes until a refill is due, then prefills until as many requests are admitted as it was
    due for. A chunked prompt is finished before decoding goes on, unless KV is short. A prefill
    step that neither admits nor prefills (the engine found no pages) turns to decoding, and no
    other is tried before the number of admitted requests has changed.

    Args:
      costs: step times.
      kv_tokens, page_size: the KV pool, which limits N.
      prefill_budget: most prompt tokens in a step.
      k: slots to free before a refill; None follows the load.
    """

    name = "eb"

    def __init__(
        self,
        costs: StepCosts,
        *,
        kv_tokens: int,
        page_size: int,
        prefill_budget: int | None = None,
        k: int | None = None,
    ) -> None:
        self.phase = "idle"
        self.work: Workload | None = None
        self._costs = costs
        self._kv_tokens = kv_tokens
        self._page_size = page_size
        self._budget = prefill_budget
        self._k = k
        self._load = LoadEstimator()
        self._until_estimate = MIN_SAMPLES
        self._limits: dict[int, tuple[int, int]] = {}
        self.enter()

    def enter(self) -> None:
        """Begins anew with whatever is admitted; the estimates stay."""
        self.phase = "idle"
        self._left = 0  # admissions that this refill still allows
        self._stalled = False
        self._occupied = 0  # at the last plan, and since then:
        self._ended = 0
        self._prefilled = 0

    def plan(self, view: PhaseView) -> StepPlan:
        self._account(view)
        if not view.occupied and not view.waiting:
            self.phase = "idle"
            return IDLE
        slots, k = self.limits(view.slots)
        room = max(0, min(view.waiting, slots - view.occupied))
        if not view.decoding:
            prefill = True
            self._left = room
        elif view.kv_short or self._stalled:
            prefill = False
        elif view.prefilling or min(self._left, room):
            prefill = True
        elif should_refill(view.decoding, view.waiting, slots, k):
            prefill = True
            self._left = room
        else:
            prefill = False
        if not prefill:
            self._left = 0
        plan = StepPlan(prefill=prefill, decode=not prefill, admit=min(self._left, room))
        self.phase = _phase(plan)
        return plan

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        self._load.completed(prompt_tokens, output_tokens)
        self._until_estimate -= 1

    def stepped(
        self, decode_rows: int, prefill_tokens: int, seconds: float, completions: int
    ) -> None:
        self._load.stepped(decode_rows, completions)
        self._ended += completions
        self._prefilled += prefill_tokens
        if self._until_estimate <= 0:
            self.work = self._load.workload()
            self._limits.clear()
            self._until_estimate = PERIOD

    def limits(self, slots: int) -> tuple[int, int]:
        """N and k: slots in use, as far as KV allows, and how many of them make a refill."""
        if slots not in self._limits:
            self._limits[slots] = self._find_limits(slots)
        return self._limits[slots]

    def _find_limits(self, slots: int) -> tuple[int, int]:
        if self._k is not None:
            return slots, max(1, min(self._k, slots - 1))
        if self.work is None:
            k = round(theta_sqrt(self._costs, 1.0 / PRIOR_OUTPUT) * slots)
            return slots, max(1, min(k, slots - 1))
        theta = theta0(self._costs, self.work.p0)
        safe = memory_safe_slots(
            self._kv_tokens, self.work, min(theta, 0.99), page_size=self._page_size
        )
        slots = max(1, min(slots, safe))
        k = refill_size(self._costs, self.work.p0, slots)
        if self._budget is not None:
            k = round_to_budget(k, self.work.prompt, self._budget)
        return slots, max(1, min(k, slots - 1))

    def _account(self, view: PhaseView) -> None:
        """What has become of the last plan."""
        admitted = max(0, view.occupied - self._occupied + self._ended)
        if admitted or self._ended or view.occupied != self._occupied:
            self._stalled = False
        elif self.phase == "prefill" and not self._prefilled:
            self._stalled = True
        self._left = max(0, self._left - admitted)
        self._occupied, self._ended, self._prefilled = view.occupied, 0, 0


RISE, FALL = 0.3, 0.03  # weights of a step in the average demand
MIN_DEMAND = 16  # below it EB is never begun
MARGIN = 0.03  # relative gain that a switch has to promise
COOL_DOWN = 3 * PERIOD  # completions between two switches


class AdaptiveBatching:
    """EB+: runs as MB or EB, whichever the closed forms prefer at the load of the moment.

    It is judged every ``PERIOD`` completions, and at once when demand doubles. The gain is
    relative, TP_EB / TP_MB - 1, so that the margin needs no scale of its own. Requests in the
    middle of their prefill are finished first after a switch to EB.
    """

    name = "eb+"

    def __init__(self, costs: StepCosts, exclusive: ExclusiveBatching) -> None:
        self.phase = "idle"
        self.exclusive = False
        self.demand = 0.0  # requests that could run at once, a quick average
        self._costs = costs
        self._eb = exclusive
        self._mb = MixedBatching()
        self._since_judged = 0
        self._since_switch = COOL_DOWN

    def plan(self, view: PhaseView) -> StepPlan:
        slots, _ = self._eb.limits(view.slots)
        demand = min(slots, view.occupied + view.waiting)
        surge = demand > 2 * self.demand
        self.demand += (RISE if demand > self.demand else FALL) * (demand - self.demand)
        if surge or self._since_judged >= PERIOD:
            self._judge()
        active = self._eb if self.exclusive else self._mb
        plan = active.plan(view)
        self.phase = active.phase
        return plan

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        self._eb.completed(prompt_tokens, output_tokens)
        self._since_judged += 1
        self._since_switch += 1

    def stepped(
        self, decode_rows: int, prefill_tokens: int, seconds: float, completions: int
    ) -> None:
        self._eb.stepped(decode_rows, prefill_tokens, seconds, completions)

    def _judge(self) -> None:
        work, slots = self._eb.work, round(self.demand)
        if work is None or slots < 2 or self._since_switch < COOL_DOWN:
            return
        self._since_judged = 0
        theta = refill_size(self._costs, work.p0, slots) / slots
        gain = throughput_eb(self._costs, work, slots, theta)
        gain = gain / throughput_mb(self._costs, work, slots) - 1.0
        if self.exclusive:
            switch = gain < -MARGIN
        else:
            switch = gain > MARGIN and slots >= MIN_DEMAND
        if switch:
            self.exclusive = not self.exclusive
            self._since_switch = 0
            self._eb.enter()


def _phase(plan: StepPlan) -> str:
    if plan.prefill:
        return "mixed" if plan.decode else "prefill"
    return "decode" if plan.decode else "idle"
