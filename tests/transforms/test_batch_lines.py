"""Batch lines: any bytes are a request or a refusal; answers and errors are lines of JSON."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_beam.records import Completion, SamplingParams, SurgeError, TokenLogprob
from surge_beam.transforms import batch_lines
from surge_beam.transforms.batch_lines import (
    BatchRequest,
    RefusedLine,
    ServedModels,
    error_line,
    output_line,
    parse_line,
    parse_messages,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODELS = ServedModels("models/tiny")
DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5, stop=("END",), seed=3)
HELLO = [{"role": "user", "content": "Hello"}]
FEW = settings(max_examples=150)
FIELDS = [
    *batch_lines.UNSUPPORTED,
    *(field.name for field in dataclasses.fields(SamplingParams)),
    "messages",
    "prompt",
    "max_completion_tokens",
    "top_logprobs",
]


def parse(line: Any) -> BatchRequest | RefusedLine:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(data, models=MODELS, defaults=DEFAULTS)


def text_line(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": TEXT, "body": {"model": "tiny", "prompt": "Once"} | body}


def chat_line(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "url": CHAT, "body": {"model": "tiny", "messages": HELLO} | body}


def taken(line: Any) -> BatchRequest:
    request = parse(line)
    assert isinstance(request, BatchRequest), request
    return request


def refused(line: Any, code: str = "invalid_request", names: str = "") -> RefusedLine:
    answer = parse(line)
    assert isinstance(answer, RefusedLine), answer
    assert answer.code == code and names in answer.message, answer
    assert len(answer.message) < 400 and "\n" not in answer.message
    return answer


# Lines


def test_a_chat_request() -> None:
    line = {
        "custom_id": "request-1",
        "method": "POST",
        "url": CHAT,
        "body": {
            "model": "models/tiny",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hello", "name": "Ann"},
            ],
            "temperature": 1,
            "top_p": 0.9,
            "max_tokens": 20,
            "stop": ["\n", "."],
            "seed": -1,
            "user": {"any": ["thing"]},
            "metadata": {"k": "v"},
        },
    }
    assert taken(line) == BatchRequest(
        custom_id="request-1",
        url=CHAT,
        prompt=None,
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello", "name": "Ann"},
        ),
        sampling=SamplingParams(
            temperature=1.0, top_p=0.9, max_tokens=20, stop=("\n", "."), seed=-1
        ),
        model="models/tiny",
    )


def test_a_text_request_takes_the_defaults() -> None:
    expected = BatchRequest("a", TEXT, "Once", None, DEFAULTS, "tiny")
    assert taken(text_line()) == expected
    nothing = dict.fromkeys({*FIELDS} - {"prompt"})
    assert taken(text_line(**nothing)) == expected


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"custom_id":"a"} {"custom_id":"b"}', "invalid_json"),
        (b'{"custom_id":"\xff"}', "invalid_json"),
        (b'{"custom_id":"a\tb"}', "invalid_json"),
        (b'{"custom_id":"a","body":NaN}', "invalid_json"),
        (b'{"custom_id":"a","body":-Infinity}', "invalid_json"),
        (b'{"custom_id":"a","body":' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"custom_id":"a"}'.decode().encode("utf-16"), "invalid_json"),
        (b"{}", "missing_custom_id"),
        (b'{"custom_id":null}', "missing_custom_id"),
        (b'{"custom_id":""}', "missing_custom_id"),
        (b'{"custom_id":7}', "missing_custom_id"),
        (b'{"custom_id":["a"]}', "missing_custom_id"),
        (b'{"custom_id":"\\ud800"}', "invalid_custom_id"),
    ],
)
def test_lines_that_are_no_request(line: bytes, code: str) -> None:
    answer = refused(line, code)
    assert (answer.custom_id, answer.status) == (None, None)


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting(depth: int, opening: bytes, closing: bytes) -> None:
    deep = opening * depth + b"1" + closing * depth
    refused(deep, "invalid_json")
    good = json.dumps(text_line(metadata="DEEP")).encode()
    refused(good.replace(b'"DEEP"', deep), "invalid_json")
    refused(good.replace(b'"DEEP"', opening * depth), "invalid_json")


def test_a_line_of_many_megabytes() -> None:
    text = "word \u2028 " * 2_000_000
    assert taken(text_line(prompt=text)).prompt == text
    refused(text_line(temperature=text), names="temperature")
    refused(text_line() | {"url": text}, "unknown_url")
    assert taken(text_line(prompt=[1] * 1_000_000)).prompt == (1,) * 1_000_000


def test_byte_order_mark_carriage_return_and_keys_given_twice() -> None:
    line = json.dumps(text_line()).encode()
    assert taken(b"\xef\xbb\xbf" + line + b"\r") == taken(line)
    refused(b"\xef\xbb\xbf" * 2 + line, "invalid_json")
    twice = line.replace(b'{"custom_id": "a"', b'{"custom_id": "first", "custom_id": "last"')
    assert taken(twice).custom_id == "last"


@pytest.mark.parametrize("custom_id", [" ", "a\nb", "\x00", "\u2028", "é", "e\u0301", "null", "😀"])
def test_ids_are_the_text_they_are(custom_id: str) -> None:
    assert taken(text_line() | {"custom_id": custom_id}).custom_id == custom_id
    assert refused(text_line(n=2) | {"custom_id": custom_id}).custom_id == custom_id


@pytest.mark.parametrize("where", ["prompt", "stop", "user", "\ud800"])
def test_lone_surrogates(where: str) -> None:
    answer = refused(text_line(**{where: "a\udfff"}), "invalid_json", "lone surrogate")
    assert answer.custom_id == "a"
    assert taken(text_line(prompt="😀")).prompt == "😀"  # a pair, as json.dumps escapes it
    assert taken(text_line(prompt="\\ud800")).prompt == "\\ud800"


def test_url_and_method() -> None:
    for url in ("/v1/embeddings", "/v1/completions/", "v1/completions", "", None, 1, [TEXT]):
        answer = refused(text_line() | {"url": url}, "unknown_url")
        assert (answer.custom_id, answer.status) == ("a", None)
    for method in ("POST", None):
        taken(text_line() | {"method": method})
    for method in ("GET", 1, ["POST"]):
        refused(text_line() | {"method": method}, "invalid_method")
    for body in (None, "text", [], 1):
        answer = refused(text_line() | {"body": body}, names="body")
        assert answer.status == 400


def test_models() -> None:
    for model, names, good, bad in [
        ("org/tiny", (), {"org/tiny", "tiny"}, {"org", "", "*", "Tiny", "/tiny", "tiny "}),
        ("some/path/tiny/", ("x", "y/z"), {"tiny", "x", "y/z"}, {"z", "path/tiny"}),
        ("tiny.gguf", (), {"tiny.gguf"}, {"tiny"}),
        ("tiny", ("*",), {"tiny", "gpt-4o", ""}, set()),
        ("/", (), {"/"}, {""}),
    ]:
        served = ServedModels(model, names)
        assert {name for name in good | bad if served.accepts(name)} == good
    answer = refused(text_line(model="gpt-4o"), "model_not_found", "gpt-4o")
    assert answer.status == 404
    refused(text_line(model=None), names="model")
    refused(text_line(model=["tiny"]), names="model")
    refused({"custom_id": "a", "url": TEXT, "body": {"prompt": "Once"}}, names="model")
    assert taken(text_line(model="models/tiny")).model == "models/tiny"


# Bodies


def test_prompts() -> None:
    for prompt in (" ", "\n", "\x00", "a" * 1000):
        assert taken(text_line(prompt=prompt)).prompt == prompt
    assert taken(text_line(prompt=[5])).prompt == (5,)
    assert taken(text_line(prompt=[0, 2**31 - 1])).prompt == (0, 2**31 - 1)
    for empty in ("", []):
        assert refused(text_line(prompt=empty), "empty_prompt").status == 400
    for several in (["a"], ["a", "b"], [[1]], [[1], [2]], [""], [[]]):
        refused(text_line(prompt=several), names="list of prompts")
    for ids in ([1, "a"], [1, [2]], [True], [1.0], [None], [-1], [2**31], [{}]):
        refused(text_line(prompt=ids), names="prompt[")
    for wrong in (None, 1, True, {"a": 1}):
        refused(text_line(prompt=wrong), names="prompt")


def contents(*messages: Any) -> list[Any]:
    found = taken(chat_line(messages=list(messages))).messages
    assert found is not None
    return [message["content"] for message in found]


def test_messages() -> None:
    def part(text: Any, kind: Any = "text") -> dict[str, Any]:
        return {"type": kind, "text": text}

    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    joined = [part("a"), part(" b\n"), part(""), part("c") | {"cache_control": {}}]
    assert contents(user(joined), user(""), user([]), user(" ")) == ["a b\nc", "", "", " "]
    assert refused(chat_line(messages=[]), "empty_prompt").status == 400
    for wrong in (None, "Hello", {"role": "user"}, 1):
        refused(chat_line(messages=wrong), names="messages")
    for wrong in (None, "Hello", [], 1):
        refused(chat_line(messages=[*HELLO, wrong]), names="messages[1]")
    for wrong in (None, 1, True, {"type": "text", "text": "a"}):
        refused(chat_line(messages=[user(wrong)]), names="messages[0].content")
    for wrong in (
        "a",
        None,
        {"text": "a"},
        {"type": "text"},
        part(None),
        part(1),
        part("a", "input_audio"),
        part("a", ["text"]),
        {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}},
    ):
        refused(chat_line(messages=[user([part("a"), wrong])]), names="messages[0].content[1]")
    for wrong in (None, 1, ["user"]):
        refused(chat_line(messages=[{"role": wrong, "content": "a"}]), names="messages[0].role")
    for role in ("system", "developer", "tool", "narrator"):
        taken(chat_line(messages=[{"role": role, "content": "a"}]))
    refused(chat_line(messages=[{"role": "user"}]), names="messages[0].content")


def test_fields_of_a_message() -> None:
    message = {"role": "tool", "content": "1", "tool_call_id": "c", "refusal": None, "audio": []}
    assert parse_messages([message]) == ({"role": "tool", "content": "1", "tool_call_id": "c"},)
    for wrong in (1, {"id": "a"}, ["a"], True):
        refused(chat_line(messages=[HELLO[0] | {"audio": wrong}]), names='"audio"')
    with pytest.raises(SurgeError, match="must not be empty"):
        parse_messages([])


def test_tool_calls_of_a_dialogue() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert parse_messages([message]) == (
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    for calls in (None, []):
        refused(chat_line(messages=[message | {"tool_calls": calls}]), names="content")
    for wrong in (1, "f", {}, [1], [{}], [{"function": {"name": "f"}}], [call | {"id": 1}]):
        refused(chat_line(messages=[message | {"tool_calls": wrong}]), names="tool_calls")


def test_real_dialogues_are_taken(shared_data: Path) -> None:
    with gzip.open(shared_data / "tau_airline_dialogues" / "dialogues.jsonl.gz") as file:
        dialogues = [json.loads(line)["messages"] for line in file]
    for messages in dialogues[::10]:
        found = parse_messages(messages)
        assert [m["content"] for m in found] == [m["content"] or "" for m in messages]
        assert [m.get("tool_calls") for m in found] == [m.get("tool_calls") for m in messages]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 9, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 9, "max_completion_tokens": None}, {"max_tokens": 9}),
        ({"max_tokens": 2**40}, {"max_tokens": 2**40}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1.5, "top_p": 1}, {"temperature": 1.5, "top_p": 1.0}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": []}, {"stop": ()}),
        ({"seed": 0}, {"seed": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"stop_token_ids": [3, 4]}, {"stop_token_ids": (3, 4)}),
    ],
)
def test_sampling(body: dict[str, Any], expected: dict[str, Any]) -> None:
    for line in (text_line, chat_line):
        assert taken(line(**body)).sampling == dataclasses.replace(DEFAULTS, **expected)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, 1.0, "5", True, [5], 2**63]),
        ("max_completion_tokens", [0, "5", 2.5]),
        ("temperature", [-1, "1", True, [], 10**400, 10**308 * 10]),
        ("top_p", [0, 1.1, -0.5, "1", False]),
        ("min_p", [-0.1, 2, "0"]),
        ("repetition_penalty", [0, -1, "1", {}]),
        ("seed", [1.5, "1", True, 2**63, -(2**63) - 1]),
        ("top_k", [-2, 1.0, "1", True]),
        ("stop", ["", [""], ["a", ""], 1, {"a": 1}, ["a", 1], [["a"]], True]),
        ("stop_token_ids", [1, "1", ["1"], [1.0], [True], [-1], {}]),
        ("ignore_eos", [1, "true", []]),
    ],
)
def test_values_that_are_wrong(name: str, values: list[Any]) -> None:
    for value in values:
        for line in (text_line, chat_line):
            answer = refused(line(**{name: value}), names=name)
            assert (answer.custom_id, answer.status) == ("a", 400)


def test_a_number_too_large_for_a_float() -> None:
    line = json.dumps(text_line(temperature="X")).encode().replace(b'"X"', b"1e999")
    refused(line, names="temperature")


def test_logprobs() -> None:
    def of(line: dict[str, Any]) -> int | None:
        return taken(line).sampling.logprobs

    assert of(chat_line()) is None and of(chat_line(logprobs=False)) is None
    assert of(chat_line(logprobs=True)) == 0
    assert of(chat_line(logprobs=True, top_logprobs=20)) == 20
    assert of(chat_line(top_logprobs=0)) is None
    assert of(text_line(logprobs=0)) == 0 and of(text_line(logprobs=20)) == 20
    for body in ({"logprobs": 1}, {"logprobs": "true"}, {"top_logprobs": 2}):
        refused(chat_line(**body), names="logprobs")
    for count in (21, -1, True, 1.0):
        refused(chat_line(logprobs=True, top_logprobs=count), names="top_logprobs")
        refused(text_line(logprobs=count), names="logprobs")
    on = dataclasses.replace(DEFAULTS, logprobs=2)
    line = json.dumps(chat_line(logprobs=False)).encode()
    request = parse_line(line, models=MODELS, defaults=on)
    assert isinstance(request, BatchRequest) and request.sampling.logprobs is None


@pytest.mark.parametrize(
    ("name", "harmless", "others"),
    [
        ("stream", [False], [True, 0, 1, "false", {}]),
        ("n", [1], [0, 2, 1.0, True, "1"]),
        ("best_of", [1], [2, 1.0]),
        ("echo", [False], [True, 0]),
        ("suffix", [""], ["end", 0]),
        ("presence_penalty", [0, 0.0, -0.0], [0.1, False, "0"]),
        ("frequency_penalty", [0, 0.0], [-1]),
        ("logit_bias", [{}], [{"50256": -100}, []]),
        ("response_format", [{"type": "text"}], [{"type": "json_object"}, "text", {}]),
        ("tools", [[]], [[{"type": "function"}]]),
        ("tool_choice", ["none", "auto"], ["required", {"type": "function"}]),
        ("modalities", [["text"]], [["text", "audio"]]),
        ("chat_template_kwargs", [{}], [{"enable_thinking": False}]),
        ("structured_outputs", [], [{"json": {}}, {}]),
        ("min_tokens", [0], [1]),
    ],
)
def test_what_the_engine_does_not_do(name: str, harmless: list[Any], others: list[Any]) -> None:
    for line in (text_line, chat_line):
        plain = taken(line())
        for value in [*harmless, None]:
            assert taken(line(**{name: value})) == plain
        for value in others:
            refused(line(**{name: value}), names=name)


def test_every_unsupported_field_is_refused_and_its_harmless_values_are_not() -> None:
    for name, harmless in batch_lines.UNSUPPORTED.items():
        refused(text_line(**{name: {"x": 1}}), names=name)
        for value in harmless:
            taken(text_line(**{name: value}))


def test_special_tokens_follow_the_kind_of_prompt() -> None:
    taken(text_line(add_special_tokens=True))
    taken(chat_line(add_special_tokens=False))
    refused(text_line(add_special_tokens=False), names="add_special_tokens")
    refused(chat_line(add_special_tokens=True), names="add_special_tokens")


# Rendering


def completion(**fields: Any) -> Completion:
    return Completion(
        **{
            "custom_id": "a",
            "token_ids": (1, 2),
            "text": "two words",
            "finish_reason": "stop",
            "prompt_tokens": 10,
            "completion_tokens": 2,
            "cached_tokens": 8,
        }
        | fields
    )


def rendered(done: Completion, url: str = TEXT) -> dict[str, Any]:
    texts = {1: "two", 2: " words", 3: "\ufffd", 4: "é", 5: "\ufffd"}
    line = output_line(done, url=url, model="tiny", created=1_700_000_000, token_text=texts.get)  # type: ignore[arg-type]
    assert_is_line(line)
    return json.loads(line)


def assert_is_line(line: str) -> None:
    """One line by anyone's notion, of UTF-8, and JSON to a strict parser."""
    assert line.splitlines() == [line]
    assert line.encode("utf-8").decode("utf-8") == line

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert isinstance(json.loads(line, parse_constant=refuse), dict)


USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 2,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def test_an_answer_to_a_text_completion() -> None:
    line = rendered(completion())
    body = line["response"].pop("body")
    assert line.pop("id").startswith("batch_req_")
    assert line["response"].pop("request_id").startswith("req_")
    assert line == {"custom_id": "a", "response": {"status_code": 200}, "error": None}
    assert body.pop("id").startswith("cmpl-")
    choice = {"index": 0, "text": "two words", "logprobs": None, "finish_reason": "stop"}
    assert body == {
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [choice],
        "usage": USAGE,
        "system_fingerprint": None,
    }


def test_an_answer_to_a_chat() -> None:
    body = rendered(completion(finish_reason="length"), CHAT)["response"]["body"]
    assert body.pop("id").startswith("chatcmpl-")
    message = {"role": "assistant", "content": "two words", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    assert body == {
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "choices": [choice],
        "usage": USAGE,
        "system_fingerprint": None,
    }


def test_ids_are_the_same_every_time_and_differ_between_requests() -> None:
    assert rendered(completion()) == rendered(completion())
    ids = {rendered(completion(custom_id=f"r{i}"))["id"] for i in range(1000)}
    assert len(ids) == 1000


LOGPROBS = (
    TokenLogprob(1, -0.25, ((1, -0.25), (4, -2.0))),
    TokenLogprob(2, float("-inf"), ((3, -0.5), (5, -0.75))),
)


def test_logprobs_of_a_chat() -> None:
    done = completion(logprobs=LOGPROBS)
    choice = rendered(done, CHAT)["response"]["body"]["choices"][0]
    two = {"token": "two", "logprob": -0.25, "bytes": [116, 119, 111]}
    words = {"token": " words", "logprob": -9999.0, "bytes": list(b" words")}
    assert choice["logprobs"] == {
        "content": [
            two | {"top_logprobs": [two, {"token": "é", "logprob": -2.0, "bytes": [195, 169]}]},
            words
            | {
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.5, "bytes": None},
                    {"token": "\ufffd", "logprob": -0.75, "bytes": None},
                ]
            },
        ],
        "refusal": None,
    }


