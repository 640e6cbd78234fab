"""A generation job over a Parquet file of prompts, ours and two ways a user would write it.

Every function runs in a process of its own. Model and tokenizer are loaded, and the model has
answered a few prompts, before the clock starts. Ours ends, as in ``ours.py``, with the last commit:
drawing ``report.html`` comes after it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.parquet as pq

from benchmarks.common import WORK, peak_memory
from benchmarks.generate_engines import model_folder

WARM_UP = [f"Say what comes after {i}, and why:" for i in range(4)]


def ours(
    path: str, model: str, max_tokens: int, engine: str, slots: int, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """``generate_corpus.py`` on FnApiRunner, its partitions, manifest and report included."""
    from pipelines import generate_corpus
    from surge_beam.gpu.decode_worker import shared_decode_worker
    from surge_beam.gpu.text_tokenizer import load_text_tokenizer
    from surge_beam.records import Request, SamplingParams

    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK, prefix="generate-") as folder:
        options = {
            **{"input": path, "output": f"{folder}/out", "prompt_column": "prompt"},
            **{"id_column": "id", "partition_by": "part", "model": model, "device": "cpu"},
            **{"engine": engine, "dtype": "float32", "max_tokens": max_tokens},
            **{"max_sequences": slots, "max_context": 4096},
        }
        argv = [*(f"--{k}={v}" for k, v in options.items()), *flags]
        config = generate_corpus.config_of(generate_corpus.parser().parse_args(argv))
        worker = shared_decode_worker(config.engine)
        load_text_tokenizer(config.engine)
        visit = worker.visit()
        sampling = SamplingParams(max_tokens=4)
        visit.add(
            Request(custom_id=f"warm-{i}", prompt_ids=tuple(range(50, 90 + i)), sampling=sampling)
            for i in range(len(WARM_UP))
        )
        list(visit.take())
        report = generate_corpus.run(argv)
        assert report is not None
        texts = {}
        for file in sorted(Path(folder, "out").glob("part=*/*.parquet")):
            table = pq.ParquetFile(file).read(columns=["id", "completion"])
            texts.update(zip(*(c.to_pylist() for c in table.columns), strict=True))
    figures = {"seconds": report["seconds"], "saved": report["prefix_tokens_saved"]}
    return {**figures, "texts": texts} | peak_memory()


def _llm(model: str, slots: int, **options: Any) -> Any:
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    llm = vllm.LLM(
        model=str(model_folder(model)),
        dtype="float32",
        max_num_seqs=slots,
        max_model_len=4096,
        enforce_eager=True,
        kv_cache_memory_bytes=4 << 30,
        **options,
    )
    llm.generate(WARM_UP, vllm.SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    return llm


def script(path: str, model: str, max_tokens: int, slots: int) -> dict[str, Any]:
    """A plain vLLM script: all prompts, sorted, in one call, with blocks of 32 tokens."""
    llm = _llm(model, slots, block_size=32)
    from vllm import SamplingParams

    began = time.perf_counter()
    rows = pq.read_table(path, columns=["id", "prompt"]).to_pylist()
    rows.sort(key=lambda row: row["prompt"])
    done = llm.generate(
        [row["prompt"] for row in rows],
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        use_tqdm=False,
    )
    texts = {row["id"]: output.outputs[0].text for row, output in zip(rows, done, strict=True)}
    seconds = time.perf_counter() - began
    saved = sum(output.num_cached_tokens or 0 for output in done)
    return {"seconds": seconds, "texts": texts, "saved": saved} | peak_memory()


def beam_dofn(path: str, model: str, max_tokens: int, slots: int, batch: int) -> dict[str, Any]:
    """Beam with a DoFn that calls vLLM on a batch of elements in the order they come."""
    global _SHARED
    _SHARED = _llm(model, slots)
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK, prefix="dofn-") as folder:
        began = time.perf_counter()
        with beam.Pipeline("FnApiRunner") as pipeline:
            _ = (
                pipeline
                | beam.io.ReadFromParquet(path, columns=["id", "prompt", "part"])
                | beam.BatchElements(min_batch_size=batch, max_batch_size=batch)
                | beam.ParDo(_Complete(max_tokens))
                | beam.Map(lambda row: f"{row[0]}\t{row[1]!r}")
                | beam.io.WriteToText(f"{folder}/out")
            )
        seconds = time.perf_counter() - began
        texts = {}
        for file in Path(folder).glob("out*"):
            for line in file.read_text("utf-8").splitlines():
                name, _, text = line.partition("\t")
                texts[name] = eval(text)  # what repr wrote above
    return {"seconds": seconds, "texts": texts, "saved": None} | peak_memory()


_SHARED: Any = None


class _Complete(beam.DoFn):
    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens

    def process(self, rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        from vllm import SamplingParams

        from benchmarks import generate_peers

        done = generate_peers._SHARED.generate(
            [row["prompt"] for row in rows],
            SamplingParams(max_tokens=self._max_tokens, temperature=0.0),
            use_tqdm=False,
        )
        for row, output in zip(rows, done, strict=True):
            yield row["id"], output.outputs[0].text
