"""The part of a file job that is the same whatever is done to the rows: what there is to do.

From an input to the plans of what is left of it, and from the parts of split partitions to their
publication.
"""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.typehints import KV
from apache_beam.utils.windowed_value import WindowedValue

from surge_beam.policy.costs import CostModel
from surge_beam.policy.superbatch import Limits
from surge_beam.records import SuperBatchPlan, pack, unpack
from surge_beam.transforms import manifest
from surge_beam.transforms.exchange import SCATTER_LIMIT, Bucket, Exchange, spread, stretch
from surge_beam.transforms.files import Store, absolute, list_input
from surge_beam.transforms.guard import shared_guard
from surge_beam.transforms.plan import PlanChunk, Planner, SplitPartition
from surge_beam.transforms.read import ReadConfig, Scanner, SuperBatchReader
from surge_beam.transforms.write import WriteConfig, publish

NAMESPACE = "surge_beam"
PLAN = "_surge/plan.json"
SAMPLE_FILES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileJob:
    """What every file job has.

    Attributes:
      input: file, folder or glob.
      output: the output folder.
      run: name of this run; orders manifest entries, so later runs need later names.
      read, write: what is read and written of the rows.
      max_rows, max_bytes: what a SuperBatch never passes.
      accelerator: Beam resource hint of the steps that use a device.
      prune: remove the output of inputs that are gone.
    """

    input: str
    output: str
    run: str
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    write: WriteConfig = dataclasses.field(default_factory=WriteConfig)
    max_rows: int = 32_768
    max_bytes: int = 64 << 20
    accelerator: str = "type:nvidia-l4;count:1;install-nvidia-driver"
    prune: bool = False

    def __post_init__(self) -> None:
        # a worker's working directory is not the submitter's
        object.__setattr__(self, "input", absolute(self.input))
        object.__setattr__(self, "output", absolute(self.output))

    def limits(self, model: CostModel | None) -> Limits:
        """The thresholds of a SuperBatch, given what a call and a row cost, where measured."""
        raise NotImplementedError


def on_device(transform: beam.PTransform, device: str, accelerator: str) -> beam.PTransform:
    """Gives a step the accelerator hint, unless the CPU was asked for."""
    if device == "cpu":
        # a hint of its own keeps the step in an environment, and a process, of its own
        return transform.with_resource_hints(min_ram="2GiB")
    return transform.with_resource_hints(accelerator=accelerator)


class Planned(NamedTuple):
    """Attributes:
    plans: PCollection[bytes], each a packed ``PlanChunk`` or ``SuperBatchPlan``.
    splits: PCollection[KV[str, bytes]], split partitions by fingerprint.
    """

    plans: beam.PCollection
    splits: beam.PCollection


class PlanFiles(beam.PTransform):
    """Plans what is left to do of an input. Starts from a pipeline.

    Args:
      job: the file job.
      costs: takes ``(files passed over, packed sample of files)`` and gives ``(files passed over,
        CostModel or None)``; without it no cost is measured.
    """

    def __init__(self, job: FileJob, costs: beam.PTransform | None = None):
        super().__init__()
        self._job = job
        self._costs = costs

    def expand(self, pipeline: beam.pvalue.PBegin) -> Planned:
        job = self._job
        listed = (
            pipeline
            | "Input" >> beam.Impulse()
            | "List" >> beam.ParDo(_List(job)).with_outputs("about", main="files")
        )
        scanned = (
            listed.files
            | "SpreadFiles" >> beam.Reshuffle()
            | "Scan" >> beam.ParDo(_Scan(job)).with_output_types(tuple[int, bytes])
        )
        costs = self._costs or beam.Map(lambda about: (about[0], None))
        about = listed.about | "EncodeCosts" >> costs
        planned = (
            scanned
            | "Gather" >> beam.GroupByKey()
            | "Plan"
            >> beam.ParDo(_Plan(job), beam.pvalue.AsSingleton(about)).with_outputs(
                "splits", "buckets", "tasks", main="plans"
            )
        )
        runs = (
            planned.tasks
            | "SpreadTasks" >> beam.Reshuffle()
            | "SortRuns" >> beam.ParDo(_SortRuns(job)).with_output_types(tuple[int, bytes])
        )
        merged = (
            (keyed(planned.buckets, KV[int, bytes]), runs)
            | "BucketsAndRuns" >> beam.Flatten()
            | "JoinRuns" >> beam.GroupByKey()
            | "Merge" >> beam.ParDo(_Merge(job)).with_output_types(bytes)
        )
        plans = (planned.plans, merged) | "AllPlans" >> beam.Flatten()
        return Planned(plans, keyed(planned.splits, KV[str, bytes]))


class PublishSplits(beam.PTransform):
    """Publishes split partitions once all their parts are committed.

    Args:
      job: the file job.
      parts: PCollection[KV[str, bytes]], the fingerprint of a split partition for each part that
        was committed, and no more.
    """

    def __init__(self, job: FileJob, parts: beam.PCollection):
        super().__init__()
        self._job = job
        self._parts = parts

    def expand(self, splits: beam.PCollection) -> beam.PCollection:
        return (
            (splits, keyed(self._parts, KV[str, bytes]))
            | "SplitsAndParts" >> beam.Flatten()
            | "JoinParts" >> beam.GroupByKey()
            | "Publish" >> beam.ParDo(_Publish(self._job))
        )


def keyed(pairs: beam.PCollection, kind: Any) -> beam.PCollection:
    """Declares the type of an output that carries none, so that its key coder is deterministic."""
    pairs.element_type = kind
    return pairs