def test_logprobs_of_a_text_completion() -> None:
    choice = rendered(completion(logprobs=LOGPROBS))["response"]["body"]["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["two", " words"],
        "token_logprobs": [-0.25, -9999.0],
        "top_logprobs": [{"two": -0.25, "é": -2.0}, {"\ufffd": -0.5, " words": -9999.0}],
        "text_offset": [0, 3],
    }


@pytest.mark.parametrize(
    ("reason", "code"),
    [("error", "engine_error"), ("capacity", "capacity_exceeded"), ("cancelled", "cancelled")],
)
def test_what_has_no_answer_is_an_error_line(reason: str, code: str) -> None:
    done = completion(finish_reason=reason, error="no logits")
    with pytest.raises(SurgeError, match="no answer: no logits"):
        rendered(done)
    assert batch_lines.not_completed(done) == RefusedLine("a", code, "no logits", 500)
    assert reason in batch_lines.not_completed(dataclasses.replace(done, error=None)).message


def test_error_lines() -> None:
    line = error_line(refused(text_line(n=2)), file="in/a.jsonl", line=3)
    assert_is_line(line)
    content = json.loads(line)
    message = content["error"]["message"]
    assert message.startswith("n is not supported")
    assert content.pop("id").startswith("batch_req_")
    assert content["response"].pop("request_id").startswith("req_")
    error = {"message": message, "type": "invalid_request_error", "param": None}
    assert content == {
        "custom_id": "a",
        "response": {
            "status_code": 400,
            "body": {"error": error | {"code": "invalid_request"}},
        },
        "error": {"code": "invalid_request", "message": message, "file": "in/a.jsonl", "line": 3},
    }
    content = json.loads(error_line(refused(b"{", "invalid_json"), file="f", line=1))
    assert content["custom_id"] is None and content["response"] is None


