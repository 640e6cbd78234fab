"""From prompts to requests: what has no tokens, too many or wrong ones is refused."""

from __future__ import annotations

import pytest

from surge_beam.records import EngineConfig, Request, SamplingParams, SurgeError
from surge_beam.transforms.prompts import Prompt, Refusal
from surge_beam.transforms.tokenizing import Tokenizing

SAMPLING = SamplingParams(max_tokens=3)


def requests(*prompts: Prompt | Refusal, max_context: int | None = None) -> list[Request | Refusal]:
    return Tokenizing(EngineConfig(model="dummy", max_context=max_context)).requests(prompts)


def test_each_kind_of_prompt_in_its_place() -> None:
    refusal = Refusal("NullPrompt", "no prompt")
    chat = ({"role": "user", "content": "Hi"},)
    found = requests(
        refusal,
        Prompt("a", SAMPLING, text="one"),
        Prompt("b", SAMPLING, messages=chat),
        refusal,
        Prompt("c", SAMPLING, token_ids=(0, 255)),
        Prompt("d", SAMPLING, text="two"),
    )
    assert found == [
        refusal,
        Request(custom_id="a", prompt_ids=tuple(b"one"), sampling=SAMPLING),
        Request(custom_id="b", prompt_ids=tuple(b"user: Hi\nassistant: "), sampling=SAMPLING),
        refusal,
        Request(custom_id="c", prompt_ids=(0, 255), sampling=SAMPLING),
        Request(custom_id="d", prompt_ids=tuple(b"two"), sampling=SAMPLING),
    ]
    assert requests() == []


@pytest.mark.parametrize("ids", [(256,), (0, -1), (1 << 40,)])
def test_tokens_that_the_model_has_not(ids: tuple[int, ...]) -> None:
    (found,) = requests(Prompt("a", SAMPLING, token_ids=ids))
    assert isinstance(found, Refusal) and found.error == "invalid_request"
    assert str(ids[-1]) in found.message and "256" in found.message


def test_the_context() -> None:
    for most, context in ((8192, None), (8192, 9000), (10, 10)):
        full = Prompt("a", SAMPLING, text="x" * most)
        fits = Prompt("b", SAMPLING, text="x" * (most - 1))
        first, second = requests(full, fits, max_context=context)
        assert isinstance(first, Refusal) and first.error == "context_length_exceeded"
        assert f"{most} tokens" in first.message
        assert isinstance(second, Request) and len(second.prompt_ids) == most - 1


def test_a_prompt_without_tokens() -> None:
    found = requests(Prompt("a", SAMPLING, text=""), Prompt("b", SAMPLING, token_ids=()))
    assert [x.error for x in found if isinstance(x, Refusal)] == ["empty_prompt"] * 2


def test_a_chat_template_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from surge_beam.gpu.text_tokenizer import DummyTokenizer

    def fail(self: DummyTokenizer, messages: object) -> list[int]:
        raise SurgeError("the chat template fails: no role 'x'")

    monkeypatch.setattr(DummyTokenizer, "chat", fail)
    (found,) = requests(Prompt("a", SAMPLING, messages=({"role": "x", "content": ""},)))
    assert found == Refusal("invalid_request", "the chat template fails: no role 'x'")


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(SurgeError, match="no/such"):
        Tokenizing(EngineConfig(model="no/such"))


def test_text() -> None:
    assert Tokenizing(EngineConfig(model="dummy")).text([1, 2]) == "\u0101\u0102"
