from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that
from apache_beam.transforms.resources import AcceleratorHint, MinRamHint

from surge_beam import DeadLetter, Embed, EncoderConfig, SurgeError
from surge_beam.gpu.worker import EncodeWorker
from surge_beam.transforms.embed import _letter, _problem

ROWS = [{"id": i, "text": f"text {i % 5}", "tags": {"a", i}} for i in range(20)]


class Document(NamedTuple):
    text: str
    number: int


class Characters(ModelHandler):
    """Vectors of a text's length and vowels; one result a batch is kept back if asked for."""

    def __init__(self, keep_back: bool = False, fail_on: str = "") -> None:
        super().__init__()
        self._keep_back, self._fail_on = keep_back, fail_on

    def load_model(self) -> object:
        return type("Model", (), {})()

    def run_inference(
        self, batch: list[str], model: object, inference_args: Any = None
    ) -> Iterable[PredictionResult]:
        if self._fail_on and self._fail_on in batch:
            raise ValueError("a text I cannot take")
        found = [PredictionResult(t, [len(t), sum(c in "aeiou" for c in t)]) for t in batch]
        return found[1:] if self._keep_back and len(found) > 1 else found

    def get_resource_hints(self) -> dict[str, Any]:
        return {"min_ram": "3GiB"}


def vectors(texts: list[str], model: str = "dummy:16") -> np.ndarray:
    worker = EncodeWorker(EncoderConfig(model=model))
    return worker.encode(worker.prepare(pa.array(texts, pa.string()))).matrix


def run(
    elements: list[Any],
    rows: Any,
    letters: Any = lambda found: _equal(found, []),
    arguments: tuple[str, ...] = ("--runner=FnApiRunner",),
    **options: Any,
) -> Any:
    p = beam.Pipeline(options=PipelineOptions(list(arguments)))
    options = {"model": "dummy:16", "device": "cpu", **options}
    result = p | beam.Create(elements, reshuffle=False) | Embed(**options)
    assert_that(result.rows, rows, label="Rows")
    assert_that(result.dead_letters, letters, label="Letters")
    done = p.run()
    done.wait_until_finish()
    return done


def _equal(found: Any, expected: Any) -> None:
    assert found == expected, found


def rows_are(expected: list[dict[str, Any]]) -> Any:
    def check(found: list[dict[str, Any]]) -> None:
        assert [{k: v for k, v in r.items() if k != "embedding"} for r in found] == expected
        assert all(type(r["embedding"]) is np.ndarray for r in found)
        np.testing.assert_array_equal(
            np.array([r["embedding"] for r in found]), vectors([r["text"] for r in found])
        )

    return check


def test_rows_come_out_as_they_went_in_with_a_vector() -> None:
    done = run(ROWS, rows_are(ROWS), min_rows=7, max_rows=7)
    counted = {c.key.metric.name: c.committed for c in done.metrics().query()["counters"]}
    assert counted["rows"] == 20
    assert counted["duplicate_rows"] == 20 - (5 + 5 + 5)


def test_other_kinds_of_rows_become_dicts() -> None:
    run([beam.Row(text="b", number=2)], rows_are([{"text": "b", "number": 2}]))
    run([Document("c", 3)], rows_are([{"text": "c", "number": 3}]))


def test_batches_come_out_as_batches() -> None:
    first = pa.record_batch({"text": ["a", "b"], "embedding": ["old", "old"]})
    table = pa.table({"text": pa.array(["c", "a"]).dictionary_encode(), "n": [1, 2]})

    def check(found: list[pa.RecordBatch]) -> None:
        assert [b.column("text").to_pylist() for b in found] == [["a", "b"], ["c", "a"]]
        assert found[1].schema.names == ["text", "n", "embedding"]
        for batch in found:
            kind = batch.schema.field("embedding").type
            assert kind == pa.list_(pa.float32(), 16)
            matrix = batch.column("embedding").flatten().to_numpy().reshape(-1, 16)
            np.testing.assert_array_equal(matrix, vectors(batch.column("text").to_pylist()))

    run([first, table], check)


