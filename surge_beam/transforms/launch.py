"""A file job as a command: options that all have, one run under its lock, and the last words."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, TestOptions
from apache_beam.runners.runner import PipelineRunner, create_runner

from surge_beam.records import RefusedError, SurgeError
from surge_beam.transforms.files import Store
from surge_beam.transforms.guard import shared_guard
from surge_beam.transforms.job import (
    EXPECTED,
    check_paths,
    exclusive,
    explain,
    finish,
)
from surge_beam.transforms.memory import share_freed_memory
from surge_beam.transforms.plan_files import PLAN, FileJob
from surge_beam.transforms.progress import Progress
from surge_beam.transforms.report import Summarise, build_report, write_report
from surge_beam.transforms.report_html import try_write_html

LOCAL_RUNNERS = ("FnApiRunner", "DirectRunner", "PrismRunner")
_DEFAULT_RUNNER = "--runner=FnApiRunner"
_ALIKE = 0.85

Job = TypeVar("Job", bound=FileJob)
_View = TypeVar("_View", bound=PipelineOptions)
Report = dict[str, Any]


def names(text: str) -> tuple[str, ...]:
    """The names of an option such as ``a,b``."""
    found = [x.strip() for x in text.split(",")]
    for name in found:
        if found.count(name) > 1 and name:
            raise argparse.ArgumentTypeError(f"{name!r} occurs more than once")
    return tuple(x for x in found if x)


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def auto(text: str) -> int | None:
    """``auto``, which is None, or an integer of at least 1."""
    return None if text == "auto" else positive(text)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Options of every file job."""
    add = parser.add_argument
    add("--input", required=True, help="file, folder or glob, on any fsspec file system")
    add("--output", required=True, help="output folder")
    add("--partition_by", type=names, default=(), help="key columns: a,b")
    add("--keep_columns", type=names, help="columns to keep; default all")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--on_bad_input", default="dead_letter", choices=("dead_letter", "fail"))
    add("--overwrite", action="store_true", help="start anew on an existing output")
    add("--prune", action="store_true", help="remove the output of inputs that are gone")
    add("--accelerator", default=FileJob.accelerator, help="Beam resource hint")


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """A job's own options, and Beam's.

    Raises:
      RefusedError: an argument is neither's. A remote runner's job server may know options that
        this process does not, so that such a runner is only refused what looks like one of ours.
    """
    args, rest = parser.parse_known_args(argv)
    beams: list[Any] = []
    beam_options = PipelineOptions([_DEFAULT_RUNNER, *rest])
    known = beam_options.get_all_options(add_extra_args_fn=beams.append)
    left = beams[0].parse_known_args(rest)[1]
    local = beam_options.view_as(StandardOptions).runner in LOCAL_RUNNERS
    before = ""
    for argument in left:
        name = argument.split("=", 1)[0]
        if not name.startswith("-"):
            if local or not before.startswith("--") or "=" in before:
                raise RefusedError(
                    f"unexpected argument {argument!r}; --input takes one file, folder or glob: put"
                    " a glob in quotes, so that the shell leaves it as it is"
                )
        else:
            alike = difflib.get_close_matches(
                name.lstrip("-").replace("-", "_"), [*vars(args), *known], 1, _ALIKE
            )
            if local or (alike and alike[0] in vars(args)):
                meant = f"; did you mean --{alike[0]}?" if alike else ", ours or Beam's"
                raise RefusedError(f"there is no option {name}{meant}")
        before = argument
    return args, rest


