"""OpenAI batch lines: requests parsed, answers and errors rendered.

A line is ``{"custom_id", "method", "url", "body"}``, as in OpenAI's Batch API reference, with
``/v1/chat/completions`` or ``/v1/completions`` as url; an answer and an error are lines of that
API's output and error files. Nothing here reads or writes; any bytes are a request or a refusal.

What the body may hold:

- Taken: ``model`` (required), ``messages`` or ``prompt`` (a text or token ids), ``max_tokens``,
  ``max_completion_tokens`` (goes before ``max_tokens``), ``temperature``, ``top_p``, ``seed``,
  ``stop``, ``logprobs``, ``top_logprobs``, and vLLM's ``top_k`` (-1 keeps all, like 0), ``min_p``,
  ``repetition_penalty``, ``stop_token_ids``, ``ignore_eos``. Absent or null means the default.
- Refused unless null or a value that changes nothing, since the engine does not do them:
  the names in ``UNSUPPORTED``, and ``add_special_tokens``.
- Ignored, whatever they hold: all others, such as ``user``, ``metadata``, ``store``,
  ``service_tier``, ``stream_options``, ``parallel_tool_calls``.

Of a key given twice the last value counts. A byte order mark before a line is no part of it. NaN
and Infinity are not JSON. A line with the escape of a lone surrogate, anywhere, is refused: it
stands for no character, and no tokenizer or UTF-8 file takes it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import xxhash

from surge_beam.records import Completion, SamplingParams, SurgeError, TokenLogprob

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"

# Fields that would change the answer, with the values besides null that do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # vLLM's
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logprob_token_ids": (),
    "min_tokens": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

# A chat template brings its own special tokens; a raw prompt gets the tokenizer's.
_UNSUPPORTED = {
    url: UNSUPPORTED | {"add_special_tokens": (url == TEXT_URL,)} for url in (CHAT_URL, TEXT_URL)
}

_MAX_LOGPROBS = 20  # as in OpenAI's chat completions
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_INT64 = (1 << 63) - 1
_MIN_LOGPROB = -9999.0  # OpenAI's own stand-in; -inf is not JSON
_MAX_MESSAGE_CHARACTERS = 1_000
_SHOWN_CHARACTERS = 40
_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
# What some readers take for the end of a line, and what UTF-8 has no bytes for.
_ESCAPED = re.compile(r"[\x85\u2028\u2029\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """A line that can be answered.

    Attributes:
      custom_id: not empty; the text as it was given.
      url: ``/v1/chat/completions`` or ``/v1/completions``.
      prompt: text or token ids of a text completion, not empty; None of a chat.
      messages: of a chat completion, as ``parse_messages`` gives them; None of a text completion.
      sampling: the run's defaults, with what the body says in their place.
      model: as asked for.
    """

    custom_id: str
    url: str
    prompt: str | tuple[int, ...] | None
    messages: tuple[dict[str, Any], ...] | None
    sampling: SamplingParams
    model: str


@dataclasses.dataclass(frozen=True)
class RefusedLine:
    """A line that is not answered, and why.

    Attributes:
      custom_id: None where the line has no usable one.
      code: for a program, such as ``invalid_json``, ``missing_custom_id``, ``invalid_request``.
      message: one sentence for a person.
      status: the HTTP status an API would have answered with; None for a line that is no request.
    """

    custom_id: str | None
    code: str
    message: str
    status: int | None


@dataclasses.dataclass(frozen=True)
class ServedModels:
    """The names under which requests may ask for the model.

    Attributes:
      model: the model's name or path; its last part is a name too.
      names: further ones; ``*`` takes any.
    """

    model: str
    names: tuple[str, ...] = ()

    def accepts(self, name: str) -> bool:
        """Whether a request for this model is answered."""
        if name == self.model or name in self.names or "*" in self.names:
            return True
        return name != "" and name == pathlib.PurePosixPath(self.model).name


class _Refused(SurgeError):
    """Why a line is refused."""

    def __init__(self, code: str, message: str, status: int | None) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def parse_line(
    line: bytes, *, models: ServedModels, defaults: SamplingParams
) -> BatchRequest | RefusedLine:
    """The request in a line, or why it is none; never raises on what a line holds.

    Blank lines, prompts that fill the context and ids that come twice are the caller's.

    Args:
      line: one line without its newline; any bytes.
      models: which models may be asked for.
      defaults: sampling parameters where the body has none.
    """
    custom_id = None
    try:
        fields = _object(line)
        custom_id = _custom_id(fields)
        _check_characters(line, fields)
        url, body = _envelope(fields)
        model = _model(body, models)
        _check_unsupported(body, url)
        sampling = _sampling(body, url, defaults)
        if url == CHAT_URL:
            messages = parse_messages(body.get("messages"))
            return BatchRequest(custom_id, url, None, messages, sampling, model)
        return BatchRequest(custom_id, url, _prompt(body), None, sampling, model)
    except _Refused as refused:
        return RefusedLine(custom_id, refused.code, str(refused), refused.status)
    except RecursionError:
        return RefusedLine(custom_id, "invalid_json", "values are nested too deeply", None)
    except MemoryError:
        return RefusedLine(
            custom_id, "invalid_json", "the line needs more memory than there is", None
        )


def parse_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Messages of a chat as a chat template takes them.

    Each has ``role`` and ``content``, both texts; ``tool_calls`` where there are any, their
    arguments as the text they are; and every further field that is a text, such as ``name`` or
    ``tool_call_id``. Content parts of type ``text`` are joined with nothing between them; null
    content beside tool calls becomes an empty text; other null fields and empty lists are left
    out.

    Raises:
      SurgeError: if there is no message, a value has another type, or a part or field holds what
        is not text; the message names the field.
    """
    if type(value) is not list:
        raise _wrong("messages", "a list", value)
    if not value:
        raise _Refused("empty_prompt", "messages must not be empty", 400)
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def invalid_request(custom_id: str, message: str) -> RefusedLine:
    """A request that cannot be answered as it is, such as one that its chat template refuses."""
    return RefusedLine(custom_id, "invalid_request", message, 400)


