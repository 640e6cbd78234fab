"""From a row to its prompt: a column, a Jinja template, messages, or an OpenAI batch line."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from surge_beam.records import SamplingParams, Segment, SurgeError
from surge_beam.transforms.batch_lines import (
    BatchRequest,
    RefusedLine,
    ServedModels,
    parse_line,
    parse_messages,
)
from surge_beam.transforms.partitions import key_values
from surge_beam.transforms.read import rows_of
from surge_beam.transforms.textfiles import LINE_COLUMN, MAX_LINE_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Where prompts come from. Without column, template and messages, rows are batch lines.

    Attributes:
      column: holds raw prompts.
      template: text of a Jinja template over a row's columns and key values; gives a raw prompt.
      messages: column of conversations, lists of ``role`` and ``content`` or their JSON text.
      id_column: names a row; without it file and row do.
      sampling: of rows that do not say otherwise.
      models: names under which batch lines may ask for the model; ``*`` takes all.
    """

    column: str | None = None
    template: str | None = None
    messages: str | None = None
    id_column: str | None = None
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    models: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        given = [x for x in (self.column, self.template, self.messages) if x is not None]
        if len(given) > 1:
            raise SurgeError("give one of a prompt column, a template and a messages column")
        if not given and self.id_column is not None:
            raise SurgeError("batch lines carry their own custom_id; leave id_column out")
        if self.template is not None:
            _variables(self.template)

    @property
    def lines(self) -> bool:
        """Whether the input is OpenAI batch lines."""
        return self.column is None and self.template is None and self.messages is None

    @property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that every file must have."""
        names = (self.column, self.messages, self.id_column)
        return (
            (LINE_COLUMN,)
            if self.lines
            else tuple(dict.fromkeys(n for n in names if n is not None))
        )

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns to read where a file has them."""
        return () if self.template is None else _variables(self.template)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Attributes:
    custom_id: names the row.
    text, token_ids, messages: the prompt, one of them.
    sampling: how to decode it.
    """

    custom_id: str
    sampling: SamplingParams
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a row has no prompt: kind and message of its dead letter."""

    error: str
    message: str


def render(
    config: PromptConfig, table: pa.Table, segment: Segment, ids: list[str]
) -> Iterator[Prompt | Refusal]:
    """The prompt of every row, or why there is none.

    Args:
      table: the rows; columns of ``required_columns`` are there.
      segment: their partition, whose key values a template may use.
      ids: the rows' names by file and row, for rows without an id of their own.
    """
    if config.lines:
        models = ServedModels(config.models[0], config.models[1:])
        for line in table.column(LINE_COLUMN).to_pylist():
            if len(line) > MAX_LINE_BYTES:
                yield Refusal("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
                continue
            found = parse_line(line, models=models, defaults=config.sampling)
            if isinstance(found, RefusedLine):
                yield Refusal(found.code, found.message)
            else:
                yield _of_line(found)
        return
    columns = (*config.required_columns, *config.optional_columns)
    columns = tuple(name for name in dict.fromkeys(columns) if name in table.column_names)
    keys = key_values(segment)
    for row, name in zip(rows_of(table, columns), ids, strict=True):
        yield prompt_of(config, {**keys, **row}, name)


def _of_line(found: BatchRequest) -> Prompt:
    text = found.prompt if isinstance(found.prompt, str) else None
    token_ids = found.prompt if isinstance(found.prompt, tuple) else None
    return Prompt(found.custom_id, found.sampling, text, token_ids, found.messages)


def prompt_of(config: PromptConfig, row: dict[str, Any], name: str) -> Prompt | Refusal:
    """The prompt of a row, or why there is none.

    Args:
      config: of a column, a template or messages.
      name: of the row, if it has no id column.
    """
    if config.id_column is not None:
        value = row.get(config.id_column)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "backslashreplace")
        name = "" if value is None else str(value)
        if not name or not _is_unicode(name):
            fault = "is no valid Unicode" if name else "is empty"
            return Refusal("EmptyId", f"the id in column {config.id_column!r} {fault}")
    if config.template is not None:
        try:
            text = compiled_template(config.template).render(row)
        except Exception as error:
            return Refusal("TemplateError", f"the template fails: {type(error).__name__}: {error}")
        return _of_text(config, name, text, "what the template gives")
    column = config.column or config.messages
    assert column is not None
    value = row.get(column)
    if value is None:
        if column in row:
            return Refusal("NullPrompt", f"column {column!r} is null")
        return Refusal("MissingPrompt", f"the row has no column {column!r}")
    if config.messages is None:
        return _of_text(config, name, value, f"column {column!r}")
    messages = conversation(value)
    if isinstance(messages, Refusal):
        return messages
    if not _is_unicode(json.dumps(messages, ensure_ascii=False, default=str)):
        return Refusal("NotText", f"column {column!r} holds no valid Unicode")
    return Prompt(name, config.sampling, messages=messages)


def _of_text(config: PromptConfig, name: str, text: Any, where: str) -> Prompt | Refusal:
    if not isinstance(text, str):
        return Refusal("NotText", f"{where} is a {type(text).__name__}, not text")
    if not text:
        return Refusal("EmptyPrompt", "the prompt is empty")
    if not _is_unicode(text):
        return Refusal("NotText", f"{where} is no valid Unicode")
    return Prompt(name, config.sampling, text=text)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.lru_cache(maxsize=8)
def compiled_template(template: str) -> Any:
    """A Jinja template. Raises SurgeError if it cannot be parsed, or there is no Jinja."""
    try:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise SurgeError("a template takes: pip install jinja2") from error
    # values are data: nothing in them is escaped, and nothing is rendered twice
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise SurgeError(f"the template cannot be parsed: {error}") from error


@functools.lru_cache(maxsize=8)
def _variables(template: str) -> tuple[str, ...]:
    """Names that a template takes from outside, sorted."""
    parsed = compiled_template(template)
    from jinja2 import meta

    return tuple(sorted(meta.find_undeclared_variables(parsed.environment.parse(template))))


def conversation(value: Any) -> tuple[dict[str, Any], ...] | Refusal:
    """Messages of a column's value: a list of objects, or such a list as JSON text."""

    try:
        if isinstance(value, str):
            value = json.loads(value)
        if isinstance(value, list):
            value = [_message(message) for message in value]
        return parse_messages(value)
    except (TypeError, ValueError, RecursionError) as error:
        return Refusal("InvalidMessages", f"the messages are no JSON: {error}")
    except SurgeError as error:
        return Refusal("InvalidMessages", str(error))


def _message(message: Any) -> Any:
    """A message as JSON has it: a list of mixed values may hold each as JSON text, and a struct
    column has every field in every row.
    """
    if isinstance(message, str):
        message = json.loads(message)
    if isinstance(message, dict):
        return {name: value for name, value in message.items() if value is not None}
    return message