def test_refusals_made_elsewhere() -> None:
    exceeded = batch_lines.context_exceeded("a", 300, 256)
    assert (exceeded.code, exceeded.status) == ("context_length_exceeded", 400)
    assert "300" in exceeded.message and "256" in exceeded.message
    twice = batch_lines.duplicate_id("a", "in/b.jsonl", 12)
    assert (twice.code, twice.status) == ("duplicate_custom_id", None)
    assert "in/b.jsonl" in twice.message and "12" in twice.message
    assert batch_lines.invalid_request("a", "why") == RefusedLine(
        "a", "invalid_request", "why", 400
    )
    # of one id, refused on two lines
    first, second = (json.loads(error_line(twice, file="f", line=n)) for n in (1, 2))
    assert first["id"] != second["id"]


def test_a_file_name_that_is_not_utf8_and_a_long_message() -> None:
    line = error_line(RefusedLine("a", "c", "m" * 10**6, None), file="in/\udcff", line=1)
    assert_is_line(line)
    error = json.loads(line)["error"]
    assert (error["file"], error["message"]) == ("in/\\xff", "m" * 1000)


# Hostile input


def test_json_parsing_cases(shared_data: Path) -> None:
    with gzip.open(shared_data / "json_parsing_cases" / "cases.jsonl.gz") as file:
        cases = [json.loads(line) for line in file]
    assert len(cases) == 340
    good = json.dumps(text_line(metadata="CASE")).encode()
    wrong = []
    for case in cases:
        content = base64.b64decode(case["content_base64"])
        alone = parse(content)  # none has a custom_id
        assert isinstance(alone, RefusedLine) and alone.custom_id is None
        assert_is_line(error_line(alone, file="cases", line=1))
        # as a part of a line that is good without it
        answer = parse(good.replace(b'"CASE"', content))
        if isinstance(answer, RefusedLine):
            assert answer.code == "invalid_json"
            assert_is_line(error_line(answer, file="cases", line=1))
        accepted = isinstance(answer, BatchRequest)
        if accepted != {"accept": True, "reject": False}.get(case["expect"], accepted):
            wrong.append(case["name"])
    assert wrong == []