def test_batches_that_come_out_keep_to_max_bytes() -> None:
    def check(found: list[pa.RecordBatch]) -> None:
        assert sum(b.num_rows for b in found) == 100
        assert all(b.nbytes <= 2000 for b in found)

    run([pa.record_batch({"text": [str(i) for i in range(100)]})], check, max_bytes=2000)


def test_as_rows_overrides_what_came() -> None:
    def are_batches(found: list[Any]) -> None:
        assert [b.column("n").to_pylist() for b in found] == [[1, 2]]

    rows = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
    run(rows, are_batches, as_rows=False)
    run([pa.RecordBatch.from_pylist(rows)], rows_are(rows), as_rows=True)


def test_rows_without_a_text_are_dead_letters() -> None:
    def check(letters: list[DeadLetter]) -> None:
        assert [(x.error, json.loads(x.record or "")) for x in letters] == [
            ("MissingText", {"id": 1}),
            ("NullText", {"id": 2, "text": None}),
            ("NotText", {"id": 3, "text": 3.5}),
        ]
        assert {x.stage for x in letters} == {"read"}

    bad = [{"id": 1}, {"id": 2, "text": None}, {"id": 3, "text": 3.5}]
    good = [{"id": 4, "text": ""}, {"id": 5, "text": "x"}]
    run([*bad, *good], rows_are(good), check)


def test_batch_rows_without_a_text_are_dead_letters() -> None:
    def kept(found: list[pa.RecordBatch]) -> None:
        assert [b.column("id").to_pylist() for b in found] == [[1, 3]]

    def check(letters: list[DeadLetter]) -> None:
        assert sorted((x.error, json.loads(x.record or "")["id"]) for x in letters) == [
            ("MissingText", 4),
            ("NotText", 5),
            ("NullText", 2),
        ]

    batches = [
        pa.record_batch({"id": [1, 2, 3], "text": ["a", None, "b"]}),
        pa.record_batch({"id": [4]}),
        pa.record_batch({"id": [5], "text": [1.5]}),
    ]
    # an own batch each, or the second would be joined to the first with nulls
    run(batches, kept, check, max_rows=3, min_rows=1)


def test_text_that_is_no_unicode_and_records_that_are_no_json() -> None:
    assert _problem({"text": "é"}, "text") is None
    problem = _problem({"text": "\ud800"}, "text")
    assert problem is not None and problem[0] == "NotText"
    assert _letter("NotText", "", {"text": "a\ud800"}).record == '{"text": "a?"}'
    assert _letter("NotText", "", {"text": {(1, 2): 3}}).record == "{'text': {(1, 2): 3}}"


def test_a_poison_row_is_one_dead_letter() -> None:
    rows = [{"id": i, "text": f"text {i}"} for i in range(200)]
    rows[77]["text"] = "POISON in here"

    def kept(found: list[dict[str, Any]]) -> None:
        assert [r["id"] for r in found] == [i for i in range(200) if i != 77]

    def check(letters: list[DeadLetter]) -> None:
        (letter,) = letters
        assert (letter.stage, letter.error) == ("encode", "ValueError")
        assert letter.attempts > 1
        assert json.loads(letter.record or "") == rows[77]

    run(rows, kept, check, model="dummy:8:poison=POISON")


def test_any_model_handler_takes_the_models_place() -> None:
    def check(found: list[dict[str, Any]]) -> None:
        assert [r["embedding"].tolist() for r in found] == [[4.0, 1.0], [2.0, 0.0]]

    def letters(found: list[DeadLetter]) -> None:
        assert [x.message for x in found] == ["a text I cannot take"]

    rows = [{"text": "text"}, {"text": "bad"}, {"text": "xy"}]
    run(rows, check, letters, model_handler=Characters(fail_on="bad"))