def plans_of(data: bytes) -> Iterator[SuperBatchPlan]:
    """The plans in an element of ``Planned.plans``."""
    work = unpack(data)
    yield from work.plans() if isinstance(work, PlanChunk) else (work,)


def in_global_window(output: Any) -> Any:
    """An output of a bundle's end, tagged or not, which has no window of its own."""
    window = GlobalWindow()
    if isinstance(output, beam.pvalue.TaggedOutput):
        value = WindowedValue(output.value, window.max_timestamp(), [window])
        return beam.pvalue.TaggedOutput(output.tag, value)
    return WindowedValue(output, window.max_timestamp(), [window])


def peak_rss() -> int:
    """Bytes this process had resident at most; getrusage would count a parent's before exec."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            peak = next(line for line in status if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _List(beam.DoFn):
    def __init__(self, job: FileJob):
        self._job = job

    def process(self, _: bytes) -> Iterator[Any]:
        listing = list_input(self._job.input, exclude=self._job.output)
        for file in listing.files:
            yield pack(file)
        plain = [f for f in listing.files if f.format == "parquet" and f.compression is None]
        sample = plain[:: max(1, len(plain) // SAMPLE_FILES)][:SAMPLE_FILES]
        yield beam.pvalue.TaggedOutput("about", (listing.passed_over, pack(sample)))


class _Scan(beam.DoFn):
    def __init__(self, job: FileJob):
        self._job = job

    def setup(self) -> None:
        shared_guard().start()
        self._scanner = Scanner(self._job.read, Store(self._job.output))

    def process(self, file: bytes) -> Iterator[tuple[int, bytes]]:
        # one key, since planning needs the runs of all files in one place
        for runs in self._scanner.scan(unpack(file)):
            yield 0, runs


class _Plan(beam.DoFn):
    def __init__(self, job: FileJob):
        self._job = job

    def process(
        self,
        grouped: tuple[int, Iterable[bytes]],
        about: tuple[int, CostModel | None],
    ) -> Iterator[Any]:
        passed_over, costs = about
        store = Store(self._job.output)
        limits = self._job.limits(costs)
        planner = Planner(grouped[1], manifest.load(store))
        config = self._job.read
        planner.check_kept(set(config.keep_columns or ()) - set(config.partition_by))
        scattered = planner.scattered(limits)
        splits: list[SplitPartition] = []
        chunks = self._chunks(planner, limits, splits)
        if scattered <= SCATTER_LIMIT:
            yield from map(pack, chunks)
        else:
            plans = (plan for chunk in chunks for plan in chunk.plans())
            yield from self._exchange(plans, stretch(planner.bytes_per_row))
        for split in splits:
            yield beam.pvalue.TaggedOutput("splits", (split.fingerprint, pack(split)))
        planner.tidy(store, self._job.run, prune=self._job.prune)
        plan = {
            **dataclasses.asdict(planner.summary),
            **dataclasses.asdict(limits),
            "run": self._job.run,
            "passed_over": passed_over,
            "scattered": round(scattered, 2),
            "tau": costs.tau if costs else None,
            "c": costs.c if costs else None,
        }
        store.put(PLAN, json.dumps(plan, indent=1).encode())

    @staticmethod
    def _chunks(
        planner: Planner, limits: Limits, splits: list[SplitPartition]
    ) -> Iterator[PlanChunk]:
        for item in planner.chunks(limits):
            if isinstance(item, SplitPartition):
                splits.append(item)
            else:
                yield item

    @staticmethod
    def _exchange(plans: Iterator[SuperBatchPlan], stretch_rows: int) -> Iterator[Any]:
        buckets = 0
        for item in spread(plans, stretch_rows=stretch_rows):
            if isinstance(item, Bucket):
                yield beam.pvalue.TaggedOutput("buckets", (buckets, pack(item)))
                buckets += 1
            else:
                yield beam.pvalue.TaggedOutput("tasks", pack(item))


class _Exchanging(beam.DoFn):
    """Opens what both sides of the exchange work with."""

    def __init__(self, job: FileJob):
        self._job = job

    def setup(self) -> None:
        store = Store(self._job.output)
        self._reader = SuperBatchReader(self._job.read, store)
        self._exchange = Exchange(store, self._reader)

    def teardown(self) -> None:
        self._reader.close()


class _SortRuns(_Exchanging):
    def process(self, task: bytes) -> Iterator[tuple[int, bytes]]:
        for bucket, run in self._exchange.sort(unpack(task)):
            yield bucket, pack(run)


class _Merge(_Exchanging):
    def process(self, joined: tuple[int, Iterable[bytes]]) -> Iterator[bytes]:
        """Merges a bucket: among the values are the bucket itself and its shares of runs."""
        values = list(map(unpack, joined[1]))
        runs = [value for value in values if not isinstance(value, Bucket)]
        for bucket in values:
            if isinstance(bucket, Bucket):
                for plan in self._exchange.merge(bucket, runs):
                    yield pack(plan)


class _Publish(beam.DoFn):
    """Publishes the split partitions all of whose parts are committed."""

    def __init__(self, job: FileJob):
        self._job = job

    def start_bundle(self) -> None:
        self._store = Store(self._job.output)
        self._parts: dict[str, list[dict]] | None = None

    def process(self, joined: tuple[str, Iterable[bytes]]) -> None:
        fingerprint, values = joined
        # the others say that a part is committed
        for data in filter(None, values):
            split = unpack(data)
            if self._parts is None:
                self._parts = manifest.parts_under_way(self._store)
            parts = [p for p in self._parts.get(fingerprint, []) if p["parts"] == split.parts]
            if len(parts) == split.parts:
                publish(self._store, self._job.run, split.folder, fingerprint, parts)