def test_naughty_strings(shared_data: Path) -> None:
    texts = json.loads((shared_data / "naughty_strings" / "blns.json").read_text("utf-8"))
    for text in filter(None, texts):
        request = taken(text_line(prompt=text, stop=text) | {"custom_id": text})
        assert (request.custom_id, request.prompt, request.sampling.stop) == (text, text, (text,))
        chat = taken(chat_line(messages=[{"role": text, "content": text}]))
        assert chat.messages == ({"role": text, "content": text},)
        for url in (TEXT, CHAT):
            line = rendered(completion(custom_id=request.custom_id, text=text), url)
            choice = line["response"]["body"]["choices"][0]
            answer = choice["text"] if url == TEXT else choice["message"]["content"]
            assert (line["custom_id"], answer) == (text, text)
        line = error_line(RefusedLine(text, "code", text, 400), file=text, line=1)
        assert_is_line(line)
        content = json.loads(line)
        assert (content["custom_id"], content["error"]["file"]) == (text, text)
    refused(text_line() | {"custom_id": ""}, "missing_custom_id")


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_are_a_refusal(data: bytes) -> None:
    assert isinstance(parse(data), RefusedLine)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["user", "text", "tiny", CHAT, TEXT]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=400)
@given(
    st.sampled_from([CHAT, TEXT]),
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
    st.dictionaries(st.sampled_from(["custom_id", "url", "method", "body"]), values, max_size=1),
)
def test_any_json_is_a_request_or_a_refusal(
    url: str, body: dict[str, Any], around: dict[str, Any]
) -> None:
    line = (chat_line if url == CHAT else text_line)(**body) | around
    answer = parse(line)
    if isinstance(answer, RefusedLine):
        assert answer.code and answer.message
        assert_is_line(error_line(answer, file="f", line=1))
        return
    assert answer.custom_id == line["custom_id"] and answer.url == line["url"]
    assert (answer.prompt is None) == (answer.url == CHAT) != (answer.messages is None)
    assert answer.prompt is None or answer.prompt
    answer.custom_id.encode(), repr(answer).encode()
    for message in answer.messages or ():
        assert type(message["role"]) is type(message["content"]) is str
    assert_is_line(rendered_text(answer.custom_id))


def rendered_text(text: str) -> str:
    done = completion(custom_id=text, text=text)
    return output_line(done, url=TEXT, model=text, created=0, token_text=str)


@FEW
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_come_back_exactly(text: str) -> None:
    line = rendered_text(text)
    assert_is_line(line)
    content = json.loads(line)
    body = content["response"]["body"]
    assert (content["custom_id"], body["choices"][0]["text"], body["model"]) == (text,) * 3
    line = error_line(RefusedLine(text, text, text, None), file=text, line=1)
    assert_is_line(line)
    assert json.loads(line)["custom_id"] == text


@FEW
@given(st.text(st.characters(categories=["Cs", "Zl", "Cc"])))
def test_no_text_breaks_a_line(text: str) -> None:
    assert_is_line(rendered_text(text))
