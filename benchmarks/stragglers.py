"""Heavy-tailed outputs: when does a batch end, with fixed batches, refill, and refill in rounds?

    python -m benchmarks.stragglers --profile PROFILE.json

Simulated: the engine's own phase controllers over step times, from a profile that
``python -m surge_beam.gpu.step_times`` has written, and published ones of a GPU. Lengths are
forced: P99 is 3.8 times P95 and the longest 9.2 times, as in the trace of BatchGen (arXiv
2606.21712). Each worker gets a contiguous share of the rows.

- fixed batches: the next batch of as many rows as there are slots begins when the last row has
  ended; rows that have ended cost nothing, which favours it.
- refill in superbatches: slots are refilled, but the next superbatch begins when the last row of
  the one before has ended.
- refill: slots are refilled from all rows of the worker.
- rounds: a visit decodes at most S tokens of a row. What is unfinished is dealt anew over all
  workers once the round has ended everywhere, with its prompt and its tokens to be prefilled
  again. The last round has no such limit.
- longest first: refill with lengths known before, the longest first; nobody knows them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import save, say, show, table
from surge_beam.policy.phases import PhaseController, PhaseView, StepPlan, make_controller
from surge_beam.policy.published import PUBLISHED
from surge_beam.policy.simulate import UNLIMITED, Trace, simulate
from surge_beam.policy.step_costs import CAUTIOUS, StepCosts

P99_OVER_P95, MAX_OVER_P95 = 3.8, 9.2
PAGE_SIZE, PREFILL_BUDGET = 16, 1024
PUBLISHED_COSTS = "qwen3-8b/h200"
SLICES, ROUNDS = (0.25, 0.5, 1.0, 2.0), (2, 3)  # slices in shares of P95

Int64s = np.ndarray[Any, np.dtype[np.int64]]


def heavy_tailed(count: int, p95: float, seed: int, body: float = 1.0) -> Int64s:
    """Output tokens, int64 [count], in random order.

    Lognormal with sigma ``body`` up to P95, a power law above, cut off at the longest as a limit
    on tokens does. One length of each of ``count`` equal shares of the law, so that every seed has
    its tail.
    """
    random = np.random.default_rng(seed)
    u = (np.arange(count) + random.random(count)) / count
    normal = statistics.NormalDist()
    z = np.array([normal.inv_cdf(min(x, 0.95)) for x in u])
    lengths = p95 * np.exp(body * (z - normal.inv_cdf(0.95)))
    index = math.log(0.05 / 0.01) / math.log(P99_OVER_P95)
    above = np.minimum(np.maximum(0.05 / (1.0 - u), 1.0) ** (1.0 / index), MAX_OVER_P95)
    lengths = np.where(u > 0.95, p95 * above, lengths)
    return random.permutation(np.maximum(1, np.rint(lengths)).astype(np.int64))


class Watched:
    """A controller that notes when a step began, and how many sequences it held."""

    def __init__(self, inner: PhaseController) -> None:
        self._inner = inner
        self.name, self.phase = inner.name, inner.phase
        self.times: list[float] = []
        self._before: list[int] = []
        self._ended: list[int] = []

    def plan(self, view: PhaseView) -> StepPlan:
        self.times.append(view.now)
        self._before.append(view.occupied)
        plan = self._inner.plan(view)
        self.phase = self._inner.phase
        return plan

    def completed(self, prompt_tokens: int, output_tokens: int) -> None:
        self._inner.completed(prompt_tokens, output_tokens)

    def stepped(
        self, decode_rows: int, prefill_tokens: int, seconds: float, completions: int
    ) -> None:
        self._inner.stepped(decode_rows, prefill_tokens, seconds, completions)
        self._ended.append(completions)

    def occupied(self) -> list[int]:
        """Sequences of each step: those left after it and those that ended with it."""
        left = [*self._before[1:], 0]
        return [a + b for a, b in zip(left, self._ended, strict=True)]


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Equal workers.

    Attributes:
      costs: step times of one.
      workers, slots: how many, and sequences that each decodes at once.
      between_rounds: seconds from the end of a round to the next.
      schedule: of the engine.
    """

    costs: StepCosts
    workers: int
    slots: int = 32
    between_rounds: float = 1.0
    schedule: str = "eb+"


