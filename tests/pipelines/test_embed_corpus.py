"""The command line with a real model on real corpora, held to sentence-transformers."""

from __future__ import annotations

import functools
import json
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipelines import embed_corpus
from surge_beam.gpu.encoder import model_folder
from tests.pipelines.harness import read_output
from tests.whole import WHOLE


@functools.cache
def _oracle():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(model_folder("all-MiniLM-L6-v2")), device="cpu")


"""Whole corpora instead of samples: hours on two cores, and most of them the oracle's."""


def _services(data: Path) -> tuple[pa.Table, str, tuple[str, ...]]:
    table = pq.read_table(data / "api_docs_by_service" / "docs.parquet")
    counts = table.column("service").value_counts().to_pylist()
    small = [c["values"] for c in counts if c["counts"] <= 12][:12]
    sample = table.filter(pc.is_in(table["service"], pa.array(small)))
    return table if WHOLE else sample, "text", ("service",)


def _owners(data: Path) -> tuple[pa.Table, str, tuple[str, ...]]:
    table, text, _ = _services(data)
    return table, text, ("service", "owner")


def _poets(data: Path) -> tuple[pa.Table, str, tuple[str, ...]]:
    table = pq.read_table(data / "tang_poems_by_author" / "poems.parquet")
    return table if WHOLE else table.slice(20_000, 90), "text", ("author",)


def _actors(data: Path) -> tuple[pa.Table, str, tuple[str, ...]]:
    table = pq.read_table(data / "movies_by_actor" / "movies.parquet")
    table = table if WHOLE else table.slice(9_000, 40)
    parents = pc.list_parent_indices(table["cast"])
    exploded = table.drop_columns(["cast"]).take(parents)
    return exploded.append_column("actor", pc.list_flatten(table["cast"])), "extract", ("actor",)


@functools.cache
def _oracle_vectors(texts: tuple[str, ...]) -> np.ndarray:
    return _oracle().encode(list(texts))


@pytest.mark.timeout(0 if WHOLE else 600)
@pytest.mark.parametrize("corpus", [_services, _owners, _poets, _actors])
def test_every_partition_equals_sentence_transformers(corpus, shared_data, tmp_path):
    table, text, keys = corpus(shared_data)
    source, output = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(table, source, row_group_size=8192 if WHOLE else 50)
    arguments = ["--input", str(source), "--output", str(output), "--text_column", text]
    arguments += ["--partition_by", ",".join(keys), "--device", "cpu"]
    arguments += [] if WHOLE else ["--min_rows", "64"]
    # the peak is of this process's whole life, and other tests may have loaded larger models in it
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert embed_corpus.main(arguments) == 0

    rows_of: dict[tuple, list[int]] = {}
    for row, key in enumerate(zip(*(table[k].to_pylist() for k in keys), strict=True)):
        rows_of.setdefault(key, []).append(row)
    expected = table[text].combine_chunks()  # rows are taken from chunks a hundred times slower
    texts = expected.dictionary_encode()
    distinct = _oracle_vectors(tuple(texts.dictionary.to_pylist()))
    which = texts.indices.to_numpy()
    partitions = read_output(output)
    assert len(partitions) == len(rows_of)
    rows = 0
    for part in partitions.values():
        values = json.loads(part.schema.metadata[b"surge.partition"])
        own = rows_of[tuple(values[k]["value"] for k in keys)]
        assert part[text].to_pylist() == expected.take(own).to_pylist()
        ours = np.stack(part["embedding"].to_numpy())
        assert ours.dtype == np.float32
        assert (np.sum(ours * distinct[which[own]], axis=1) >= 0.99999).all()
        rows += part.num_rows
    report = json.loads((output / "_surge" / "report.json").read_text())
    assert rows == report["rows_in"] == report["rows_out"] == table.num_rows
    assert report["peak_memory"] <= max(before, report["memory_bound"])


def test_bfloat16_and_options_of_the_vectors(shared_data, tmp_path):
    table, text, keys = _services(shared_data)
    table = table.slice(0, 40)
    source, output = tmp_path / "in.parquet", tmp_path / "out"
    pq.write_table(table, source)
    arguments = ["--input", str(source), "--output", str(output), "--partition_by", keys[0]]
    arguments += ["--device", "cpu", "--dtype", "bfloat16", "--output_dtype", "float16"]
    arguments += ["--truncate_dim", "128", "--min_rows", "64", "--keep_columns", text]
    assert embed_corpus.main(arguments) == 0
    whole = pa.concat_tables(
        [t.replace_schema_metadata(None) for t in read_output(output).values()]
    )
    assert whole.column_names == [text, "embedding"]
    assert whole.schema.field("embedding").type == pa.list_(pa.float16(), 128)
    vectors = _oracle().encode(whole[text].to_pylist(), truncate_dim=128, normalize_embeddings=True)
    ours = np.stack(whole["embedding"].to_numpy()).astype(np.float32)
    assert (np.sum(ours * vectors, axis=1) >= 0.999).all()
