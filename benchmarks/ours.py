"""Our whole file job in this process: read, plan, encode, write, commit, report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import WARM_UP, WORK, peak_memory
from pipelines import embed_corpus
from surge_beam.transforms.embed_files import load_worker


def job(
    path: str,
    model: str,
    keys: Sequence[str],
    flags: Sequence[str] = (),
    vectors: str | None = None,
    sample: Sequence[int] = (),
) -> dict[str, Any]:
    """Runs the job on FnApiRunner with files in and out; the model is loaded before.

    Args:
      vectors: where the vectors of the sampled rows go, as .npy.
      sample: values of the column ``row``.

    Returns:
      ``seconds`` and ``first`` from the start to the last and first commit; ``base`` bytes of the
      process with its model before the job, ``peak`` at the job's highest; the job's own report.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=WORK, prefix="ours-") as folder:
        options = {"input": path, "output": f"{folder}/out", "partition_by": ",".join(keys)}
        options |= {"model": model, "device": "cpu"}
        argv = [*(f"--{k}={v}" for k, v in options.items()), *flags]
        worker = load_worker(embed_corpus.config_of(embed_corpus.parser().parse_args(argv)))
        worker.encode(worker.prepare(pa.array(WARM_UP)))
        base = psutil.Process().memory_info().rss
        began = time.perf_counter()
        report = embed_corpus.run(argv)
        wall = time.perf_counter() - began
        result = {
            "seconds": report["seconds"],
            "first": report["seconds_to_first_output"],
            "wall": wall,
            "rows": report["rows_encoded"],
            "base": base,
            **peak_memory(),
            "report": report,
        }
        if vectors:
            _save(Path(folder, "out"), vectors, sample)
    return result


def _save(output: Path, vectors: str, sample: Sequence[int]) -> None:
    wanted, found = set(sample), {}
    for file in output.glob("*=*/**/*.parquet"):
        table = pq.ParquetFile(file).read(columns=["row", "embedding"])
        for place, row in enumerate(table.column("row").to_pylist()):
            if row in wanted:
                found[row] = table.column("embedding")[place].as_py()
    np.save(vectors, np.array([found[row] for row in sample], np.float32))