@dataclasses.dataclass
class Run:
    """What a batch took.

    Attributes:
      seconds: until its last row has ended, on the slowest worker.
      changes: (second, change of sequences in a slot) over all workers.
      prefilled: prompt tokens, those that were prefilled again included.
    """

    seconds: float = 0.0
    changes: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    prefilled: int = 0

    def visit(self, fleet: Fleet, prompts: Int64s, outputs: Int64s, start: float) -> float:
        """One worker takes these rows at ``start``; returns when the last has ended."""
        if not len(prompts):
            return start
        controller = Watched(
            make_controller(
                fleet.schedule,
                fleet.costs,
                kv_tokens=UNLIMITED,
                page_size=PAGE_SIZE,
                prefill_budget=PREFILL_BUDGET,
            )
        )
        rows = len(prompts)
        trace = Trace(prompts, outputs, np.zeros(rows), np.full(rows, UNLIMITED))
        report = simulate(
            controller,
            fleet.costs,
            trace,
            slots=fleet.slots,
            page_size=PAGE_SIZE,
            prefill_budget=PREFILL_BUDGET,
        )
        times = [start + t for t in controller.times] + [start + report.seconds]
        changes = np.diff([0, *controller.occupied(), 0]).tolist()
        self.changes += [(t, n) for t, n in zip(times, changes, strict=True) if n]
        self.prefilled += int(prompts.sum())
        self.seconds = max(self.seconds, start + report.seconds)
        return start + report.seconds

    def occupancy(self, slots: int) -> tuple[float, float]:
        """Mean share of all slots in use, and share of the time with fewer than half of them."""
        times, changes = (np.array(x) for x in zip(*sorted(self.changes), strict=True))
        widths = np.diff([0.0, *times, self.seconds])
        used = np.concatenate([[0], np.cumsum(changes)])
        thin = float(widths[used < slots / 2].sum())
        return float((widths * used).sum()) / slots / self.seconds, thin / self.seconds


@dataclasses.dataclass(frozen=True)
class Method:
    """How a batch is worked off.

    Attributes:
      superbatch: rows that a worker takes at once; the next begin when the last of them has
        ended. None: slots are refilled from all of its rows.
      rounds: at most; one has no limit on tokens.
      slice_tokens: S.
      longest_first: order rows by the length that they will have.
    """

    superbatch: int | None = None
    rounds: int = 1
    slice_tokens: int = 0
    longest_first: bool = False

    def __call__(self, fleet: Fleet, prompts: Int64s, outputs: Int64s) -> Run:
        run, clock = Run(), 0.0
        left = outputs.copy()
        if self.longest_first:
            shares = deal(np.argsort(-outputs, kind="stable"), fleet.workers)
        else:
            shares = np.array_split(np.arange(len(outputs)), fleet.workers)
        for number in range(1, self.rounds + 1):
            limit = self.slice_tokens if number < self.rounds else int(outputs.max())
            ends = []
            for share in shares:
                end, size = clock, self.superbatch or max(1, len(share))
                for at in range(0, len(share), size):
                    rows = share[at : at + size]
                    known = prompts[rows] + outputs[rows] - left[rows]
                    end = run.visit(fleet, known, np.minimum(left[rows], limit), end)
                ends.append(end)
            left = np.maximum(0, left - limit)
            unfinished = np.flatnonzero(left)
            if not len(unfinished):
                break
            shares = deal(unfinished, fleet.workers)
            clock = max(ends) + fleet.between_rounds
        return run


REFILL = Method()


def deal(rows: Int64s, workers: int) -> list[Int64s]:
    """Rows in turn to each worker."""
    return [rows[w::workers] for w in range(workers)]


@dataclasses.dataclass(frozen=True)
class Work:
    """Rows of one batch.

    Attributes:
      rows: how many.
      prompt: tokens of each to prefill, without what is shared.
      p95: of the output, in tokens.
      memoryless: geometric lengths of the same mean instead of heavy-tailed ones.
      clustered: rows of like length lie together, as where a prefix goes with a task.
    """

    rows: int
    prompt: int
    p95: int
    memoryless: bool = False
    clustered: bool = False

    def draw(self, seed: int) -> tuple[Int64s, Int64s]:
        """Prompt and output tokens of each row."""
        outputs = heavy_tailed(self.rows, self.p95, seed)
        random = np.random.default_rng(seed)
        if self.memoryless:
            outputs = random.geometric(1 / outputs.mean(), self.rows)
        if self.clustered:
            noise = random.normal(0.0, float(np.log(outputs).std()), self.rows)
            outputs = outputs[np.argsort(np.log(outputs) + noise)]
        return np.full(self.rows, self.prompt, np.int64), outputs


def measure(method: Method, fleet: Fleet, work: Work, seeds: int) -> dict[str, float]:
    """Medians over seeds."""
    found: list[tuple[float, ...]] = []
    for seed in range(seeds):
        prompts, outputs = work.draw(seed)
        run = method(fleet, prompts, outputs)
        used, thin = run.occupancy(fleet.workers * fleet.slots)
        found.append((run.seconds, used, thin, run.prefilled / int(prompts.sum())))
    names = ("seconds", "used", "thin", "prefilled")
    return dict(zip(names, map(statistics.median, zip(*found, strict=True)), strict=True))


def ratios(
    methods: Iterable[Method], than: Method, fleet: Fleet, work: Work, seeds: int
) -> list[float]:
    """Seconds of each method over those of another, medians over seeds."""
    drawn = [work.draw(seed) for seed in range(seeds)]
    base = [than(fleet, *rows).seconds for rows in drawn]
    return [
        statistics.median(
            method(fleet, *rows).seconds / seconds
            for rows, seconds in zip(drawn, base, strict=True)
        )
        for method in methods
    ]


def compare(
    fleet: Fleet, work: Work, seeds: int, methods: Mapping[str, Method]
) -> Iterable[list[Any]]:
    """A table row for each method."""
    found = {name: measure(method, fleet, work, seeds) for name, method in methods.items()}
    for name, figures in found.items():
        yield [
            fleet.workers,
            name,
            figures["seconds"],
            figures["seconds"] / found["refill"]["seconds"],
            100 * figures["used"],
            100 * figures["thin"],
            figures["prefilled"],
        ]


