"""From rows to prompts: columns, templates, conversations, batch lines."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.records import SamplingParams, Segment, SurgeError
from surge_beam.transforms import prompts
from surge_beam.transforms.prompts import Prompt, PromptConfig, Refusal, conversation, render
from surge_beam.transforms.read import rows_of
from surge_beam.transforms.textfiles import LINE_COLUMN

SAMPLING = SamplingParams(max_tokens=3, temperature=0.5)
FILE = Segment("a.parquet", '{"file": {"type": "string", "value": "a"}}', "f", 0, 1, 0, ())
KEYED = Segment(
    "k=1/l=x",
    '{"k": {"type": "int64", "value": 1}, "l": {"type": "string", "value": "<x>"}}',
    "f",
    0,
    1,
    0,
    (),
)


def rendered(
    config: PromptConfig, columns: dict[str, Any] | pa.Table, segment: Segment = FILE
) -> list[Prompt | Refusal]:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    ids = [f"a.parquet#{i}" for i in range(table.num_rows)]
    return list(render(config, table, segment, ids))


def refused(found: list[Prompt | Refusal]) -> list[str | None]:
    return [x.error if isinstance(x, Refusal) else None for x in found]


def test_a_column() -> None:
    config = PromptConfig(column="p", sampling=SAMPLING)
    texts = ["one", None, "", " ", "{{ p }} &amp;"]
    found = rendered(config, {"p": texts, "other": [1] * 5})
    assert refused(found) == [None, "NullPrompt", "EmptyPrompt", None, None]
    assert found[0] == Prompt("a.parquet#0", SAMPLING, text="one")
    assert [x.text for x in found if isinstance(x, Prompt)] == ["one", " ", "{{ p }} &amp;"]
    assert config.required_columns == ("p",) and config.optional_columns == ()


def test_ids() -> None:
    config = PromptConfig(column="p", id_column="i")
    found = rendered(config, {"p": ["a", "", "c", "d"], "i": ["x", "y", None, ""]})
    assert refused(found) == [None, "EmptyPrompt", "EmptyId", "EmptyId"]
    numbers = rendered(config, {"p": ["a", "b"], "i": pa.array([0, -7], pa.int64())})
    assert [x.custom_id for x in numbers if isinstance(x, Prompt)] == ["0", "-7"]
    assert config.required_columns == ("p", "i")


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_a_template_passes_values_as_they_are(values: list[str]) -> None:
    config = PromptConfig(template="[{{ a }}]{{ k }}{{ l }}")
    found = rendered(config, {"a": values}, KEYED)
    assert [x.text for x in found if isinstance(x, Prompt)] == [f"[{v}]1<x>" for v in values]


def test_template_failures_are_the_rows_own() -> None:
    config = PromptConfig(template="{{ a.b }}{% if a is none %}{{ 1 / 0 }}{% endif %}{{ gone }}")
    assert config.optional_columns == ("a", "gone") and config.required_columns == ()
    found = rendered(config, {"a": [{"b": "x"}, None], "gone": ["", ""]})
    assert refused(found) == [None, "TemplateError"]
    found = rendered(config, {"a": [{"b": "x"}]})
    assert refused(found) == ["TemplateError"]
    assert isinstance(found[0], Refusal) and "'gone' is undefined" in found[0].message
    assert refused(rendered(PromptConfig(template="{{ a }}"), {"a": [""]})) == ["EmptyPrompt"]


def test_a_rows_value_goes_before_the_partitions() -> None:
    (found,) = rendered(PromptConfig(template="{{ k }}"), {"k": ["own"]}, KEYED)
    assert isinstance(found, Prompt) and found.text == "own"
    (found,) = rendered(PromptConfig(template="{{ file }}"), {"k": ["own"]})
    assert isinstance(found, Refusal), "the name of a file is no key column"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ a.append('x') }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_nothing_else(template: str) -> None:
    (found,) = rendered(PromptConfig(template=template), {"a": [["y"]]})
    assert isinstance(found, Refusal) and found.error == "TemplateError"


def test_loops_and_filters() -> None:
    template = "{% for m in said %}{{ loop.index }}:{{ m.role|upper }} {% endfor %}{{ n + 1 }}"
    table = pa.Table.from_pylist([{"said": [{"role": "a"}, {"role": "b"}], "n": 1}])
    (found,) = rendered(PromptConfig(template=template), table)
    assert isinstance(found, Prompt) and found.text == "1:A 2:B 2"


HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "value",
    [
        HELLO,
        json.dumps(HELLO),
        [{"role": "user", "content": "Hi", "name": None}],
        [json.dumps(HELLO[0])],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}],
            }
        ],
    ],
)
def test_conversations(value: Any) -> None:
    assert conversation(value) == tuple(HELLO)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "not JSON",
        "7",
        "{}",
        "[]",
        [],
        [7],
        ["x"],
        [{"role": "user"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        7,
        "[" * 100_000,
    ],
)
def test_what_is_no_conversation(value: Any) -> None:
    found = conversation(value)
    assert isinstance(found, Refusal) and found.error == "InvalidMessages" and found.message


def test_a_column_of_conversations() -> None:
    config = PromptConfig(messages="m", sampling=SAMPLING)
    found = rendered(config, {"m": [json.dumps(HELLO), None, "x"]})
    assert found[0] == Prompt("a.parquet#0", SAMPLING, messages=tuple(HELLO))
    assert refused(found) == [None, "NullPrompt", "InvalidMessages"]


def test_batch_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 200)
    config = PromptConfig(sampling=SAMPLING, models=("a/m", "other"))
    body = {"model": "m", "prompt": "p", "max_tokens": 9}
    line = {"custom_id": "x", "url": "/v1/completions", "body": body}
    ids = line | {"custom_id": "y", "body": body | {"model": "other", "prompt": [1, 2]}}
    chat = {
        "custom_id": "z",
        "url": "/v1/chat/completions",
        "body": {"model": "a/m", "messages": HELLO},
    }
    lines = [*(json.dumps(x).encode() for x in (line, ids, chat)), b"{", b"x" * 201]
    table = pa.table({LINE_COLUMN: pa.array(lines, pa.binary())})
    found = rendered(config, table)
    sampling = SamplingParams(max_tokens=9, temperature=0.5)
    assert found[:3] == [
        Prompt("x", sampling, text="p"),
        Prompt("y", sampling, token_ids=(1, 2)),
        Prompt("z", SAMPLING, messages=tuple(HELLO)),
    ]
    assert refused(found) == [None, None, None, "invalid_json", "line_too_long"]
    assert config.lines and config.required_columns == (LINE_COLUMN,)


def test_settings_that_contradict() -> None:
    with pytest.raises(SurgeError, match="one of"):
        PromptConfig(column="a", template="b")
    with pytest.raises(SurgeError, match="custom_id"):
        PromptConfig(id_column="a")
    with pytest.raises(SurgeError, match="template cannot be parsed"):
        PromptConfig(template="{{ a")


def test_a_config_travels() -> None:
    config = PromptConfig(template="{{ a }}", id_column="i", sampling=SAMPLING)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_value_that_python_cannot_hold_is_text() -> None:
    far = pa.array([0, 1 << 60], pa.timestamp("s"))
    table = pa.table({"when": far, "name": ["a", "b"]})
    first, second = rows_of(table, ("name", "when"))
    assert first["name"] == "a" and second["name"] == "b"
    assert isinstance(second["when"], str) and second["when"]
    assert rows_of(table, ()) == [{}, {}]
