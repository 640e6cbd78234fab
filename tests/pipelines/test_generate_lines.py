"""OpenAI batch lines: every line is answered once or refused once, in input order."""

from __future__ import annotations

import base64
import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from surge_beam.records import SamplingParams
from surge_beam.transforms.write import Committer
from tests.pipelines.generate_support import (
    CHAT,
    GREEDY,
    TEXT,
    Dying,
    answer,
    as_bytes,
    as_chat,
    chat_line,
    errors,
    generate,
    one_by_one,
    outputs,
    said,
    sampled,
    settled,
    start_generate,
    text_line,
    tree_saves,
    without_time,
    write_lines,
)
from tests.pipelines.harness import dead_letters

Wanted = tuple[str, tuple[int, ...], SamplingParams]
HELLO = [{"role": "user", "content": "Hello"}]
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
CONTEXT = 200

# What is answered: the line, and prompt and sampling of its answer.
TAKEN: list[tuple[Any, tuple[int, ...], SamplingParams]] = [
    (text_line("t1", "Once upon"), as_bytes("Once upon"), GREEDY),
    (text_line("t2", [79, 110, 99, 101]), as_bytes("Once"), GREEDY),
    (text_line("t3", "   "), as_bytes("   "), GREEDY),
    (text_line("t4", "short", max_tokens=3), as_bytes("short"), sampled(max_tokens=3)),
    (
        text_line("t5", "both", max_tokens=3, max_completion_tokens=5),
        as_bytes("both"),
        sampled(max_tokens=5),
    ),
    (
        text_line("t6", "hot", temperature=1.5, seed=9, top_k=-1),
        as_bytes("hot"),
        sampled(temperature=1.5, seed=9),
    ),
    (text_line("t7", "hot", temperature=1.5), as_bytes("hot"), sampled(temperature=1.5)),
    (text_line("t8", "hot", temperature=1.5), as_bytes("hot"), sampled(temperature=1.5)),
    (text_line("t9", "other name", model="named so"), as_bytes("other name"), GREEDY),
    (
        text_line("t10", "x" * (CONTEXT - 3), max_tokens=50),
        as_bytes("x" * (CONTEXT - 3)),
        sampled(max_tokens=3),
    ),
    (chat_line("c1", HELLO), as_chat(HELLO), GREEDY),
    (chat_line("c2", [{"role": "user", "content": PARTS}]), as_chat(HELLO), GREEDY),
    (
        chat_line("c3", [*HELLO, {"role": "assistant", "content": ""}]),
        as_chat([*HELLO, {"role": "assistant", "content": ""}]),
        GREEDY,
    ),
    (
        chat_line("c4", HELLO, user="u", metadata={"a": 1}, n=1, stream=False),
        as_chat(HELLO),
        GREEDY,
    ),
    (text_line(" ", "a space"), as_bytes("a space"), GREEDY),
    (text_line("é\u0301\n\u2028水", "an id of letters"), as_bytes("an id of letters"), GREEDY),
    (
        text_line("10", "an id of digits") | {"method": None},
        as_bytes("an id of digits"),
        GREEDY,
    ),
]

# What is refused: the line, its code, status, and the custom_id that its error has.
REFUSED: list[tuple[Any, str, int | None, str | None]] = [
    (b"not JSON", "invalid_json", None, None),
    (b"\xff\xfe", "invalid_json", None, None),
    (b"[1]", "invalid_json", None, None),
    (b"7", "invalid_json", None, None),
    (b'"text"', "invalid_json", None, None),
    (b"null", "invalid_json", None, None),
    (b"{}", "missing_custom_id", None, None),
    (text_line("", "p"), "missing_custom_id", None, None),
    (text_line(10, "p"), "missing_custom_id", None, None),
    (text_line("r1", "p") | {"url": "/v1/embeddings"}, "unknown_url", None, "r1"),
    (text_line("r2", "p") | {"method": "GET"}, "invalid_method", None, "r2"),
    (text_line("r3", "p") | {"body": []}, "invalid_request", 400, "r3"),
    (text_line("r4", "p", stream=True), "invalid_request", 400, "r4"),
    (text_line("r5", "p", n=2), "invalid_request", 400, "r5"),
    (text_line("r6", ["p", "q"]), "invalid_request", 400, "r6"),
    (text_line("r7", 7), "invalid_request", 400, "r7"),
    (text_line("r8", "p", max_tokens="3"), "invalid_request", 400, "r8"),
    (text_line("r9", "p", temperature=-1), "invalid_request", 400, "r9"),
    (text_line("r10", ""), "empty_prompt", 400, "r10"),
    (text_line("r11", []), "empty_prompt", 400, "r11"),
    (chat_line("r12", []), "empty_prompt", 400, "r12"),
    (
        chat_line("r13", [{"role": "user", "content": [{"type": "image_url"}]}]),
        "invalid_request",
        400,
        "r13",
    ),
    (chat_line("r14", "Hello"), "invalid_request", 400, "r14"),
    (text_line("r15", "x" * CONTEXT), "context_length_exceeded", 400, "r15"),
    (text_line("r16", "p", model="gpt-4"), "model_not_found", 404, "r16"),
    (text_line("r17", [256]), "invalid_request", 400, "r17"),
    (text_line("t1", "the same id"), "duplicate_custom_id", None, "t1"),
    (text_line("t1", "Once upon"), "duplicate_custom_id", None, "t1"),
    # an id of a line that was refused is free, and is taken by the first that can be answered
    (text_line("t4", "not the first"), "duplicate_custom_id", None, "t4"),
]