def test_a_handler_that_returns_too_few_raises() -> None:
    with pytest.raises(Exception, match="returned 2 results for 3 texts"):
        run([{"text": c} for c in "abc"], lambda found: None, model_handler=Characters(True))


def test_too_few_vectors_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = EncodeWorker.encode

    def short(self: EncodeWorker, prepared: Any) -> Any:
        encoded = encode(self, prepared)
        object.__setattr__(encoded, "matrix", encoded.matrix[1:])
        return encoded

    monkeypatch.setattr(EncodeWorker, "encode", short)
    with pytest.raises(Exception, match="2 vectors came of 3 texts"):
        run([{"text": c} for c in "abc"], lambda found: None)


def test_empty_input_and_nothing_but_dead_letters() -> None:
    run([], lambda found: _equal(found, []))
    run(
        [pa.record_batch({"text": pa.nulls(3)})],
        lambda found: _equal(found, []),
        lambda found: _equal([x.error for x in found], ["NullText"] * 3),
    )


def test_unbounded_input_is_embedded_across_bundles() -> None:
    class Unbounded(beam.PTransform):
        def expand(self, pcoll: beam.PCollection) -> beam.PCollection:
            out = pcoll | beam.Map(lambda x: x)
            out.is_bounded = False
            return out

    def check(found: list[dict[str, Any]]) -> None:
        rows_are(ROWS)(sorted(found, key=lambda row: row["id"]))

    with beam.Pipeline("FnApiRunner") as p:
        result = p | beam.Create(ROWS) | Unbounded() | Embed(model="dummy:16", max_delay_secs=1)
        assert_that(result.rows, check)


def test_a_prism_pipeline_gives_the_same(prism_path: str) -> None:
    prism = ("--runner=PrismRunner", f"--prism_location={prism_path}")

    def check(found: list[dict[str, Any]]) -> None:
        rows_are(ROWS)(sorted(found, key=lambda row: row["id"]))

    def letters(found: list[DeadLetter]) -> None:
        assert [x.error for x in found] == ["MissingText"]

    run([*ROWS, {"id": 0}], check, letters, (*prism, "--environment_type=LOOPBACK"))


def hinted(embed: Embed) -> dict[str, dict[str, bytes]]:
    """Resource hints by step, of a graph that is not run."""
    p = beam.Pipeline("FnApiRunner")
    _ = p | beam.Create([{"text": "a"}]) | embed
    components = p.to_runner_api().components
    found = {}
    for step in components.transforms.values():
        if step.spec.urn == "beam:transform:pardo:v1":
            hints = components.environments[step.environment_id].resource_hints
            if hints:
                found[step.unique_name.rsplit("/Embed/", 1)[-1]] = dict(hints)
    return found


def test_only_the_encode_step_has_hints() -> None:
    on_gpu = hinted(Embed())
    assert {name.split("/")[1] for name in on_gpu} == {"Encode"}
    (hints,) = on_gpu.values()
    assert hints == {AcceleratorHint.urn: b"type:nvidia-l4;count:1;install-nvidia-driver"}
    for embed in (Embed(device="cpu"), Embed(model_handler=Characters())):
        (hints,) = hinted(embed).values()
        assert list(hints) == [MinRamHint.urn]
    assert hinted(Embed(accelerator=None)) == {}


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="takes no prompt"):
        Embed(model_handler=Characters(), prompt="x")
    with pytest.raises(ValueError, match="both 'text'"):
        Embed(vector_column="text")
    with pytest.raises(ValueError):
        Embed(min_rows=10, max_rows=5)


def test_cuda_that_is_missing_fails_at_start() -> None:
    with pytest.raises(Exception, match="CUDA"):
        run([{"text": "a"}], lambda found: None, device="cuda")


def test_dask_is_refused() -> None:
    class DaskRunner(beam.runners.PipelineRunner):
        pass

    with pytest.raises(SurgeError, match="DaskRunner"):
        _ = beam.Pipeline(DaskRunner()) | beam.Create(ROWS) | Embed(model="dummy:16")