def load_costs(path: str | None) -> tuple[str, StepCosts]:
    """Step times of a profile, and what to call them."""
    if path is None:
        return "cautious defaults", CAUTIOUS
    content = json.loads(Path(path).read_text("utf-8"))
    name = f"{content['model']}, {content['device']}, {content['threads']} threads"
    return name, StepCosts.from_dict(content["step_costs"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", help="step times of a device; the cautious defaults without")
    parser.add_argument("--rows", type=int, default=1024, help="of the batch")
    parser.add_argument("--prompt", type=int, default=64, help="tokens to prefill, unshared")
    parser.add_argument("--p95", type=int, default=128, help="of the output, tokens")
    parser.add_argument("--slots", type=int, default=32, help="of a worker")
    parser.add_argument("--superbatch", type=int, default=128, help="rows")
    parser.add_argument("--between_rounds", type=float, default=1.0, help="seconds")
    parser.add_argument("--rounds", type=int, default=2, help="of the comparison")
    parser.add_argument("--slice_tokens", type=int, default=128, help="of the comparison")
    parser.add_argument("--seeds", type=int, default=5, help="medians over so many")
    parser.add_argument("--json", help="file for the raw figures")
    args = parser.parse_args(arguments)
    work = Work(args.rows, args.prompt, args.p95)
    clustered = dataclasses.replace(work, clustered=True)
    _, outputs = work.draw(0)
    p50, p95, p99 = np.quantile(outputs, (0.5, 0.95, 0.99))
    print(
        f"Outputs: mean {show(float(outputs.mean()))}, P50 {p50:.0f}, P95 {p95:.0f}, "
        f"P99 {p99:.0f} ({p99 / p95:.1f} times P95), longest {outputs.max():,} "
        f"({outputs.max() / p95:.1f} times)."
    )
    barrier = f"refill in superbatches of {args.superbatch}"
    plain = {"refill": REFILL, barrier: Method(superbatch=args.superbatch)}
    sliced = {
        f"{name}, {args.rounds} rounds of {args.slice_tokens:,}": dataclasses.replace(
            method, rounds=args.rounds, slice_tokens=args.slice_tokens
        )
        for name, method in plain.items()
    }
    methods = {
        "fixed batches": Method(superbatch=args.slots),
        **plain,
        **sliced,
        "longest first": Method(longest_first=True),
    }
    slices = [max(1, round(share * args.p95)) for share in SLICES]
    raw: dict[str, Any] = {}
    for device, costs in (load_costs(args.profile), (PUBLISHED_COSTS, PUBLISHED[PUBLISHED_COSTS])):
        fleets = [Fleet(costs, n, args.slots, args.between_rounds) for n in (2, 4)]
        say(device)
        print(f"\nStep times: {device}; {args.rows:,} rows\n")
        lines = [line for fleet in fleets for line in compare(fleet, work, args.seeds, methods)]
        header = ["workers", "method", "seconds", "over refill", "slots in use %"]
        header += ["under half in use, % of time", "prefill"]
        print(table(header, lines))

        print("\nSeconds in rounds over those of one round; lower is better\n")
        sweep = []
        for fleet in fleets:
            for label, method, rows in (
                ("refill", REFILL, work),
                (barrier, plain[barrier], work),
                ("refill, rows of like length together", REFILL, clustered),
            ):
                for most in ROUNDS:
                    tried = [
                        dataclasses.replace(method, rounds=most, slice_tokens=s) for s in slices
                    ]
                    found = ratios(tried, method, fleet, rows, args.seeds)
                    sweep.append([fleet.workers, label, most, *found])
        print(table(["workers", "method", "rounds", *(f"S = {s:,}" for s in slices)], sweep))

        print(f"\nThe same, {args.rounds} rounds of {args.slice_tokens:,}, for other batches\n")
        others = {
            "as above": work,
            "a quarter of the rows": dataclasses.replace(work, rows=work.rows // 4),
            "four times the rows": dataclasses.replace(work, rows=4 * work.rows),
            "prompts four times as long": dataclasses.replace(work, prompt=4 * work.prompt),
            "prompts sixteen times as long": dataclasses.replace(work, prompt=16 * work.prompt),
            "outputs a quarter as long": dataclasses.replace(work, p95=work.p95 // 4),
            "rows of like length together": clustered,
            "memoryless lengths": dataclasses.replace(work, memoryless=True),
        }
        pairs = list(zip(plain.values(), sliced.values(), strict=True))
        conditions = [
            [label]
            + [
                ratios([many], one, fleet, other, args.seeds)[0]
                for one, many in pairs
                for fleet in fleets
            ]
            for label, other in others.items()
        ]
        header = [f"{name}, {fleet.workers} workers" for name in plain for fleet in fleets]
        print(table(["batch", *header], conditions))
        raw[device] = {"methods": lines, "sweep": sweep, "others": conditions}
    save(args.json, raw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