def check_answers(output: Path, wanted: list[Wanted], *, seed: int = 0) -> None:
    found = outputs(output)
    assert [line["custom_id"] for line in found] == [name for name, *_ in wanted]
    alone = one_by_one(wanted, seed=seed)
    assert [said(line) for line in found] == [answer(c) for c in alone]


def check_counts(output: Path) -> dict[str, Any]:
    found, answered, refused = settled(output), outputs(output), errors(output)
    assert (found["rows_out"], found["dead_letters"]) == (len(answered), len(refused))
    assert dead_letters(output).num_rows == len(refused)
    assert all(line["error"] is None for line in answered)
    assert len({line["id"] for line in answered}) == len(answered)
    for line in refused:
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert sorted(line["error"]) == ["code", "file", "line", "message"]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"max_rows": 4, "rounds": 3, "slice_tokens": 4, "ranges": 4}],
    ids=["plain", "cut small"],
)
def test_every_rule(tmp_path: Path, options: dict[str, Any]) -> None:
    """Over four files, among blank lines, with errors and answers mixed."""
    rng = random.Random(4)
    first = [(line, None) for line, *_ in TAKEN]
    later: list[tuple[Any, Any]] = [(line, refused) for line, *refused in REFUSED]
    mixed = [*first[:4], *sorted([*first[4:], *later], key=lambda _: rng.random())]
    # the ids that REFUSED doubles are among the first four
    names = ["a b.jsonl", "a%20.jsonl.gz", "a-1.jsonl", "a/ä.jsonl"]
    wanted: list[Wanted] = []
    failed: list[tuple[str, int, list[Any]]] = []
    answered = {json.dumps(line): (ids, sampling) for line, ids, sampling in TAKEN}
    cuts = [0, 12, 25, 39, len(mixed)]
    for k, name in enumerate(sorted(names)):
        lines: list[bytes] = [b""]
        for line, refused in mixed[cuts[k] : cuts[k + 1]]:
            lines.append(line if isinstance(line, bytes) else json.dumps(line).encode())
            if refused is None:
                wanted.append((line["custom_id"], *answered[json.dumps(line)]))
            else:
                failed.append((name, len(lines), refused))
            lines += [b"", b" \t\r"][: rng.randrange(3)]
        # the last line of a file may lack its newline; \r is a space of JSON
        data = b"\r\n".join(lines) if k == 1 else b"\n".join(lines)
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    output = tmp_path / "out"
    options = {"max_context": CONTEXT, "served_model_name": "named so", "seed": 3, **options}
    done = generate(input=tmp_path / "in", output=output, **options)
    assert f"{len(REFUSED)} dead letters" in done.stdout
    check_answers(output, wanted, seed=3)
    found = errors(output)
    places = [(Path(x["error"]["file"]), x["error"]["line"]) for x in found]
    assert places == [(tmp_path / "in" / name, line) for name, line, _ in failed]
    for line, (_, _, (code, status, custom_id)) in zip(found, failed, strict=True):
        assert (line["error"]["code"], line["custom_id"]) == (code, custom_id), line
        assert (line["response"] or {}).get("status_code") == status, line
        assert line["error"]["message"]
    report = check_counts(output)
    assert report["rows_decoded"] == len(TAKEN)
    cached = sum(
        x["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for x in outputs(output)
    )
    assert cached == report["prefix_tokens_saved"] <= tree_saves(ids for _, ids, _ in wanted)
    texts = {x["custom_id"]: x["response"]["body"]["choices"][0] for x in outputs(output)}
    assert texts["t7"]["text"] != texts["t8"]["text"], "each id draws for itself"


def test_the_shape_of_an_answer(tmp_path: Path) -> None:
    lines = [
        chat_line("c", HELLO, logprobs=True, top_logprobs=0),
        text_line("t", "Once", model="dummy", stop=["\n"]),
    ]
    write_lines(tmp_path / "a.jsonl", lines)
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out")
    chat, text = outputs(tmp_path / "out")
    for line, url in ((chat, CHAT), (text, TEXT)):
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert line["response"]["status_code"] == 200 and line["response"]["request_id"]
        body = line["response"]["body"]
        assert body["model"] == "dummy"
        assert body["object"] == ("chat.completion" if url == CHAT else "text_completion")
    choice = chat["response"]["body"]["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["index"] == 0
    content = choice["logprobs"]["content"]
    assert "".join(x["token"] for x in content).startswith(choice["message"]["content"])
    assert text["response"]["body"]["choices"][0]["logprobs"] is None
    assert (tmp_path / "out" / "errors.jsonl").read_bytes() == b""
    check_counts(tmp_path / "out")


def test_errors_of_files_stand_where_the_files_do(tmp_path: Path) -> None:
    """A file that cannot be read is one error, between those of its neighbours."""
    for name in "aceg":
        lines = [text_line(f"{name}{i}", f"{name} {i}") for i in range(3)]
        write_lines(tmp_path / "in" / f"{name}.jsonl", [lines[0], b"bad", *lines[1:]])
    for name in "bdfh":
        (tmp_path / "in" / f"{name}.jsonl.gz").write_bytes(b"not gzip")
    generate(input=tmp_path / "in", output=tmp_path / "out")
    found = [(Path(x["error"]["file"]).name, x["error"]["line"]) for x in errors(tmp_path / "out")]
    names = [f"{n}.jsonl" if n in "aceg" else f"{n}.jsonl.gz" for n in "abcdefgh"]
    assert [name for name, _ in found] == names
    assert [line for name, line in found if name in ("a.jsonl", "g.jsonl")] == [2, 2]
    assert [x["custom_id"] for x in outputs(tmp_path / "out")] == [
        f"{name}{i}" for name in "aceg" for i in range(3)
    ]
    assert check_counts(tmp_path / "out")["files_failed"] == 4


def json_cases(shared_data: Path) -> Iterable[bytes]:
    path = shared_data / "json_parsing_cases" / "cases.jsonl.gz"
    for line in gzip.decompress(path.read_bytes()).splitlines():
        yield base64.b64decode(json.loads(line)["content_base64"])


def test_broken_json_among_good_lines(tmp_path: Path, shared_data: Path) -> None:
    """All cases of a parser's test suite; those with newlines are several lines."""
    good, bad, data = [], [], b""
    number = 0
    for i, case in enumerate(json_cases(shared_data)):
        for line in (*case.split(b"\n"), json.dumps(text_line(f"id {i}", f"good {i}")).encode()):
            number += 1
            data += line + b"\n"
            if line.startswith(b'{"custom_id": "id '):
                good.append(f"id {i}")
            elif line.strip(b" \t\r"):
                bad.append(number)
    assert len(good) == 340 and len(bad) > 335
    (tmp_path / "a.jsonl").write_bytes(data)
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", max_tokens=2, max_rows=100)
    assert [x["custom_id"] for x in outputs(tmp_path / "out")] == good
    found = errors(tmp_path / "out")
    assert [x["error"]["line"] for x in found] == bad
    assert {x["error"]["code"] for x in found} == {"invalid_json", "missing_custom_id"}
    assert all(x["custom_id"] is None and x["response"] is None for x in found)
    check_counts(tmp_path / "out")


def test_naughty_strings_as_prompts_and_ids(tmp_path: Path, shared_data: Path) -> None:
    texts = json.loads((shared_data / "naughty_strings" / "blns.json").read_text("utf-8"))
    lines = [
        text_line(text, text) if i % 2 else chat_line(text, [{"role": "user", "content": text}])
        for i, text in enumerate(texts)
    ]
    write_lines(tmp_path / "a.jsonl", lines)
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", max_tokens=4)
    first = {text: i for i, text in reversed(list(enumerate(texts))) if text}
    order = sorted(first.values())
    wanted = [
        (
            texts[i],
            as_bytes(texts[i]) if i % 2 else as_chat([{"role": "user", "content": texts[i]}]),
            sampled(max_tokens=4),
        )
        for i in order
    ]
    check_answers(tmp_path / "out", wanted)
    found = errors(tmp_path / "out")
    assert [x["error"]["line"] - 1 for x in found] == sorted({*range(len(texts))} - {*order})
    assert {x["error"]["code"] for x in found} == {"missing_custom_id", "duplicate_custom_id"}
    check_counts(tmp_path / "out")


def test_ids_are_the_text_they_are(tmp_path: Path) -> None:
    """No case, form or space is folded; an escape is the letter that it stands for."""
    names = ["a", "A", " a", "a ", "\u00e9", "e\u0301", "1", "01", "\u0000", "a\u0000"]
    lines: list[Any] = [text_line(name, "same") for name in names]
    escaped = json.dumps(text_line("?", "same")).replace('"?"', '"\\u0061"').encode()
    write_lines(tmp_path / "a.jsonl", [*lines, escaped])
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", temperature=1.0)
    sampling = sampled(temperature=1.0)
    check_answers(tmp_path / "out", [(n, as_bytes("same"), sampling) for n in names])
    (line,) = errors(tmp_path / "out")
    assert (line["error"]["code"], line["custom_id"]) == ("duplicate_custom_id", "a")
    assert "row 1 of a.jsonl" in line["error"]["message"]


def test_any_model_where_asked(tmp_path: Path) -> None:
    lines = [text_line("a", "x", model="gpt-4"), text_line("b", "x", model="")]
    write_lines(tmp_path / "a.jsonl", lines)
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", served_model_name="*")
    assert [x["custom_id"] for x in outputs(tmp_path / "out")] == ["a", "b"]
    assert outputs(tmp_path / "out")[0]["response"]["body"]["model"] == "gpt-4"


def test_nothing_but_errors_and_nothing_at_all(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [b"{", b"[]"])
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "bad")
    assert outputs(tmp_path / "bad") == [] and len(errors(tmp_path / "bad")) == 2
    check_counts(tmp_path / "bad")
    (tmp_path / "b.jsonl").write_bytes(b"\n \n")
    generate(input=tmp_path / "b.jsonl", output=tmp_path / "none")
    assert outputs(tmp_path / "none") == errors(tmp_path / "none") == []
    check_counts(tmp_path / "none")


def test_parquet_is_no_batch(tmp_path: Path) -> None:
    from tests.pipelines.harness import write_rows

    write_rows(tmp_path / "a.parquet", {"prompt": ["x"]})
    generate(input=tmp_path / "a.parquet", output=tmp_path / "out")
    (line,) = errors(tmp_path / "out")
    assert "name a prompt column" in line["error"]["message"] and line["error"]["line"] == 0


def test_a_bad_line_ends_the_job_where_asked(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [text_line("a", "x"), b"", b"{"])
    options = {"on_bad_input": "fail", "check": False}
    done = generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", **options)
    assert done.returncode == 1 and "a.jsonl, line 3: not valid JSON" in done.stderr
    assert not (tmp_path / "out" / "output.jsonl").exists()


def test_growth(tmp_path: Path) -> None:
    """A new file and a changed one: only these are decoded, and both final files are remade."""
    corpus, output = tmp_path / "in", tmp_path / "out"
    for name in "bcd":
        lines = [text_line(f"{name}{i}", f"{name} {i}") for i in range(5)]
        write_lines(corpus / f"{name}.jsonl", [*lines, b"bad"])
    options = {"input": corpus, "max_rows": 2}
    generate(output=output, **options)
    assert check_counts(output)["rows_decoded"] == 15
    before = (output / "output.jsonl").read_bytes()
    done = generate(output=output, **options)
    assert "0 rows decoded, 15 reused" in done.stdout and "nothing to do" in done.stdout
    assert (output / "output.jsonl").read_bytes() == before
    # an id that is answered already, in a file that comes first by its name
    write_lines(corpus / "a.jsonl", [text_line("b0", "again"), text_line("a1", "new")])
    changed = [text_line(f"c{i}", f"c {i}") for i in (0, 3)] + [text_line("c9", "c 9")]
    write_lines(corpus / "c.jsonl", changed)
    generate(output=output, **options)
    report = check_counts(output)
    assert report["rows_decoded"] == 4 and report["rows_reused"] == 10
    wanted = [("a1", as_bytes("new"), GREEDY)]
    wanted += [(f"b{i}", as_bytes(f"b {i}"), GREEDY) for i in range(5)]
    wanted += [(f"c{i}", as_bytes(f"c {i}"), GREEDY) for i in (0, 3, 9)]
    wanted += [(f"d{i}", as_bytes(f"d {i}"), GREEDY) for i in range(5)]
    check_answers(output, wanted)
    found = [(Path(x["error"]["file"]).name, x["error"]["line"]) for x in errors(output)]
    assert found == [("a.jsonl", 1), ("b.jsonl", 6), ("d.jsonl", 6)]
    assert errors(output)[0]["error"]["code"] == "duplicate_custom_id"
    # what is gone stays, until it is pruned
    (corpus / "b.jsonl").unlink()
    generate(output=output, **options)
    assert len(outputs(output)) == 14
    done = generate(output=output, prune=True, **options)
    check_answers(output, [x for x in wanted if x[0][0] != "b"])
    assert [Path(x["error"]["file"]).name for x in errors(output)] == ["a.jsonl", "d.jsonl"]
    # and its ids are free again
    write_lines(corpus / "e.jsonl", [text_line("b3", "once more")])
    generate(output=output, **options)
    assert outputs(output)[-1]["custom_id"] == "b3"
    settled(output)


def test_a_file_under_another_name_after_a_kill(tmp_path: Path) -> None:
    """Ids of a block that was never committed are free."""
    write_lines(tmp_path / "in" / "a.jsonl", [text_line("x", "one"), text_line("y", "two")])
    options = {"input": tmp_path / "in", "output": tmp_path / "out"}
    job = start_generate(setup=Dying(Committer, "commit", after=False), **options)
    assert job.wait().returncode == -9
    (tmp_path / "in" / "a.jsonl").rename(tmp_path / "in" / "b.jsonl")
    generate(**options)
    assert [x["custom_id"] for x in outputs(tmp_path / "out")] == ["x", "y"]
    assert errors(tmp_path / "out") == []


def test_the_real_model(tmp_path: Path, smollm: Path) -> None:
    """A chat and a text as SmolLM2 answers them alone, by the last part of the model's path."""
    from surge_beam.gpu.engine import Engine
    from surge_beam.gpu.text_tokenizer import load_text_tokenizer
    from surge_beam.records import EngineConfig, Request

    config = EngineConfig(
        model=str(smollm), device="cpu", dtype="float32", max_sequences=1, share_prefixes=False
    )
    tokenizer = load_text_tokenizer(config)
    lines = [
        chat_line("c", HELLO, model=smollm.name, max_tokens=8),
        text_line(
            "t", "The capital of France is", model=str(smollm), max_tokens=8, stop=[" Paris"]
        ),
    ]
    write_lines(tmp_path / "a.jsonl", lines)
    options = {"model": smollm, "dtype": "float32", "rounds": 2, "slice_tokens": 3}
    generate(input=tmp_path / "a.jsonl", output=tmp_path / "out", **options)
    with Engine(config) as engine:
        prompts = [tokenizer.chat(HELLO), tokenizer.encode_batch(["The capital of France is"])[0]]
        alone = [
            engine.generate(
                [
                    Request(
                        custom_id=str(i),
                        prompt_ids=tuple(ids),
                        sampling=sampled(max_tokens=8, stop=(" Paris",) if i else ()),
                    )
                ]
            )[0]
            for i, ids in enumerate(prompts)
        ]
    assert [said(x) for x in outputs(tmp_path / "out")] == [answer(c) for c in alone]


def test_two_runs_give_the_same_files(tmp_path: Path) -> None:
    lines = [text_line(f"r{i}", f"prompt {i % 3}", temperature=1.0) for i in range(20)]
    write_lines(tmp_path / "in" / "a.jsonl", [*lines, b"bad", lines[3]])
    generate(input=tmp_path / "in", output=tmp_path / "one")
    generate(input=tmp_path / "in", output=tmp_path / "two", max_rows=3, rounds=2, slice_tokens=5)
    one, two = (without_time(outputs(tmp_path / x)) for x in ("one", "two"))
    assert one == two
    files = [(tmp_path / x / "errors.jsonl").read_bytes() for x in ("one", "two")]
    assert files[0] == files[1]