def context_exceeded(custom_id: str, prompt_tokens: int, context_length: int) -> RefusedLine:
    """A prompt that leaves no room for a token of the answer."""
    return RefusedLine(
        custom_id,
        "context_length_exceeded",
        f"the prompt has {prompt_tokens} tokens, which fills the context of {context_length}",
        400,
    )


def duplicate_id(custom_id: str, first_file: str, first_line: int) -> RefusedLine:
    """A custom_id that an earlier accepted line has; lines count from 1."""
    return RefusedLine(
        custom_id,
        "duplicate_custom_id",
        f"line {first_line} of {first_file} has this custom_id already",
        None,
    )


def not_completed(completion: Completion) -> RefusedLine:
    """A request whose completion ended with ``error``, ``capacity`` or ``cancelled``."""
    codes = {"capacity": "capacity_exceeded", "cancelled": "cancelled"}
    message = completion.error or f"decoding ended with {completion.finish_reason}"
    code = codes.get(completion.finish_reason, "engine_error")
    return RefusedLine(completion.custom_id, code, message, 500)


# Rendering


def output_line(
    completion: Completion,
    *,
    url: str,
    model: str,
    created: int,
    token_text: Callable[[int], str],
) -> str:
    """A line of the output file, without its newline.

    Holds nothing that depends on when or where it was rendered but ``created``; the ids are a
    digest of the custom_id. ``finish_reason`` is the completion's, so also ``repetition``, which
    OpenAI's has not. Log-probabilities are of every token decoded, those of a stop text included.

    Args:
      completion: one that ended with an answer.
      url: the request's.
      model: as the request asked for it.
      created: seconds since 1970.
      token_text: the text of a token, for log-probabilities.

    Raises:
      SurgeError: if the completion is none that can be answered with; see ``not_completed``.
    """
    if completion.finish_reason in ("error", "capacity", "cancelled"):
        raise SurgeError(
            f"request {completion.custom_id!r} has no answer: {not_completed(completion).message}"
        )
    digest = _digest(completion.custom_id)
    choice: dict[str, Any]
    if url == CHAT_URL:
        prefix, kind = "chatcmpl", "chat.completion"
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None}
        if completion.logprobs is not None:
            choice["logprobs"] = _chat_logprobs(completion.logprobs, token_text)
    else:
        prefix, kind = "cmpl", "text_completion"
        choice = {"index": 0, "text": completion.text, "logprobs": None}
        if completion.logprobs is not None:
            choice["logprobs"] = _text_logprobs(completion.logprobs, token_text)
    choice["finish_reason"] = completion.finish_reason
    body = {
        "id": f"{prefix}-{digest}",
        "object": kind,
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
        },
        "system_fingerprint": None,
    }
    return _json_line(
        {
            "id": f"batch_req_{digest}",
            "custom_id": completion.custom_id,
            "response": {"status_code": 200, "request_id": f"req_{digest}", "body": body},
            "error": None,
        }
    )


