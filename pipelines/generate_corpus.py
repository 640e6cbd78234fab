"""Completes every row of a dataset: ``python pipelines/generate_corpus.py --help``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Arrow reads it when it is loaded. Its other pools keep what each of its threads has freed.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

from surge_beam.gpu.encoder import files_identity
from surge_beam.gpu.loading import step_costs
from surge_beam.gpu.text_tokenizer import kv_bytes_per_token
from surge_beam.records import EngineConfig, RefusedError, SamplingParams, SurgeError
from surge_beam.transforms.batch_files import assemble
from surge_beam.transforms.batch_lines import ServedModels
from surge_beam.transforms.files import Store, digest
from surge_beam.transforms.generate_files import GenerateConfig, GenerateFiles, read_config
from surge_beam.transforms.job import named
from surge_beam.transforms.launch import (
    Report,
    add_job_options,
    auto,
    command,
    names,
    parse,
    positive,
    run_job,
)
from surge_beam.transforms.prefix_partition import BatchLimits
from surge_beam.transforms.prompts import PromptConfig
from surge_beam.transforms.report import generate_summary
from surge_beam.transforms.write import WriteConfig


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="generate_corpus.py",
        description="Completes every row of a dataset, or every line of an OpenAI batch."
        " Any Apache Beam option may follow.",
    )
    add_job_options(p)
    source = p.add_mutually_exclusive_group()
    source.add_argument("--prompt_column", help="column of raw prompts")
    source.add_argument("--template", help="Jinja file over a row's columns; gives a raw prompt")
    source.add_argument("--messages_column", help="column of conversations")
    p.add_argument("--id_column", help="names a row; without it, file and row do")
    p.add_argument("--model", default=EngineConfig.model, help="model name, folder or GGUF file")
    p.add_argument(
        "--served_model_name",
        type=names,
        default=(),
        help="further names under which batch lines may ask for the model; * takes all",
    )
    p.add_argument("--engine", default="native", choices=("native", "vllm"))
    p.add_argument("--schedule", default="eb+", choices=("eb", "mb", "eb+"))
    p.add_argument(
        "--admission", default=EngineConfig.admission, choices=("prefix", "learned", "cost", "fcfs")
    )
    p.add_argument("--kernels", default=EngineConfig.kernels, choices=("auto", "torch"))
    p.add_argument("--profile", help="step times that surge_beam.gpu.step_times wrote")
    p.add_argument("--max_tokens", type=positive, default=256)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top_p", type=float, default=1.0)
    p.add_argument("--top_k", type=int, default=0)
    p.add_argument("--stop", action="append", default=[], help="text that ends a completion")
    p.add_argument("--end_on_repetition", action="store_true", help="end one that runs in a loop")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max_sequences", type=positive, default=EngineConfig.max_sequences)
    p.add_argument("--max_context", type=positive, help="tokens of prompt and completion")
    p.add_argument("--kv_bytes", type=auto, help="bytes of the KV pool: auto or N")
    p.add_argument("--page_size", type=positive, help="tokens of a KV page")
    p.add_argument("--rounds", type=positive, default=1, help="rounds of continuation")
    p.add_argument("--slice_tokens", type=positive, default=GenerateConfig.slice_tokens)
    p.add_argument("--ranges", type=auto, help="ranges of the prefix tree: auto or N")
    p.add_argument("--max_rows", type=positive, default=GenerateConfig.max_rows)
    p.add_argument("--max_bytes", type=positive, default=GenerateConfig.max_bytes)
    return p


def prompts_of(args: argparse.Namespace) -> PromptConfig:
    template = None
    if args.template is not None:
        try:
            template = Path(args.template).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise RefusedError(f"cannot read the template {args.template}: {error}") from error
    return PromptConfig(
        column=args.prompt_column,
        template=template,
        messages=args.messages_column,
        id_column=args.id_column,
        sampling=SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            stop=tuple(args.stop),
            end_on_repetition=args.end_on_repetition,
        ),
        models=(args.model, *args.served_model_name),
    )


def config_of(args: argparse.Namespace) -> GenerateConfig:
    prompts = prompts_of(args)
    if prompts.lines and (args.partition_by or args.keep_columns):
        raise RefusedError(
            "without --prompt_column, --template or --messages_column the input is batch lines,"
            " which have no columns to partition by or to keep"
        )
    engine = EngineConfig(
        model=args.model,
        engine=args.engine,
        dtype=args.dtype,
        device=args.device,
        require_accelerator=args.device == "cuda",
        max_sequences=args.max_sequences,
        page_size=args.page_size or (32 if args.engine == "vllm" else EngineConfig.page_size),
        kv_bytes=args.kv_bytes,
        max_context=args.max_context,
        schedule=args.schedule,
        admission=args.admission,
        kernels=args.kernels,
        profile=args.profile,
        seed=args.seed,
    )
    token_bytes = kv_bytes_per_token(engine)
    if args.engine == "native":
        # read again by the worker, which may be far away and late
        step_costs(engine.profile)
        if engine.kv_bytes is not None and engine.kv_bytes < token_bytes * engine.page_size:
            raise RefusedError(
                f"--kv_bytes {engine.kv_bytes} holds no KV page, which is {engine.page_size}"
                f" tokens of {token_bytes} bytes or more"
            )
    return GenerateConfig(
        input=args.input,
        output=args.output,
        run="",
        read=read_config(
            prompts,
            partition_by=args.partition_by,
            keep_columns=args.keep_columns,
            fail_on_bad_input=args.on_bad_input == "fail",
        ),
        write=WriteConfig(
            columns=() if prompts.lines else args.keep_columns, drop=args.partition_by
        ),
        prompts=prompts,
        engine=engine,
        rounds=args.rounds,
        slice_tokens=args.slice_tokens,
        ranges=args.ranges,
        batch=BatchLimits(kv_bytes_per_token=token_bytes),
        max_rows=args.max_rows,
        max_bytes=args.max_bytes,
        accelerator=args.accelerator,
        prune=args.prune,
    )


def settings_of(config: GenerateConfig) -> dict:
    """What two runs on one output must agree on."""
    prompts, engine = config.prompts, config.engine
    sampling = prompts.sampling
    return {
        "prompt_column": prompts.column,
        "template": prompts.template and digest(prompts.template),
        "messages_column": prompts.messages,
        "id_column": prompts.id_column,
        "served_model_name": sorted(prompts.models[1:]) if prompts.lines else None,
        "partition_by": list(config.read.partition_by),
        "keep_columns": config.read.keep_columns and list(config.read.keep_columns),
        "model": named(engine.model, files_identity(engine.model)),
        "engine": engine.engine,
        "dtype": engine.dtype,
        "max_context": engine.max_context,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": list(sampling.stop),
        "end_on_repetition": sampling.end_on_repetition,
        "seed": engine.seed,
        # the native engine's completions depend on none of these
        "rounds": [config.rounds, config.slice_tokens] if engine.engine == "vllm" else None,
        "kv_bytes": engine.kv_bytes if engine.engine == "vllm" else None,
    }


def run(argv: list[str] | None = None) -> Report | None:
    """Runs the job and returns its report, None of a dry run; see ``run_job``."""
    args, beam_args = parse(parser(), argv)
    try:
        config = config_of(args)
    except SurgeError as error:
        raise RefusedError(str(error)) from error
    models = ServedModels(config.prompts.models[0], config.prompts.models[1:])

    def after(store: Store) -> None:
        if config.prompts.lines:
            assemble(store, models)

    return run_job(
        config,
        GenerateFiles,
        settings=settings_of,
        summarise=generate_summary,
        beam_args=beam_args,
        overwrite=args.overwrite,
        after=after,
    )


def say(report: Report) -> str:
    line = (
        f"{report['rows_decoded']:,} rows decoded, {report['rows_reused']:,} reused;"
        f" {report['tokens_decoded']:,} tokens in {report['seconds']:,.1f} s;"
        f" {report['prefix_tokens_saved']:,} of {report['prompt_tokens']:,} prompt tokens"
        " shared a prefix"
    )
    if report["files_failed"] == report["files"]:
        line += "\nnothing to do: none of the files can be used"
    elif not report["superbatches"]:
        refused = " or is a dead letter" if report["dead_letters"] else ""
        line += f"\nnothing to do: every row is answered already{refused}"
    return line


def main(argv: list[str] | None = None) -> int:
    return command(run, say, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
