"""Embeds a partitioned corpus: ``python pipelines/embed_corpus.py --help``."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
import time

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, TestOptions

from surge_beam.gpu.encoder import model_identity
from surge_beam.records import EncoderConfig, RefusedError
from surge_beam.transforms.embed_files import PLAN, EmbedConfig, EmbedFiles
from surge_beam.transforms.files import Store
from surge_beam.transforms.guard import shared_guard
from surge_beam.transforms.job import (
    EXPECTED,
    check_paths,
    exclusive,
    explain,
    finish,
    hand_memory_back,
    named,
)
from surge_beam.transforms.progress import Progress
from surge_beam.transforms.read import ReadConfig
from surge_beam.transforms.report import build_report, write_report
from surge_beam.transforms.report_html import try_write_html
from surge_beam.transforms.write import WriteConfig

LOCAL_RUNNERS = ("FnApiRunner", "DirectRunner", "PrismRunner")


def parser() -> argparse.ArgumentParser:
    names = lambda text: tuple(x for x in text.split(",") if x)  # noqa: E731
    auto = lambda text: None if text == "auto" else positive(text)  # noqa: E731
    p = argparse.ArgumentParser(
        prog="embed_corpus.py",
        description="Embeds every partition of a corpus. Any Apache Beam option may follow.",
    )
    p.add_argument("--input", required=True, help="file, folder or glob, on any fsspec file system")
    p.add_argument("--output", required=True, help="output folder")
    p.add_argument("--text_column", default="text", help="the column to embed")
    p.add_argument("--partition_by", type=names, default=(), help="key columns: a,b")
    p.add_argument("--keep_columns", type=names, help="columns to keep; default all")
    p.add_argument("--model", default="all-MiniLM-L6-v2", help="model name or folder")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--prompt", help="text put before every row")
    p.add_argument("--truncate_dim", type=positive, help="keep the first N dimensions")
    p.add_argument("--output_dtype", default="float32", choices=("float32", "float16"))
    p.add_argument("--min_rows", type=auto, help="rows a SuperBatch reaches: auto or N")
    p.add_argument("--max_rows", type=positive, default=EmbedConfig.max_rows)
    p.add_argument("--max_bytes", type=positive, default=EmbedConfig.max_bytes)
    p.add_argument("--max_padded_tokens", type=auto, help="tokens in a forward pass: auto or N")
    p.add_argument("--dedupe", default=True, action=argparse.BooleanOptionalAction)
    p.add_argument("--no_dedupe", dest="dedupe", action="store_false", help=argparse.SUPPRESS)
    p.add_argument("--on_bad_input", default="dead_letter", choices=("dead_letter", "fail"))
    p.add_argument("--overwrite", action="store_true", help="start anew on an existing output")
    p.add_argument("--prune", action="store_true", help="remove the output of inputs that are gone")
    p.add_argument("--accelerator", default=EmbedConfig.accelerator, help="Beam resource hint")
    return p


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def config_of(args: argparse.Namespace, run: str) -> EmbedConfig:
    return EmbedConfig(
        input=args.input,
        output=args.output,
        run=run,
        read=ReadConfig(
            text_column=args.text_column,
            partition_by=args.partition_by,
            keep_columns=args.keep_columns,
            fail_on_bad_input=args.on_bad_input == "fail",
        ),
        encoder=EncoderConfig(
            model=args.model,
            dtype=args.dtype,
            device=args.device,
            prompt=args.prompt,
            truncate_dim=args.truncate_dim,
            max_padded_tokens=args.max_padded_tokens,
            dedupe=args.dedupe,
            require_accelerator=args.device == "cuda",
        ),
        write=WriteConfig(
            columns=args.keep_columns, drop=args.partition_by, vector_type=args.output_dtype
        ),
        min_rows=args.min_rows,
        max_rows=args.max_rows,
        max_bytes=args.max_bytes,
        accelerator=args.accelerator,
        prune=args.prune,
    )


def settings_of(config: EmbedConfig) -> dict:
    """What two runs on one output must agree on."""
    encoder = config.encoder
    return {
        "text_column": config.read.text_column,
        "partition_by": list(config.read.partition_by),
        "keep_columns": config.write.columns and list(config.write.columns),
        "model": named(encoder.model, model_identity(encoder)),
        "dtype": encoder.dtype,
        "prompt": encoder.prompt,
        "truncate_dim": encoder.truncate_dim,
        "output_dtype": config.write.vector_type,
    }


def run(argv: list[str] | None = None) -> dict | None:
    """Runs the job and returns its report, None of a dry run.

    Raises:
      RefusedError: the run may not start; nothing is written.
      SurgeError: the job failed; the message is for a person.
    """
    args, beam_args = parser().parse_known_args(argv)
    config = config_of(args, "")
    check_paths(config.input, config.output)
    options = PipelineOptions(["--runner=FnApiRunner", *beam_args])
    if options.view_as(TestOptions).dry_run:
        _ = (pipeline := beam.Pipeline(options=options)) | "Embed" >> EmbedFiles(config)
        pipeline.run()
        return None
    store = Store(config.output)
    began = time.time()
    hand_memory_back()
    if options.view_as(StandardOptions).runner in LOCAL_RUNNERS:
        # it starts while the pipeline is built
        shared_guard().start()
    with exclusive(store, settings_of(config), overwrite=args.overwrite) as name:
        config = dataclasses.replace(config, run=name)
        pipeline = beam.Pipeline(options=options)
        _ = pipeline | "Embed" >> EmbedFiles(config)
        with Progress(store, config.run, PLAN):
            pipeline.run().wait_until_finish()
        report = build_report(store, config.run, PLAN, began, time.time())
        write_report(store, report)
        try_write_html(store, report)
        finish(store, config.run)
    return report


def main(argv: list[str] | None = None) -> int:
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
    print(
        f"{report['partitions_encoded']:,} partitions encoded,"
        f" {report['partitions_skipped']:,} skipped, {report['partitions_failed']:,} failed;"
        f" {report['rows_encoded']:,} rows in {report['seconds']:,.1f} s"
    )
    if not report["superbatches"] and not report["partitions_encoded"]:
        failed = " that can be read" if report["partitions_failed"] else ""
        print(f"nothing to do: every partition{failed} is up to date")
    if report["files_passed_over"]:
        print(f"{report['files_passed_over']:,} files passed over: not data by their names")
    if report["partitions_stale"]:
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


if __name__ == "__main__":
    sys.exit(main())