def error_line(refused: RefusedLine, *, file: str, line: int) -> str:
    """A line of the error file, without its newline.

    ``error`` holds code, message, file and line; where there is a status, ``response`` holds it
    with the body that an API would have answered. Messages are cut at 1,000 characters. Of a file
    name that is not UTF-8 the odd bytes come out as ``\\xff``.

    Args:
      refused: what became of it.
      file: the input file.
      line: counted from 1.
    """
    file = file.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    # Not of the custom_id alone: a refused line may share it with an answered one.
    digest = _digest(json.dumps([refused.custom_id, file, line]))
    message = refused.message[:_MAX_MESSAGE_CHARACTERS]
    response = None
    if refused.status is not None:
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": refused.code}
        response = {
            "status_code": refused.status,
            "request_id": f"req_{digest}",
            "body": {"error": error},
        }
    return _json_line(
        {
            "id": f"batch_req_{digest}",
            "custom_id": refused.custom_id,
            "response": response,
            "error": {"code": refused.code, "message": message, "file": file, "line": line},
        }
    )


def _chat_logprobs(
    logprobs: tuple[TokenLogprob, ...], token_text: Callable[[int], str]
) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        # U+FFFD stands for bytes of a character that other tokens complete; they are not known.
        known = None if "\ufffd" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": max(_MIN_LOGPROB, logprob), "bytes": known}

    content = [
        entry(x.token_id, x.logprob) | {"top_logprobs": [entry(*pair) for pair in x.top]}
        for x in logprobs
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(
    logprobs: tuple[TokenLogprob, ...], token_text: Callable[[int], str]
) -> dict[str, Any]:
    texts = [token_text(x.token_id) for x in logprobs]
    offsets, end = [], 0
    for text in texts:
        offsets.append(end)
        end += len(text)
    tops = []
    for x in logprobs:
        top: dict[str, float] = {}
        # Of tokens with one text the likeliest counts, as they come likeliest first.
        for token_id, logprob in (*x.top, (x.token_id, x.logprob)):
            top.setdefault(token_text(token_id), max(_MIN_LOGPROB, logprob))
        tops.append(top)
    return {
        "tokens": texts,
        "token_logprobs": [max(_MIN_LOGPROB, x.logprob) for x in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _digest(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")))


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json_line(value: dict[str, Any]) -> str:
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", _ENCODER.encode(value))


# The line around the body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = _DECODER.decode(line.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not valid UTF-8"
        raise _Refused("invalid_json", message, None) from None
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg} at character {error.pos + 1}"
        raise _Refused("invalid_json", message, None) from None
    except ValueError as error:  # a constant, or an integer of thousands of digits
        message = f"not usable JSON: {str(error).partition(';')[0]}"
        raise _Refused("invalid_json", message, None) from None
    if type(value) is not dict:
        message = f"a line must be a JSON object, not {_shown(value)}"
        raise _Refused("invalid_json", message, None)
    return value


def _custom_id(fields: dict[str, Any]) -> str:
    value = fields.get("custom_id")
    if type(value) is not str or not value:
        message = f"custom_id must be a text that is not empty, not {_shown(value)}"
        if "custom_id" not in fields:
            message = "custom_id is missing"
        raise _Refused("missing_custom_id", message, None)
    try:
        value.encode()
    except UnicodeEncodeError:
        message = "custom_id holds a lone surrogate, which stands for no character"
        raise _Refused("invalid_custom_id", message, None) from None
    return value


def _check_characters(line: bytes, fields: dict[str, Any]) -> None:
    if _SURROGATE_ESCAPE.search(line):
        try:
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "a lone surrogate escape stands for no character"
            raise _Refused("invalid_json", message, None) from None


def _envelope(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The url and the body."""
    url, method, body = fields.get("url"), fields.get("method"), fields.get("body")
    if type(url) is not str or url not in (CHAT_URL, TEXT_URL):
        message = f"url must be {CHAT_URL} or {TEXT_URL}, not {_shown(url)}"
        raise _Refused("unknown_url", message, None)
    if method is not None and method != "POST":
        raise _Refused("invalid_method", f"method must be POST, not {_shown(method)}", None)
    if type(body) is not dict:
        raise _wrong("body", "an object", body)
    return url, body


# The body


def _model(body: dict[str, Any], models: ServedModels) -> str:
    model = body.get("model")
    if type(model) is not str:
        raise _wrong("model", "a text", model)
    if not models.accepts(model):
        message = f"model {_shown(model)} is not served here; {models.model} is"
        raise _Refused("model_not_found", message, 404)
    return model


def _check_unsupported(body: dict[str, Any], url: str) -> None:
    for name, harmless in _UNSUPPORTED[url].items():
        value = body.get(name)
        if value is not None and not any(_same(value, other) for other in harmless):
            advice = (
                f"leave it out or give {json.dumps(harmless[0])}" if harmless else "leave it out"
            )
            raise _invalid(f"{name} is not supported with {_shown(value)}; {advice}")


def _same(value: Any, other: Any) -> bool:
    """Equal, and of one type: in Python 1 equals True."""
    return type(value) is type(other) and bool(value == other)


def _sampling(body: dict[str, Any], url: str, defaults: SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {
        name: _number(body, name) for name in ("temperature", "top_p", "min_p")
    }
    given["repetition_penalty"] = _number(body, "repetition_penalty")
    given["seed"] = _integer(body, "seed", -_MAX_INT64 - 1, _MAX_INT64)
    given["max_tokens"] = _integer(body, "max_tokens", 1, _MAX_INT64)
    longest = _integer(body, "max_completion_tokens", 1, _MAX_INT64)
    if longest is not None:
        given["max_tokens"] = longest
    top_k = _integer(body, "top_k", -1, _MAX_INT64)
    given["top_k"] = None if top_k is None else max(0, top_k)
    given["ignore_eos"] = _boolean(body, "ignore_eos")
    given["stop"] = _stop(body)
    given["stop_token_ids"] = _token_ids(body, "stop_token_ids")
    given = {name: value for name, value in given.items() if value is not None}
    given |= _logprobs(body) if url == CHAT_URL else _count_of_logprobs(body, "logprobs")
    try:
        return dataclasses.replace(defaults, **given)
    except SurgeError as error:
        raise _invalid(str(error)) from None


def _logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """Of a chat: ``logprobs`` switches them on, ``top_logprobs`` says of how many tokens."""
    wanted = _boolean(body, "logprobs")
    count = _count_of_logprobs(body, "top_logprobs").get("logprobs", 0)
    if count and not wanted:
        raise _invalid("top_logprobs needs logprobs to be true")
    return {} if wanted is None else {"logprobs": count if wanted else None}


def _count_of_logprobs(body: dict[str, Any], name: str) -> dict[str, Any]:
    count = _integer(body, name, 0, _MAX_LOGPROBS)
    return {} if count is None else {"logprobs": count}


def _stop(body: dict[str, Any]) -> tuple[str, ...] | None:
    value = body.get("stop")
    if value is None:
        return None
    texts = [value] if type(value) is str else value
    if type(texts) is not list:
        raise _wrong("stop", "a text or a list of texts", value)
    for i, text in enumerate(texts):
        if type(text) is not str or not text:
            name = "stop" if texts is not value else f"stop[{i}]"
            raise _wrong(name, "a text that is not empty", text)
    return tuple(texts)


def _prompt(body: dict[str, Any]) -> str | tuple[int, ...]:
    value = body.get("prompt")
    if type(value) not in (str, list):
        raise _wrong("prompt", "a text or a list of token ids", value)
    if not value:
        raise _Refused("empty_prompt", "prompt must not be empty", 400)
    if type(value) is str:
        return value
    if type(value[0]) in (str, list):
        raise _invalid("prompt must be one prompt, not a list of prompts")
    ids = _token_ids(body, "prompt")
    assert ids is not None
    return ids


def _message(message: Any, where: str) -> dict[str, Any]:
    if type(message) is not dict:
        raise _wrong(where, "an object", message)
    role, content = message.get("role"), message.get("content")
    if type(role) is not str:
        raise _wrong(f"{where}.role", "a text", role)
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if content is None and calls:
        content = ""
    kept: dict[str, Any] = {"role": role, "content": _content(content, f"{where}.content")}
    if calls:
        kept["tool_calls"] = calls
    for name, value in message.items():
        if name in ("role", "content", "tool_calls") or value is None or value == []:
            continue
        if type(value) is not str:
            raise _wrong(f"{where}: field {_shown(name)}", "a text", value)
        kept[name] = value
    return kept


def _content(content: Any, where: str) -> str:
    if type(content) is str:
        return content
    if type(content) is not list:
        raise _wrong(where, "a text or a list of parts", content)
    texts = []
    for i, part in enumerate(content):
        if type(part) is not dict:
            raise _wrong(f"{where}[{i}]", "an object", part)
        if part.get("type") != "text":
            message = f"{where}[{i}].type must be text, not {_shown(part.get('type'))}"
            raise _invalid(message)
        if type(part.get("text")) is not str:
            raise _wrong(f"{where}[{i}].text", "a text", part.get("text"))
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if type(value) is not list:
        raise _wrong(where, "a list", value)
    calls = []
    for i, call in enumerate(value):
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict:
            raise _invalid(f"{where}[{i}] must be a call of a function")
        for name in ("name", "arguments"):
            if type(function.get(name)) is not str:
                raise _wrong(f"{where}[{i}].function.{name}", "a text", function.get(name))
        kept = {"name": function["name"], "arguments": function["arguments"]}
        if type(call.get("id")) not in (str, type(None)):
            raise _wrong(f"{where}[{i}].id", "a text", call["id"])
        calls.append({"id": call.get("id"), "type": "function", "function": kept})
    return calls


# Values


def _number(body: dict[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise _wrong(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, "a number of 64 bits", value) from None


def _integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, f"an integer from {low} to {high}", value)
    return value


def _boolean(body: dict[str, Any], name: str) -> bool | None:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise _wrong(name, "true or false", value)
    return value


def _token_ids(body: dict[str, Any], name: str) -> tuple[int, ...] | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not list:
        raise _wrong(name, "a list of token ids", value)
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID:
            raise _wrong(f"{name}[{i}]", "a token id", token)
    return tuple(value)


def _invalid(message: str) -> _Refused:
    return _Refused("invalid_request", message, 400)


def _wrong(name: str, wanted: str, value: Any) -> _Refused:
    return _invalid(f"{name} must be {wanted}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A JSON value in a message: short, whatever it is."""
    if type(value) in (list, dict):
        return "a list" if type(value) is list else "an object"
    if type(value) is str and len(value) > _SHOWN_CHARACTERS:
        value = value[:_SHOWN_CHARACTERS] + "..."
    text = json.dumps(value, ensure_ascii=False, default=str)
    # of an integer of many digits
    return text if type(value) is str or len(text) <= _SHOWN_CHARACTERS else text[:20] + "..."
