"""A decode engine without a model: the controllers of ``phases`` over step times from a formula.

Counts every step, page and preemption, but holds sequences as numbers: a step costs the same
whether ten or a thousand decode. All decoding sequences grow by a token a step, so that their end
and their next page are known when they begin.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from surge_beam.policy.phases import PhaseController, PhaseView
from surge_beam.policy.step_costs import StepCosts


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive.

    Attributes:
      prompts: int64 [n], prompt tokens, at least 1.
      outputs: int64 [n], tokens to decode, at least 1; the prefill yields the first.
      arrivals: float64 [n], seconds before which a request does not arrive, rising.
      concurrency: int64 [n]; a request arrives only when fewer than this are unfinished.
    """

    prompts: np.ndarray
    outputs: np.ndarray
    arrivals: np.ndarray
    concurrency: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)


UNLIMITED = 1 << 40


def synthetic_trace(
    count: int,
    prompt: float,
    output: float,
    *,
    seed: int,
    prompt_law: str = "fixed",
    output_law: str = "geometric",
    rate: float = math.inf,
    concurrency: int = UNLIMITED,
) -> Trace:
    """Random requests.

    Args:
      count: how many.
      prompt, output: mean tokens.
      seed: of the random numbers.
      prompt_law, output_law: ``fixed``, ``geometric``, ``gamma`` (shape 4), ``uniform`` (up to
        twice the mean) or ``lognormal`` (sigma 1).
      rate: Poisson arrivals a second; all at once if infinite.
      concurrency: most unfinished requests.

    Raises:
      ValueError: another law.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0 / rate, count) if math.isfinite(rate) else np.zeros(count)
    return Trace(
        prompts=_lengths(rng, prompt_law, prompt, count),
        outputs=_lengths(rng, output_law, output, count),
        arrivals=np.cumsum(gaps),
        concurrency=np.full(count, concurrency),
    )


def _lengths(rng: np.random.Generator, law: str, mean: float, count: int) -> np.ndarray:
    if law == "fixed":
        drawn = np.full(count, mean)
    elif law == "geometric":
        drawn = rng.geometric(1.0 / mean, count).astype(np.float64)
    elif law == "gamma":
        drawn = rng.gamma(4.0, mean / 4.0, count)
    elif law == "uniform":
        drawn = rng.uniform(0.0, 2.0 * mean, count)
    elif law == "lognormal":
        drawn = rng.lognormal(math.log(mean) - 0.5, 1.0, count)
    else:
        raise ValueError(f"unknown law of lengths: {law!r}")
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace after another; for load that shifts."""
    arrays = zip(*(dataclasses.astuple(trace) for trace in traces), strict=True)
    prompts, outputs, arrivals, concurrency = map(np.concatenate, arrays)
    return Trace(prompts, outputs, np.maximum.accumulate(arrivals), concurrency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a simulation saw; seconds and tokens.

    Attributes:
      seconds: from the first arrival to the end.
      completed: requests that ended.
      throughput: tokens a second of prompts prefilled (once each) and tokens decoded.
      ttft: mean seconds from arrival to the first token.
      tpot: mean seconds a token after the first, over requests with two tokens or more.
      steps: steps by the phase that planned them.
      switches: changes of phase from one step to the next.
      kv_peak: most tokens in the pool.
      refill_peaks: the most between two turns from prefill to decode; one entry a turn.
      preemptions: sequences dropped for want of pages, to be prefilled again.
      recomputed: tokens prefilled again.
    """

    seconds: float
    completed: int
    throughput: float
    ttft: float
    tpot: float
    steps: dict[str, int]
    switches: int
    kv_peak: int
    refill_peaks: tuple[int, ...]
    preemptions: int
    recomputed: int


@dataclasses.dataclass
class _Sequence:
    index: int
    prompt: int  # tokens to prefill: the prompt, and after a preemption what was decoded
    output: int
    left: int  # tokens to decode
    arrived: float
    first_token: float = math.nan
    prefilled: int = 0
    pages: int = 0  # while prefilling
    began: int = 0  # decode steps done when its own began
    seen: int = 0  # leading tokens that were in the pool before


# Plans in a row that may come to nothing: a controller learns of a refill without pages only by
# trying. More would go on for ever, since no time passes.
_PATIENCE = 3


class _Simulation:
    """Sequences, pages and clock of one run.

    A decoding sequence has prompt + (ticks - began) tokens, where ``ticks`` counts decode steps.
    """

    def __init__(
        self, costs: StepCosts, slots: int, kv_tokens: int, page_size: int, prefill_budget: int
    ):
        self.costs = costs
        self.slots = slots
        self.page_size = page_size
        self.pages = kv_tokens // page_size
        self.budget = prefill_budget
        self.clock = 0.0
        self.ticks = 0
        self.used = 0  # pages
        self.tokens = 0  # in the pool, of which of decoding sequences:
        self.decoding_tokens = 0
        self.waiting: deque[_Sequence] = deque()
        self.prefilling: deque[_Sequence] = deque()
        self.decoding: dict[int, _Sequence] = {}  # by index, oldest admission first
        self.ends: list[tuple[int, int]] = []  # (ticks, index), of decoding ones and stale
        # Decoding sequences by (tokens - ticks) mod page_size: those of a class begin a new page
        # at the same tick.
        self.classes = np.zeros(page_size, dtype=np.int64)
        self.fresh = 0  # tokens that count for throughput
        self.recomputed = 0
        self.preemptions = 0
        self.ended: list[_Sequence] = []
        self.first_tokens: list[float] = []  # seconds from arrival
        self.paces: list[float] = []  # seconds a token

    def view(self) -> PhaseView:
        running = len(self.decoding) + len(self.prefilling)
        return PhaseView(
            waiting=len(self.waiting),
            prefilling=len(self.prefilling),
            decoding=len(self.decoding),
            slots=self.slots,
            kv_short=self.pages - self.used < running,
            now=self.clock,
        )

    def admit(self, most: int) -> None:
        ahead = sum(x.prompt - x.prefilled for x in self.prefilling)
        while self.waiting and most > 0 and ahead < self.budget:
            sequence = self.waiting[0]
            pages = -(-sequence.prompt // self.page_size)
            if self.used + pages > self.pages:
                break
            self.waiting.popleft()
            self.prefilling.append(sequence)
            sequence.pages = pages
            self.used += pages
            ahead += sequence.prompt
            most -= 1

    def prefill(self) -> tuple[int, list[_Sequence]]:
        """Prompt tokens of this step, and the sequences whose prompt it finishes."""
        room, finished = self.budget, []
        while self.prefilling and room:
            sequence = self.prefilling[0]
            tokens = min(room, sequence.prompt - sequence.prefilled)
            again = min(tokens, max(0, sequence.seen - sequence.prefilled))
            sequence.prefilled += tokens
            self.tokens += tokens
            self.recomputed += again
            self.fresh += tokens - again
            room -= tokens
            if sequence.prefilled == sequence.prompt:
                finished.append(self.prefilling.popleft())
        return self.budget - room, finished

    def page_class(self, sequence: _Sequence) -> int:
        return (sequence.prompt - sequence.began) % self.page_size

    def decode(self) -> int:
        """Makes room by preempting the latest, and decodes a token of the rest; their number."""
        due = -self.ticks % self.page_size
        while self.used + int(self.classes[due]) > self.pages:
            self.preempt()
        rows = len(self.decoding)
        self.used += int(self.classes[due])
        self.ticks += 1
        self.tokens += rows
        self.decoding_tokens += rows
        self.fresh += rows
        return rows

    def preempt(self) -> None:
        if self.prefilling:
            sequence = self.prefilling.pop()
            self.tokens -= sequence.prefilled
            self.used -= sequence.pages
            sequence.seen = max(sequence.seen, sequence.prefilled)
        else:
            _, sequence = self.decoding.popitem()
            done = self.release(sequence)
            # The prefill yielded a token too, which has no KV yet.
            sequence.prompt += done + 1
            sequence.left -= done
            sequence.seen = sequence.prompt
        sequence.prefilled = 0
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def release(self, sequence: _Sequence) -> int:
        """Frees a sequence that was decoding; the tokens it has decoded."""
        done = self.ticks - sequence.began
        held = sequence.prompt + done
        self.tokens -= held
        self.decoding_tokens -= held
        self.used -= -(-held // self.page_size)
        self.classes[self.page_class(sequence)] -= 1
        return done

    def start(self, sequence: _Sequence) -> None:
        """After its prefill, which yields a token; ends it if that was the last."""
        if math.isnan(sequence.first_token):
            sequence.first_token = self.clock
            self.first_tokens.append(self.clock - sequence.arrived)
        sequence.left -= 1
        sequence.began = self.ticks
        self.fresh += 1
        if not sequence.left:
            self.tokens -= sequence.prompt
            self.used -= sequence.pages
            self.end(sequence)
            return
        self.decoding[sequence.index] = sequence
        self.decoding_tokens += sequence.prompt
        self.classes[self.page_class(sequence)] += 1
        heapq.heappush(self.ends, (self.ticks + sequence.left, sequence.index))

    def finish(self) -> None:
        """Ends those whose last token this step decoded."""
        while self.ends and self.ends[0][0] <= self.ticks:
            tick, index = heapq.heappop(self.ends)
            sequence = self.decoding.get(index)
            if sequence is None or sequence.began + sequence.left != tick:
                continue  # preempted since
            del self.decoding[index]
            self.release(sequence)
            self.end(sequence)

    def end(self, sequence: _Sequence) -> None:
        self.ended.append(sequence)
        if sequence.output > 1:
            pace = (self.clock - sequence.first_token) / (sequence.output - 1)
            self.paces.append(pace)


def simulate(
    controller: PhaseController,
    costs: StepCosts,
    trace: Trace,
    *,
    slots: int,
    kv_tokens: int = UNLIMITED,
    page_size: int = 16,
    prefill_budget: int = 8192,
    drain: bool = True,
) -> Report:
    """Runs a trace to its end.

    A prompt takes all its pages on admission. When pages run out, the sequence admitted last is
    dropped and later prefilled again with the tokens it has decoded. The pool counts as short
    when it could not give each admitted sequence one more page.

    Args:
      controller: decides the steps; a new one.
      costs: what they take.
      trace: requests.
      slots: most sequences admitted at once.
      kv_tokens, page_size: the KV pool.
      prefill_budget: most prompt tokens in a step; longer prompts are prefilled in chunks.
      drain: go on until all requests have ended; else until none is waiting or to come, for
        rates under a full queue.

    Raises:
      ValueError: a request that cannot fit the pool.
      RuntimeError: the controller let the engine stand still.
    """
    largest = int(np.max(trace.prompts + trace.outputs, initial=0))
    if largest > kv_tokens // page_size * page_size:
        raise ValueError(f"a request of {largest} tokens cannot fit {kv_tokens} tokens of KV")
    state = _Simulation(costs, slots, kv_tokens, page_size, prefill_budget)
    arrivals, concurrency = trace.arrivals.tolist(), trace.concurrency.tolist()
    prompts, outputs = trace.prompts.tolist(), trace.outputs.tolist()
    state.clock = start = arrivals[0] if arrivals else 0.0
    coming, idle = 0, 0
    steps: dict[str, int] = {}
    switches, previous = 0, ""
    peak, cycle_peak, refill_peaks = 0, 0, []
    while True:
        while (
            coming < len(trace)
            and arrivals[coming] <= state.clock
            and coming - len(state.ended) < concurrency[coming]
        ):
            output = outputs[coming]
            state.waiting.append(
                _Sequence(coming, prompts[coming], output, left=output, arrived=state.clock)
            )
            coming += 1
        view = state.view()
        if not (view.waiting or view.occupied):
            if coming == len(trace):
                break
            state.clock = max(state.clock, arrivals[coming])
            continue
        if not (drain or view.waiting or coming < len(trace)):
            break
        plan = controller.plan(view)
        if plan.prefill:
            state.admit(min(plan.admit, slots - view.occupied))
        rows = state.decode() if plan.decode else 0
        tokens, context = 0, state.decoding_tokens / rows if rows else 0.0
        finished: list[_Sequence] = []
        if plan.prefill:
            tokens, finished = state.prefill()
        idle = 0 if rows or tokens else idle + 1
        if idle > _PATIENCE:
            raise RuntimeError(f"{controller.name} makes no progress at {view}")
        seconds = costs.step_seconds(rows, tokens, context)
        state.clock += seconds
        held = state.tokens
        before = len(state.ended)
        if rows:
            state.finish()
        for sequence in finished:
            state.start(sequence)
        if rows or tokens:
            phase = controller.phase
            steps[phase] = steps.get(phase, 0) + 1
            switches += previous not in ("", phase)
            if previous == "prefill" and phase != "prefill":
                refill_peaks.append(cycle_peak)
                cycle_peak = 0
            peak, cycle_peak = max(peak, held), max(cycle_peak, held)
            previous = phase
        for sequence in state.ended[before:]:
            index = sequence.index
            controller.completed(prompts[index], outputs[index])
        controller.stepped(rows, tokens, seconds, len(state.ended) - before)
    seconds = state.clock - start
    return Report(
        seconds=seconds,
        completed=len(state.ended),
        throughput=state.fresh / seconds if seconds else 0.0,
        ttft=float(np.mean(state.first_tokens)) if state.first_tokens else 0.0,
        tpot=float(np.mean(state.paces)) if state.paces else 0.0,
        steps=steps,
        switches=switches,
        kv_peak=peak,
        refill_peaks=tuple(refill_peaks),
        preemptions=state.preemptions,
        recomputed=state.recomputed,
    )
