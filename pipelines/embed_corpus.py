"""Embeds a partitioned corpus: ``python pipelines/embed_corpus.py --help``."""

from __future__ import annotations

import argparse
import os
import sys

# Arrow reads it when it is loaded. Its other pools keep what each of its threads has freed.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

from surge_beam.gpu.encoder import model_identity
from surge_beam.records import EncoderConfig
from surge_beam.transforms.embed_files import EmbedConfig, EmbedFiles
from surge_beam.transforms.job import named
from surge_beam.transforms.launch import (
    Report,
    add_job_options,
    auto,
    command,
    parse,
    positive,
    run_job,
)
from surge_beam.transforms.read import ReadConfig
from surge_beam.transforms.report import embed_summary
from surge_beam.transforms.write import WriteConfig


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="embed_corpus.py",
        description="Embeds every partition of a corpus. Any Apache Beam option may follow.",
    )
    add_job_options(p)
    p.add_argument("--text_column", default="text", help="the column to embed")
    p.add_argument("--model", default="all-MiniLM-L6-v2", help="model name or folder")
    p.add_argument("--prompt", help="text put before every row")
    p.add_argument("--truncate_dim", type=positive, help="keep the first N dimensions")
    p.add_argument("--output_dtype", default="float32", choices=("float32", "float16"))
    p.add_argument("--min_rows", type=auto, help="rows a SuperBatch reaches: auto or N")
    p.add_argument("--max_rows", type=positive, default=EmbedConfig.max_rows)
    p.add_argument("--max_bytes", type=positive, default=EmbedConfig.max_bytes)
    p.add_argument("--max_padded_tokens", type=auto, help="tokens in a forward pass: auto or N")
    p.add_argument("--dedupe", default=True, action=argparse.BooleanOptionalAction)
    p.add_argument("--no_dedupe", dest="dedupe", action="store_false", help=argparse.SUPPRESS)
    return p


def config_of(args: argparse.Namespace) -> EmbedConfig:
    return EmbedConfig(
        input=args.input,
        output=args.output,
        run="",
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


def run(argv: list[str] | None = None) -> Report | None:
    """Runs the job and returns its report, None of a dry run; see ``run_job``."""
    args, beam_args = parse(parser(), argv)
    return run_job(
        config_of(args),
        EmbedFiles,
        settings=settings_of,
        summarise=embed_summary,
        beam_args=beam_args,
        overwrite=args.overwrite,
    )


def say(report: Report) -> str:
    line = (
        f"{report['partitions_encoded']:,} partitions encoded,"
        f" {report['partitions_skipped']:,} skipped, {report['partitions_failed']:,} failed;"
        f" {report['rows_encoded']:,} rows in {report['seconds']:,.1f} s"
    )
    if report["files_failed"] == report["files"]:
        line += "\nnothing to do: none of the files can be used"
    elif not report["superbatches"] and not report["partitions_encoded"]:
        failed = " that can be read" if report["partitions_failed"] else ""
        line += f"\nnothing to do: every partition{failed} is up to date"
    return line


def main(argv: list[str] | None = None) -> int:
    return command(run, say, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
