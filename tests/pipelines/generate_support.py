"""Runs ``generate_corpus``, and says what its answers must be by decoding them one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surge_beam.gpu.engine import Engine
from surge_beam.records import Completion, EngineConfig, Request, SamplingParams
from tests.pipelines.harness import _ELSEWHERE, _FORKS, ROOT, Job, _child

SCRIPT = ROOT / "pipelines" / "generate_corpus.py"
ADDED = ["completion", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 12


def arguments(*args: object, **options: object) -> list[str]:
    """``options`` become ``--name value``, True a bare flag, a list one option a value."""
    line = [*map(str, args)]
    defaults = {"model": "dummy", "device": "cpu", "max_tokens": MAX_TOKENS}
    for name, value in (defaults | options).items():
        if value is True:
            line.append(f"--{name}")
        elif value is not None and value is not False:
            for one in value if isinstance(value, list) else [value]:
                line += [f"--{name}", str(one)]
    return line


def generate(
    *args: object, check: bool = True, **options: object
) -> subprocess.CompletedProcess[str]:
    """Runs a job in this process, without pictures; with ``check`` it must end well."""
    from pipelines import generate_corpus
    from surge_beam.gpu import decode_worker
    from surge_beam.transforms import launch

    line = arguments(*args, **options)
    # a process of its own would start with an empty KV pool too
    decode_worker._shared.cache_clear()
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        unittest.mock.patch.object(launch, "try_write_html"),
    ):
        status = generate_corpus.main(line)
    done = subprocess.CompletedProcess(line, status, out.getvalue(), err.getvalue())
    if check:
        assert status == 0, f"{status}\n{done.stdout}\n{done.stderr}"
    return done


class GenerateJob(Job):
    """A job in a process of its own, that can be killed; ``setup`` is called in it first."""

    def __init__(self, args: list[str], setup: Callable[[], None] | None = None):
        self.args = args
        self._files = tempfile.TemporaryDirectory()
        names = [os.path.join(self._files.name, n) for n in ("stdout", "stderr")]
        self._process = _FORKS.Process(target=_run, args=(args, names, setup))
        self._process.start()
        self.pid = self._process.pid


def _run(args: list[str], files: list[str], setup: Callable[[], None] | None) -> None:
    from pipelines import embed_corpus, generate_corpus
    from surge_beam.transforms import launch

    # the harness starts what it finds there
    embed_corpus.main = generate_corpus.main
    launch.try_write_html = lambda store, report: None
    _child(args, {}, files, setup)


@dataclasses.dataclass
class Dying:
    """Kills the process at the n-th call of a function of ``owner``, after it or in its place."""

    owner: Any
    name: str
    call: int = 1
    after: bool = True

    def __call__(self) -> None:
        owner = importlib.import_module(self.owner) if isinstance(self.owner, str) else self.owner
        real = getattr(owner, self.name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            self.call -= 1
            if not self.call and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if not self.call:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, self.name, replacement)


def start_generate(
    *args: object, setup: Callable[[], None] | None = None, **options: object
) -> GenerateJob:
    return GenerateJob(arguments(*args, **options), setup)


def run_script(
    *args: object,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: str | Path = _ELSEWHERE,
    **options: object,
) -> subprocess.CompletedProcess[str]:
    """Runs the script itself."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments(*args, **options)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if check:
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


# What the answers must be


def as_bytes(text: str) -> tuple[int, ...]:
    """Token ids of a prompt of the stand-in model."""
    return tuple(text.encode())


def as_chat(messages: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Token ids of a conversation with the stand-in model."""
    said = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    return as_bytes(said + "assistant: ")


def one_by_one(
    requests: Iterable[tuple[str, Sequence[int], SamplingParams]], *, seed: int = 0
) -> list[Completion]:
    """Completions of (custom_id, token ids, sampling), each decoded alone, nothing shared."""
    config = EngineConfig(
        model="dummy", device="cpu", seed=seed, max_sequences=1, share_prefixes=False
    )
    with Engine(config) as engine:
        return [
            completion
            for name, ids, sampling in requests
            for completion in engine.generate(
                [Request(custom_id=name, prompt_ids=tuple(ids), sampling=sampling)]
            )
        ]


def answer(completion: Completion) -> tuple[str, str, int, int]:
    """What must not depend on how a row was decoded."""
    return (
        completion.text,
        completion.finish_reason,
        completion.prompt_tokens,
        completion.completion_tokens,
    )


def answers(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, int, int]]:
    """The same of rows of an output."""
    names = [n for n in ADDED if n != "cached_tokens"]
    return [tuple(row[n] for n in names) for row in rows]  # type: ignore[misc]


def tree_saves(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens that one prefix tree over all prompts would save, a token a node."""
    ordered = sorted(map(tuple, prompts))
    saved = 0
    for one, other in itertools.pairwise(ordered):
        saved += next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
    return saved


# Batch lines


def text_line(custom_id: Any, prompt: Any, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": TEXT,
        "body": {"model": "dummy", "prompt": prompt, **body},
    }


def chat_line(custom_id: Any, messages: Any, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "dummy", "messages": messages, **body},
    }


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Values as JSON, bytes as they are, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"".join(line + b"\n" for line in data))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of an output file; each must end with a newline and be JSON."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def outputs(output: Path) -> list[dict[str, Any]]:
    return read_lines(output / "output.jsonl")


def errors(output: Path) -> list[dict[str, Any]]:
    return read_lines(output / "errors.jsonl")


def said(line: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """``answer`` of a line of the output file."""
    body = line["response"]["body"]
    (choice,) = body["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return text, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]


def without_time(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the output file without what differs between two runs of one input."""
    found = []
    for line in lines:
        body = dict(line["response"]["body"])
        usage = dict(body["usage"])
        assert body.pop("created") > 1_700_000_000
        usage.pop("prompt_tokens_details")
        found.append({**line, "response": {**line["response"], "body": {**body, "usage": usage}}})
    return found


def without_cached(tables: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows by partition without the one column that depends on who was decoded with whom."""
    return {
        name: table.drop_columns(["cached_tokens"]).to_pylist() for name, table in tables.items()
    }


def settled(output: Path) -> dict[str, Any]:
    """The report; asserts that its counts agree and that nothing of a running job is left."""
    found: dict[str, Any] = json.loads((output / "_surge" / "report.json").read_text())
    assert found["rows_in"] == found["rows_out"] + found["dead_letters"]
    for name in ("tmp", "staging", "pending", "completions"):
        assert not (output / "_surge" / name).exists(), name
    return found


GREEDY = SamplingParams(max_tokens=MAX_TOKENS)


def sampled(**fields: Any) -> SamplingParams:
    return dataclasses.replace(GREEDY, **fields)
