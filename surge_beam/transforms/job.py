"""A file job from its start to its report: who may write, what is refused, how it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from surge_beam.records import RefusedError, SurgeError
from surge_beam.transforms import manifest, stats_files
from surge_beam.transforms.files import (
    Store,
    digest,
    filesystem,
    glob_root,
    has_magic,
    is_local,
)
from surge_beam.transforms.journal import FOLDER as COMPLETIONS
from surge_beam.transforms.read import BLOCKS, STAGING
from surge_beam.transforms.write import PENDING, read_json

CONFIG = "_surge/config.json"
LOCK = "_surge/lock"
BATCH_FILES = ("output.jsonl", "errors.jsonl")
FORMAT_VERSION = 1


def run_name(store: Store, now: float) -> str:
    """A name for a run that sorts after every earlier one, even where the clock went back."""
    latest = [manifest.read_run(store).get("run", "")]
    latest += [name.split("-", 1)[0] for name in store.names(manifest.FOLDER)[-1:]]
    used = [int(name[:12], 16) for name in latest if re.fullmatch(r"[0-9a-f]{16}", name)]
    return f"{max([int(now * 1000), *[ms + 1 for ms in used]]):012x}{os.urandom(2).hex()}"


@contextlib.contextmanager
def exclusive(store: Store, settings: dict[str, Any], *, overwrite: bool) -> Iterator[str]:
    """Holds the output for one job, and gives the name of its run.

    The lock is gone with its process. Worker processes that outlive it cannot commit any more
    once a later run has begun.

    Args:
      settings: what an output must not mix: a later run with others is refused.
      overwrite: drop what an earlier configuration wrote, rather than refuse.

    Raises:
      RefusedError: another job holds the output, it was written under other settings, or it
        holds files that are not ours. Nothing is written then.
    """
    try:
        lock_file = _lock_file(store, settings, overwrite=overwrite)
    except OSError as error:
        raise RefusedError(f"cannot write to the output {store.url}: {error}") from error
    except RefusedError:
        raise
    except SurgeError as error:
        raise RefusedError(f"{error}; choose another output, or remove that file") from error
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"another job is writing to {store.url}") from None
        before = read_json(store, CONFIG)
        if not overwrite:
            _refuse_differences(store, before, settings)
        run = run_name(store, time.time())
        manifest.begin(store, run)
        content = {"format_version": FORMAT_VERSION, "settings": settings}
        if overwrite or (before or {}).get("clearing"):
            # marked, so that a run after a kill goes on clearing rather than trust what is left
            store.put(CONFIG, json.dumps({**content, "clearing": True}, indent=1).encode())
            clear(store)
            before = None
        if before != json.loads(json.dumps(content)):
            # of a run under other settings, which committed nothing
            store.remove_tree(COMPLETIONS)
            store.put(CONFIG, json.dumps(content, indent=1).encode())
        for folder in (Store.TEMPORARY, stats_files.FOLDER):
            store.remove_tree(folder)
        yield run


def _lock_file(store: Store, settings: dict[str, Any], *, overwrite: bool) -> IO[str]:
    """The open lock of an output that may be written."""
    if store.fs.isfile(store.root):
        raise RefusedError(f"the output {store.url} is a file, not a folder")
    if not overwrite:
        before = read_json(store, CONFIG)
        _refuse_differences(store, before, settings)
        if before is None and _holds_other_files(store):
            raise RefusedError(
                f"{store.url} is not empty and was not written by this program; choose another"
                " output, or --overwrite to write beside what is there"
            )
    if store.local:
        os.makedirs(store.path("_surge"), exist_ok=True)
        path = store.path(LOCK)
    else:
        path = os.path.join(tempfile.gettempdir(), f"surge_beam-{digest(store.url)}.lock")
    return open(path, "a+")


def _refuse_differences(
    store: Store, before: dict[str, Any] | None, settings: dict[str, Any]
) -> None:
    if before is None or not (before.get("clearing") or store.names(manifest.FOLDER)):
        # nothing is committed, so there is nothing to mix
        return
    old = {"format_version": before.get("format_version"), **before.get("settings", {})}
    new = {"format_version": FORMAT_VERSION, **json.loads(json.dumps(settings))}
    differences = [
        f"{name} was {_shown(old.get(name))}, now {_shown(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if _identity(old.get(name)) != _identity(new.get(name))
    ]
    if differences:
        raise RefusedError(
            f"{store.url} was written with another configuration: {'; '.join(differences)}."
            " Choose another output, or --overwrite to start anew"
        )


def named(name: str, identity: str) -> dict[str, str]:
    """A setting that is compared by its identity and shown by its name."""
    return {"name": name, "identity": identity}


def _identity(value: Any) -> Any:
    return value["identity"] if isinstance(value, dict) else value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['name']} ({value['identity'][:8]})"
    return json.dumps(value, ensure_ascii=False)


def _holds_other_files(store: Store) -> bool:
    try:
        names = [x["name"].rsplit("/", 1)[-1] for x in store.fs.ls(store.root, detail=True)]
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(name and name != "_surge" for name in names)


def clear(store: Store) -> None:
    """Removes every file that a manifest names, and all of ours but what holds the output."""
    of_lines = False
    for _, lines in manifest.entries(store):
        for line in lines:
            of_lines |= line["partition"].startswith(f"{BLOCKS}/")
            for file in line["files"]:
                store.remove(file["path"])
                store.remove_empty_folders(file["path"].rpartition("/")[0])
    for name in BATCH_FILES if of_lines else ():
        store.remove(name)
    for name in list(store.walk("_surge")):
        if name not in (LOCK, CONFIG, manifest.RUN):
            store.remove(name)


def finish(store: Store, run: str) -> None:
    """Removes what only a run under way needs, and notes that it ended well."""
    manifest.drop_parts(store, run)
    for name in (STAGING, PENDING, COMPLETIONS, Store.TEMPORARY):
        store.remove_tree(name)
    manifest.end(store, run)
    store.remove_tree(Store.TEMPORARY)


def check_paths(input_: str, output: str) -> None:
    """Raises RefusedError where the output would overwrite the input, or there is no input."""
    for option, value in (("--input", input_), ("--output", output)):
        if not value.strip():
            raise RefusedError(f"{option} is empty")
    try:
        source_fs, source = filesystem(input_)
        target_fs, target = filesystem(output)
    except SurgeError as error:
        raise RefusedError(str(error)) from error
    folder = glob_root(source) if has_magic(source) else source
    if is_local(source_fs) and is_local(target_fs):
        folder, target = os.path.realpath(folder), os.path.realpath(target)
    same = type(source_fs) is type(target_fs)
    if same and (folder + "/").startswith(target.rstrip("/") + "/"):
        raise RefusedError(f"the output {output} holds the input {input_}; choose another output")
    try:
        there = source_fs.exists(source) or (has_magic(source) and source_fs.glob(source))
    except OSError as error:
        raise RefusedError(f"cannot list the input {input_}: {error}") from error
    if not there:
        raise RefusedError(f"no such input: {input_}")
    if is_local(source_fs) and os.path.exists(source) and not _is_file_or_folder(source):
        raise RefusedError(f"the input {input_} is a pipe or a device; write it to a file first")


def _is_file_or_folder(path: str) -> bool:
    return os.path.isfile(path) or os.path.isdir(path)


EXPECTED = frozenset(
    ["SurgeError", "BadInputError", "RefusedError", "UnreadableFileError", "OSError", "WorkerLost"]
)
_RAISED = re.compile(r"surge_beam\.[\w.]+\.(\w+Error): (.*)")
_LOST = re.compile(r"SDK worker disconnected: worker\[.*\]")
_FULL = re.compile(rf".*\[Errno (?:{errno.ENOSPC}|{errno.EDQUOT})\].*")


def explain(error: BaseException, output: str = "") -> tuple[str, str]:
    """Kind and text of what ended a pipeline, found in the traceback a runner wraps it in.

    A kind that is not in ``EXPECTED`` is a defect, whose traceback a person should see.
    """
    text = str(error)
    raised = _RAISED.findall(text)
    if raised:
        kind, message = raised[-1]
    elif type(error).__module__.startswith("surge_beam"):
        kind, message = type(error).__name__, text
    else:
        lines = [x for x in text.splitlines() if x.strip()] or [type(error).__name__]
        kind, message = type(error).__name__, lines[-1]
    if not raised and (lost := _LOST.search(text)) is not None:
        kind, message = (
            "WorkerLost",
            (
                "a worker process ended in the middle of its work; killed, or out of memory?"
                f" Run again to go on ({lost.group()})"
            ),
        )
    if (full := _FULL.search(text)) is not None:
        detail = full.group()[full.group().index("[Errno") :]
        kind, message = "OSError", f"the disk of the output {output} is full: {detail}"
    return kind, re.sub(r"\s*\[while running .*?\]\s*$", "", message).strip()