def run_job(
    job: Job,
    transform: Callable[[Job], beam.PTransform],
    *,
    settings: Callable[[Job], dict[str, Any]],
    summarise: Summarise,
    beam_args: list[str],
    overwrite: bool,
    after: Callable[[Store], None] = lambda store: None,
) -> Report | None:
    """Runs a job and returns its report, None of a dry run.

    Args:
      job: its ``run`` is filled in.
      transform: the job as a transform that starts from a pipeline.
      settings: what two runs on one output must agree on.
      summarise: see ``build_report``.
      beam_args: Beam's own options.
      overwrite: drop what an earlier configuration wrote.
      after: what is left to do in the output once everything is committed.

    Raises:
      RefusedError: the run may not start; nothing is written.
      SurgeError: the job failed; the message is for a person.
    """
    check_paths(job.input, job.output)
    options = _JobOptions([_DEFAULT_RUNNER, *beam_args])
    runner = _runner(options.view_as(StandardOptions).runner)
    if options.view_as(TestOptions).dry_run:
        _ = (pipeline := beam.Pipeline(runner, options=options)) | "Job" >> transform(job)
        if "dataflow" in str(options.view_as(StandardOptions).runner).lower():
            # the one runner that knows of a dry run; others would run the job
            pipeline.run()
        return None
    try:
        agreed = settings(job)
    except SurgeError as error:
        raise RefusedError(str(error)) from error
    store = Store(job.output)
    began = time.time()
    share_freed_memory()
    if options.view_as(StandardOptions).runner in LOCAL_RUNNERS:
        # it starts while the pipeline is built
        shared_guard().start()
    with exclusive(store, agreed, overwrite=overwrite) as name:
        job = dataclasses.replace(job, run=name)
        pipeline = beam.Pipeline(runner, options=options)
        _ = pipeline | "Job" >> transform(job)
        with Progress(store, job.run, PLAN):
            pipeline.run().wait_until_finish()
        # no file is replaced before the rows are known to add up
        report = build_report(store, job.run, summarise, began, time.time())
        after(store)
        write_report(store, report)
        try_write_html(store, report)
        finish(store, job.run)
    return report


class _JobOptions(PipelineOptions):
    """Beam's options, of which a view is parsed once: Beam asks for some at every transform."""

    def view_as(self, cls: type[_View]) -> _View:
        views = self.__dict__.setdefault("_views", {})
        if cls not in views:
            views[cls] = super().view_as(cls)
        return views[cls]

    def __getstate__(self) -> dict[str, Any]:
        # what Beam takes out of the options when they travel is in the views too
        return {k: v for k, v in super().__getstate__().items() if k != "_views"}


def _runner(name: Any) -> PipelineRunner:
    try:
        return create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise RefusedError(f"there is no runner {name!r}: {error}") from error


def command(
    run: Callable[[list[str] | None], Report | None],
    say: Callable[[Report], str],
    parser: Callable[[], argparse.ArgumentParser],
    argv: list[str] | None,
) -> int:
    """Runs a command and says in a person's words how it ended.

    Args:
      say: the first line about a report.
      argv: None takes the process's own, which then ends with this.

    Returns:
      The exit status: 0, 1 of a job that failed, 2 of one that may not start, 130 interrupted.
    """
    logging.basicConfig(level=logging.WARNING)
    # a runner logs the traceback of what ends the job, which is said in one line below
    logging.getLogger("apache_beam.runners").setLevel(logging.CRITICAL)
    # says at exit that it stops Prism, which would be the last word
    logging.getLogger("apache_beam.utils.subprocess_server").setLevel(logging.ERROR)
    try:
        report = run(argv)
    except RefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run again to go on", file=sys.stderr)
        return 130
    except Exception as error:
        kind, message = explain(error, parser().parse_known_args(argv)[0].output)
        if kind not in EXPECTED:
            logging.getLogger(__name__).error("the job failed", exc_info=error)
        last = f"failed: {kind}: {message}"
        if argv is None:
            _last_word(last)
        else:
            print(last, file=sys.stderr)
        return 1
    if report is None:
        print("dry run: the job graph is sound; nothing was run or written")
        return 0
    print(say(report))
    if report["files_failed"]:
        example = report["failed_file"] or {"file": "?", "message": "see the dead letters"}
        print(
            f"{report['files_failed']:,} of {report['files']:,} files could not be used, such as"
            f" {example['file']}: {example['message']}"
        )
    if report["files_passed_over"]:
        print(
            f"{report['files_passed_over']:,} files passed over: not data by their names, or links"
            " to folders"
        )
    if report["partitions_stale"] and report["files_failed"]:
        print(
            f"{report['partitions_stale']:,} stale partitions kept: their input is gone, or they"
            " are of files that could not be used; mend or remove those before --prune"
        )
    elif report["partitions_stale"]:
        print(
            f"{report['partitions_stale']:,} stale partitions kept: their input is gone;"
            " --prune removes them"
        )
    if report["partitions_pruned"]:
        print(f"{report['partitions_pruned']:,} stale partitions removed")
    print(f"{report['dead_letters']:,} dead letters")
    return 0


def _last_word(line: str) -> None:
    """The process's last line on stderr: a runner's threads may still be writing there."""
    logging.disable()
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    text = line.encode("utf-8", "backslashreplace") + b"\n"
    while text:
        text = text[os.write(stderr, text) :]
