"""Completions of columns: same rows in input order, each as if it had been decoded alone."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_beam.transforms.generate_files import COLUMNS
from tests.pipelines.generate_support import (
    ADDED,
    GREEDY,
    answer,
    answers,
    as_bytes,
    as_chat,
    generate,
    one_by_one,
    run_script,
    sampled,
    settled,
    tree_saves,
    without_cached,
)
from tests.pipelines.harness import dead_letters, read_output, write_rows

LONG = 40
RULES = "Answer in one word, and be polite about it. " * 2


def prompts(tag: str, count: int) -> list[str]:
    """Half of them behind one instruction, some equal, of several scripts."""
    rng = random.Random(tag)
    found = [
        f"{RULES if rng.random() < 0.5 else ''}Question {i % 17} über {tag} 水?"
        for i in range(count)
    ]
    return found


def make_prompts(folder: Path) -> Path:
    """Three hive partitions, one of two files, with columns of several types."""
    for name, rows in (("lang=de/a", 23), ("lang=de/b", 9), ("lang=en/a", 31), ("lang=fr/a", 1)):
        write_rows(
            folder / f"{name}.parquet",
            pa.table(
                {
                    "id": [f"{name}-{i}" for i in range(rows)],
                    "prompt": prompts(name, rows),
                    "n": pa.array(range(rows), pa.int16()),
                    "when": pa.array([datetime.datetime(2024, 1, 1)] * rows, pa.timestamp("us")),
                    "tags": pa.array([["a", None]] * rows, pa.list_(pa.string())),
                }
            ),
        )
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prompts(tmp_path_factory.mktemp("corpus") / "in")


GREEDILY = {"max_tokens": LONG}
SAMPLED = {"max_tokens": LONG, "temperature": 0.8, "seed": 5, "id_column": "id"}


@pytest.mark.parametrize(
    "options",
    [
        GREEDILY,
        GREEDILY | {"ranges": 4, "max_rows": 7},
        GREEDILY | {"ranges": 16, "rounds": 3, "slice_tokens": 6},
        GREEDILY | {"rounds": 3, "slice_tokens": 60, "schedule": "eb", "admission": "fcfs"},
        SAMPLED | {"ranges": 1},
        SAMPLED | {"ranges": 4, "rounds": 3, "slice_tokens": 6, "max_rows": 7},
        SAMPLED | {"ranges": 16, "max_sequences": 3, "page_size": 4},
    ],
    ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()),
)
def test_rows_do_not_depend_on_how_they_are_decoded(
    corpus: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    output = tmp_path / "out"
    generate(input=corpus, output=output, prompt_column="prompt", **options)
    found = read_output(output)
    assert sorted(found) == ["lang=de", "lang=en", "lang=fr"]
    sampling = sampled(max_tokens=LONG, temperature=options.get("temperature", 0.0))
    requests = []
    for folder, files in {"lang=de": "ab", "lang=en": "a", "lang=fr": "a"}.items():
        source = pa.concat_tables(
            pq.ParquetFile(corpus / folder / f"{f}.parquet").read() for f in files
        )
        table = found[folder]
        assert table.select(source.column_names).equals(source)
        assert table.column_names == [*source.column_names, *ADDED]
        assert pa.schema([table.schema.field(n) for n in ADDED]).equals(COLUMNS)
        wanted = [(row["id"], as_bytes(row["prompt"]), sampling) for row in source.to_pylist()]
        requests += wanted
        alone = one_by_one(wanted, seed=options.get("seed", 0))
        assert answers(table.to_pylist()) == [answer(c) for c in alone]
    report = settled(output)
    cached = sum(sum(t["cached_tokens"].to_pylist()) for t in found.values())
    assert cached == report["prefix_tokens_saved"] <= tree_saves(ids for _, ids, _ in requests)
    assert cached > 1000
    assert report["rows_decoded"] == report["rows_in"] == 64 and report["rows_reused"] == 0
    tokens = sum(sum(t["completion_tokens"].to_pylist()) for t in found.values())
    assert report["tokens_decoded"] == tokens
    assert report["prompt_tokens"] == sum(len(ids) for _, ids, _ in requests)
    assert set(report["finish_reasons"]) == {"length", "stop"}


def test_a_sampled_row_goes_by_its_id_and_seed_alone(tmp_path: Path) -> None:
    """The same rows in other files, another order and another order of names."""
    rows = [{"id": f"r{i}", "prompt": "the same prompt"} for i in range(24)]
    write_rows(tmp_path / "one" / "a.parquet", pa.Table.from_pylist(rows))
    random.Random(1).shuffle(rows)
    write_rows(tmp_path / "two" / "b" / "y.parquet", pa.Table.from_pylist(rows[:5]))
    write_rows(tmp_path / "two" / "a" / "z.parquet", pa.Table.from_pylist(rows[5:]))
    found = []
    for name, seed in (("one", 3), ("two", 3), ("one", 4)):
        output = tmp_path / f"{name}{seed}"
        options = {"temperature": 1.0, "seed": seed, "id_column": "id", "prompt_column": "prompt"}
        generate(input=tmp_path / name, output=output, **options)
        tables = read_output(output).values()
        found.append({r["id"]: r["completion"] for t in tables for r in t.to_pylist()})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 24, "equal prompts draw independently"
    assert all(found[0][name] != found[2][name] for name in found[0])


def test_without_ids_rows_go_by_file_and_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "x" / "a.parquet", {"prompt": ["one", "one"]})
    lines = ['{"prompt": "one"}', "", '{"prompt": "one"}', "not JSON"]
    (tmp_path / "in" / "b.jsonl").write_text("\n".join(lines) + "\n")
    options = {"temperature": 1.0, "prompt_column": "prompt"}
    generate(input=tmp_path / "in", output=tmp_path / "out", **options)
    found = read_output(tmp_path / "out")
    for folder, names in (
        ("x/a.parquet", ["x/a.parquet#0", "x/a.parquet#1"]),
        ("b.jsonl", ["b.jsonl#1", "b.jsonl#3"]),
    ):
        alone = one_by_one([(n, as_bytes("one"), sampled(temperature=1.0)) for n in names])
        assert answers(found[folder].to_pylist()) == [answer(c) for c in alone]
    (letter,) = dead_letters(tmp_path / "out").to_pylist()
    assert letter["row"] == 4
    settled(tmp_path / "out")


def test_template(tmp_path: Path) -> None:
    """Values are data: nothing is escaped, and nothing in them is rendered."""
    values = ["<b>&amp;'\"</b>", "{{ 7 * 7 }} {% raw %}", "水 \\n {# no #}", "plain", None]
    write_rows(
        tmp_path / "in" / "lang=de" / "kind=x" / "a.parquet",
        pa.table(
            {
                "text": values,
                "n": pa.array([1, 2, 3, 4, 5], pa.int64()),
                "tags": pa.array([["a", "b"], [], ["c"], None, ["d"]], pa.list_(pa.string())),
                "unused": ["u"] * 5,
            }
        ),
    )
    template = (
        "{{ lang }}/{{ kind }} {{ text }} {{ n + 1 }}{% for tag in tags %}|{{ tag }}{% endfor %}\n"
    )
    (tmp_path / "t.jinja").write_text(template)
    for partition_by in (None, "lang,kind,n"):
        output = tmp_path / f"out {partition_by}"
        generate(
            input=tmp_path / "in",
            output=output,
            template=tmp_path / "t.jinja",
            keep_columns="text",
            partition_by=partition_by,
        )
        table = pa.concat_tables(t for _, t in sorted(read_output(output).items()))
        assert table.column_names == ["text", *ADDED]
        rendered = [
            f"de/x {values[0]} 2|a|b",
            f"de/x {values[1]} 3",
            f"de/x {values[2]} 4|c",
            "de/x None 6|d",
        ]
        alone = one_by_one([(text, as_bytes(text), GREEDY) for text in rendered])
        assert answers(table.to_pylist()) == [answer(c) for c in alone]
        (letter,) = dead_letters(output).to_pylist()
        assert letter["error"] == "TemplateError" and letter["row"] == 3
        assert "NoneType" in letter["message"] and json.loads(letter["record"])["text"] == "plain"
        settled(output)


def test_a_template_of_a_folder_value_that_is_not_kept(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "lang=de" / "a.parquet", {"text": ["one"], "k": ["x"]})
    (tmp_path / "t.jinja").write_text("{{ lang }} {{ text }}")
    generate(
        input=tmp_path / "in",
        output=tmp_path / "out",
        template=tmp_path / "t.jinja",
        partition_by="k",
        keep_columns="text",
    )
    (table,) = read_output(tmp_path / "out").values()
    (alone,) = one_by_one([("a", as_bytes("de one"), GREEDY)])
    assert answers(table.to_pylist()) == [answer(alone)]


def test_a_template_of_what_is_not_there(tmp_path: Path) -> None:
    """An undefined variable is a row's failure, not the job's."""
    write_rows(tmp_path / "in" / "a.parquet", {"text": ["one"]})
    write_rows(tmp_path / "in" / "b.parquet", {"text": ["two"], "extra": ["three"]})
    (tmp_path / "t.jinja").write_text("{{ text }} {{ extra }}")
    generate(input=tmp_path / "in", output=tmp_path / "out", template=tmp_path / "t.jinja")
    (letter,) = dead_letters(tmp_path / "out").to_pylist()
    assert letter["error"] == "TemplateError" and "'extra' is undefined" in letter["message"]
    assert letter["file"].endswith("a.parquet") and letter["row"] == 0
    (table,) = read_output(tmp_path / "out").values()
    (alone,) = one_by_one([("b", as_bytes("two three"), GREEDY)])
    assert answers(table.to_pylist()) == [answer(alone)]
    settled(tmp_path / "out")


MESSAGES: list[Any] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": "Why?"}],
    [{"role": "user", "content": ""}],
]


def test_messages_of_a_struct_column(tmp_path: Path) -> None:
    named = [[{**m, "name": None} for m in row] for row in MESSAGES]
    kind = pa.list_(
        pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    )
    bad = [None, [], [{"role": "user", "content": None, "name": None}]]
    write_rows(tmp_path / "a.parquet", pa.table({"said": pa.array([*named, *bad], kind)}))
    generate(input=tmp_path / "a.parquet", output=tmp_path / "out", messages_column="said")
    check_messages(tmp_path / "out", letters=["NullPrompt", "InvalidMessages", "InvalidMessages"])


def test_messages_of_a_text_column(tmp_path: Path) -> None:
    lines = [{"said": json.dumps(row)} for row in MESSAGES]
    bad = ["not JSON", json.dumps([{"role": "user", "content": 7}]), json.dumps({"a": 1}), None]
    lines += [{"said": x} for x in bad]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", messages_column="said")
    check_messages(tmp_path / "out", letters=["InvalidMessages"] * 3 + ["NullPrompt"])


def test_messages_of_json_values(tmp_path: Path) -> None:
    lines = [{"said": row} for row in MESSAGES] + [{"said": 7}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", messages_column="said")
    check_messages(tmp_path / "out", letters=["InvalidMessages"])


def check_messages(output: Path, letters: list[str]) -> None:
    (table,) = read_output(output).values()
    alone = one_by_one([(str(i), as_chat(m), GREEDY) for i, m in enumerate(MESSAGES)])
    assert answers(table.to_pylist()) == [answer(c) for c in alone]
    assert [x["error"] for x in dead_letters(output).to_pylist()] == letters
    settled(output)


@pytest.mark.parametrize("kind", ["int", "text", "jsonl"])
def test_ids(tmp_path: Path, kind: str) -> None:
    """Of doubled ids the first in input order is answered; an empty one is a dead letter."""
    names: list[Any] = [7, 8, None, 7, 9, 8]
    if kind != "int":
        names = ["7", "é", "", "7", None, "é"]
    rows = [{"name": n, "prompt": "a prompt"} for n in names]
    if kind == "jsonl":
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[:4]))
        (folder / "b.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows[4:]))
    else:
        schema = pa.schema(
            [("name", pa.int32() if kind == "int" else pa.string()), ("prompt", pa.string())]
        )
        write_rows(tmp_path / "in" / "a.parquet", pa.Table.from_pylist(rows[:4], schema))
        write_rows(tmp_path / "in" / "b.parquet", pa.Table.from_pylist(rows[4:], schema))
    options = {"temperature": 1.0, "id_column": "name", "prompt_column": "prompt", "max_rows": 2}
    generate(input=tmp_path / "in", output=tmp_path / "out", **options)
    tables = [t for _, t in sorted(read_output(tmp_path / "out").items())]
    kept = [row for t in tables for row in t.to_pylist()]
    good = [7, 8, 9] if kind == "int" else ["7", "é"]
    assert [str(row["name"]) for row in kept] == [str(n) for n in good]
    alone = one_by_one([(str(n), as_bytes("a prompt"), sampled(temperature=1.0)) for n in good])
    assert answers(kept) == [answer(c) for c in alone]
    found = sorted(dead_letters(tmp_path / "out").to_pylist(), key=lambda x: (x["file"], x["row"]))
    errors = ["EmptyId", "duplicate_custom_id"]
    errors += ["duplicate_custom_id"] if kind == "int" else ["EmptyId", "duplicate_custom_id"]
    assert [x["error"] for x in found] == errors
    first = 0 if kind != "jsonl" else 1
    assert [x["row"] - first for x in found][:2] == [2, 3]
    extension = "jsonl" if kind == "jsonl" else "parquet"
    assert f"row {first} of a.{extension}" in found[1]["message"]
    settled(tmp_path / "out")


def test_an_id_column_that_is_not_there(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", {"prompt": ["x"]})
    done = generate(
        input=tmp_path / "a.parquet", output=tmp_path / "out", prompt_column="prompt", id_column="i"
    )
    assert "1 dead letters" in done.stdout
    (letter,) = dead_letters(tmp_path / "out").to_pylist()
    assert "no column 'i'" in letter["message"]


def test_stop_texts(tmp_path: Path) -> None:
    """The text is cut before the earliest of them; tokens count to where it was noticed."""
    texts = prompts("stop", 12)
    whole = one_by_one([(t, as_bytes(t), sampled(max_tokens=LONG)) for t in texts])
    stops = [whole[0].text[9], whole[1].text[3:6], whole[1].text[4:6], "absent"]
    write_rows(tmp_path / "a.parquet", {"prompt": texts})
    options = {"stop": stops, "max_tokens": LONG, "rounds": 3, "slice_tokens": 4}
    generate(
        input=tmp_path / "a.parquet", output=tmp_path / "out", prompt_column="prompt", **options
    )
    (table,) = read_output(tmp_path / "out").values()
    wanted = []
    for c in whole:
        # a letter a token; the end token has none
        ends = [c.text.find(s) + len(s) for s in stops if s in c.text]
        tokens, reason, text = c.completion_tokens, c.finish_reason, c.text
        if ends:
            tokens, reason = min(ends), "stop"
            text = text[: min(text.find(s) for s in stops if s in text[:tokens])]
        wanted.append((text, reason, c.prompt_tokens, tokens))
    assert answers(table.to_pylist()) == wanted
    assert wanted[0][0] == whole[0].text[: len(wanted[0][0])] and len(wanted[0][0]) <= 9
    assert wanted[1][3] <= 6 and wanted[1][1] == "stop"


def test_prompts_that_are_none(tmp_path: Path) -> None:
    long = "x" * 64
    texts = ["good", None, "", " ", long, "y" * 63, "\x00", "  \n"]
    write_rows(tmp_path / "in" / "k=1" / "a.parquet", {"prompt": texts})
    write_rows(tmp_path / "in" / "k=2" / "a.parquet", {"prompt": pa.array([None, ""], pa.string())})
    done = generate(
        input=tmp_path / "in", output=tmp_path / "out", prompt_column="prompt", max_context=64
    )
    good = ["good", " ", "y" * 63, "\x00", "  \n"]
    (folder,) = read_output(tmp_path / "out")
    table = read_output(tmp_path / "out")[folder]
    alone = one_by_one([(t, as_bytes(t), GREEDY) for t in good])
    cut = one_by_one([("y", as_bytes("y" * 63), sampled(max_tokens=1))])
    # prompt and completion together reach the context: it stops there
    wanted = [answer(c) for c in alone[:2]] + [answer(cut[0])] + [answer(c) for c in alone[3:]]
    assert folder == "k=1" and answers(table.to_pylist()) == wanted
    assert wanted[2][1] == "length" and wanted[2][3] == 1
    letters = {(x["partition"], x["row"]): x for x in dead_letters(tmp_path / "out").to_pylist()}
    assert {place: x["error"] for place, x in letters.items()} == {
        ("k=1", 1): "NullPrompt",
        ("k=1", 2): "EmptyPrompt",
        ("k=1", 4): "context_length_exceeded",
        ("k=2", 0): "NullPrompt",
        ("k=2", 1): "EmptyPrompt",
    }
    assert "64 tokens" in letters["k=1", 4]["message"]
    assert json.loads(letters["k=1", 4]["record"]) == {"k": "1", "prompt": long}
    assert "5 dead letters" in done.stdout
    assert settled(tmp_path / "out")["partitions_failed"] == 1


def test_key_columns_and_kept_columns(tmp_path: Path) -> None:
    rows = 40
    write_rows(
        tmp_path / "in" / "a.parquet",
        pa.table(
            {
                "owner": pa.array([f"o/{i % 3}" for i in range(rows)]),
                "year": pa.array([2020 + i % 2 for i in range(rows)], pa.int16()),
                "prompt": prompts("keys", rows),
                "kept": pa.array(range(rows), pa.uint8()),
                "left": ["x"] * rows,
            }
        ),
    )
    options = {"partition_by": "owner,year", "keep_columns": "kept", "max_rows": 5}
    generate(input=tmp_path / "in", output=tmp_path / "out", prompt_column="prompt", **options)
    found = read_output(tmp_path / "out")
    assert sorted(found) == [f"owner=o%2F{i}/year={y}" for i in range(3) for y in (2020, 2021)]
    texts = prompts("keys", rows)
    alone = one_by_one([(t, as_bytes(t), GREEDY) for t in texts])
    for folder, table in found.items():
        owner, year = int(folder.split("/")[0][-1]), int(folder[-4:])
        own = [i for i in range(rows) if i % 3 == owner and 2020 + i % 2 == year]
        assert table.column_names == ["kept", *ADDED]
        assert table["kept"].type == pa.uint8() and table["kept"].to_pylist() == own
        assert answers(table.to_pylist()) == [answer(alone[i]) for i in own]
    settled(tmp_path / "out")


def test_a_column_of_the_outputs_own(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", {"prompt": ["x"], "completion": ["old"]})
    options = {"input": tmp_path / "a.parquet", "prompt_column": "prompt"}
    generate(output=tmp_path / "out", **options)
    (letter,) = dead_letters(tmp_path / "out").to_pylist()
    assert "'completion' is the output's own" in letter["message"]
    generate(output=tmp_path / "kept", keep_columns="prompt", **options)
    assert settled(tmp_path / "kept")["rows_out"] == 1


def test_bad_input_ends_the_job_where_asked(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", {"prompt": ["one", "", "three"]})
    options = {"prompt_column": "prompt", "on_bad_input": "fail", "check": False}
    done = generate(input=tmp_path / "a.parquet", output=tmp_path / "out", **options)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "BadInputError" in done.stderr and "a.parquet, row 1: the prompt is empty" in done.stderr
    assert not read_output(tmp_path / "out")
    write_rows(tmp_path / "a.parquet", {"prompt": ["one", "two", "three"]})
    generate(input=tmp_path / "a.parquet", output=tmp_path / "out", **options | {"check": True})
    assert settled(tmp_path / "out")["rows_out"] == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition_by": "a"}, "batch lines"),
        ({"keep_columns": "a"}, "batch lines"),
        ({"id_column": "a"}, "custom_id"),
        ({"template": "no/such.jinja"}, "cannot read the template"),
        ({"prompt_column": "p", "model": "no/such/model"}, "no/such/model"),
        ({"prompt_column": "p", "temperature": -1}, "temperature"),
        ({"prompt_column": "p", "top_p": 0}, "top_p"),
        ({"prompt_column": "p", "stop": [""]}, "stop"),
        ({"prompt_column": "p", "page_size": 3}, "page_size"),
        ({"prompt_column": "p", "kv_bytes": 63}, "no KV page"),
        ({"prompt_column": "p", "profile": "no/such/profile"}, "no/such/profile"),
        ({"prompt_column": "p", "input": "no/such/input"}, "no such input"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    write_rows(tmp_path / "a.parquet", {"p": ["x"]})
    defaults = {"input": tmp_path / "a.parquet", "output": tmp_path / "out", "check": False}
    done = generate(**defaults | options)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("refused: ") and done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize("text", ["{{ a", "{% for %}", "{% include 'x' %}{{ }}", "\xff"])
def test_a_template_that_is_none(tmp_path: Path, text: str) -> None:
    write_rows(tmp_path / "a.parquet", {"p": ["x"]})
    (tmp_path / "t.jinja").write_bytes(text.encode("latin-1"))
    done = generate(
        input=tmp_path / "a.parquet",
        output=tmp_path / "out",
        template=tmp_path / "t.jinja",
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "template" in done.stderr and not (tmp_path / "out").exists()


def test_two_sources_of_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        generate(input="x", output="y", prompt_column="a", messages_column="b")
    assert ended.value.code == 2


def test_the_output_belongs_to_one_configuration(corpus: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    write_rows(source / "a.parquet", {"prompt": ["one", "two"], "other": ["x", "y"]})
    options = {"input": source, "output": output, "prompt_column": "prompt"}
    generate(**options)
    before = without_cached(read_output(output))
    for other, words in (
        ({"max_tokens": 3}, "max_tokens was 12, now 3"),
        ({"temperature": 0.5}, "temperature was 0.0, now 0.5"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"stop": ["a"]}, "stop was"),
        ({"prompt_column": "other"}, "prompt_column was"),
    ):
        done = generate(**options | other, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr
    # what changes no row may change
    done = generate(**options, ranges=3, rounds=2, max_rows=1, schedule="mb")
    assert "0 rows decoded, 2 reused" in done.stdout
    assert without_cached(read_output(output)) == before
    generate(**options | {"max_tokens": 3}, overwrite=True)
    (table,) = read_output(output).values()
    assert table["completion_tokens"].to_pylist() == [3, 3]


def test_an_empty_input(tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.parquet", {"prompt": pa.array([], pa.string())})
    (tmp_path / "in" / "b.jsonl").write_text("")
    done = generate(input=tmp_path / "in", output=tmp_path / "out", prompt_column="prompt")
    assert "0 dead letters" in done.stdout and settled(tmp_path / "out")["rows_in"] == 0


def test_the_script_itself(tmp_path: Path) -> None:
    """From another folder, with relative paths, and no torch."""
    write_rows(tmp_path / "in" / "a.parquet", {"prompt": ["one", "two"]})
    done = run_script(input="in", output="out", prompt_column="prompt", cwd=tmp_path)
    assert done.stdout.startswith("2 rows decoded, 0 reused; 24 tokens in ")
    assert (tmp_path / "out" / "_surge" / "report.html").exists()
    assert settled(tmp_path / "out")["rows_out"] == 2


def test_the_real_model(tmp_path: Path, shared_data: Path, smollm: Path) -> None:
    """Questions over documents, as texts and as chats, as SmolLM2 answers them one by one."""
    from surge_beam.gpu.engine import Engine
    from surge_beam.gpu.text_tokenizer import load_text_tokenizer
    from surge_beam.records import EngineConfig, Request
    from tests.gpu.real_prompts import over_documents

    whole = over_documents(shared_data, 1, 3)
    texts = [text[:600] + text[text.rindex("\n\nQuestion: ") :] for text in whole]
    talks = [[{"role": "user", "content": text}] for text in texts[:2]]
    write_rows(tmp_path / "p" / "a.parquet", {"prompt": texts})
    lines = [json.dumps({"said": talk}) + "\n" for talk in talks]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.jsonl").write_text("".join(lines))
    config = EngineConfig(
        model=str(smollm), device="cpu", dtype="float32", max_sequences=1, share_prefixes=False
    )
    tokenizer = load_text_tokenizer(config)
    ids = [*tokenizer.encode_batch(texts), *map(tokenizer.chat, talks)]
    requests = [
        Request(custom_id=str(i), prompt_ids=tuple(x), sampling=sampled(max_tokens=6))
        for i, x in enumerate(ids)
    ]
    with Engine(config) as engine:
        alone = [engine.generate([request])[0] for request in requests]
    options = {"model": "SmolLM2-135M-Instruct", "dtype": "float32", "max_tokens": 6}
    of_texts, of_talks = tmp_path / "out p", tmp_path / "out m"
    generate(input=tmp_path / "p", output=of_texts, prompt_column="prompt", **options)
    options |= {"rounds": 2, "slice_tokens": 2, "ranges": 2}
    generate(input=tmp_path / "m", output=of_talks, messages_column="said", **options)
    rows = [r for o in (of_texts, of_talks) for t in read_output(o).values() for r in t.to_pylist()]
    assert answers(rows) == [answer(c) for c in alone]
    assert settled(of_texts)["prefix_tokens_saved"] > 100
