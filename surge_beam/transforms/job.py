"""A file job from its start to its report: who may write, what is refused, how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from surge_beam.records import RefusedError
from surge_beam.transforms import manifest
from surge_beam.transforms.files import Store, digest, filesystem
from surge_beam.transforms.read import SCANS, STAGING
from surge_beam.transforms.write import PENDING, read_json

CONFIG = "_surge/config.json"
LOCK = "_surge/lock"
FORMAT_VERSION = 1


def run_name(now: float) -> str:
    """A run's name: later runs sort later."""
    return f"{int(now * 1000):012x}{os.urandom(2).hex()}"


@contextlib.contextmanager
def exclusive(store: Store, settings: dict[str, Any], *, overwrite: bool) -> Iterator[None]:
    """Holds the output for one job; what guards it is gone with the process.

    Args:
      settings: what an output must not mix: a later run with others is refused.
      overwrite: drop what an earlier configuration wrote, rather than refuse.

    Raises:
      RefusedError: another job holds the output, it was written under other settings, or it
        holds files that are not ours. Nothing is written then.
    """
    before = read_json(store, CONFIG)
    if not overwrite:
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
    with open(path, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"another job is writing to {store.url}") from None
        if overwrite and before is not None:
            clear(store)
        else:
            _refuse_differences(store, read_json(store, CONFIG), settings)
        if read_json(store, CONFIG) is None:
            content = {"format_version": FORMAT_VERSION, "settings": settings}
            store.put(CONFIG, json.dumps(content, indent=1).encode())
        store.remove_tree(Store.TEMPORARY)
        yield


def _refuse_differences(
    store: Store, before: dict[str, Any] | None, settings: dict[str, Any]
) -> None:
    if before is None:
        return
    old = {"format_version": before.get("format_version"), **before.get("settings", {})}
    new = {"format_version": FORMAT_VERSION, **json.loads(json.dumps(settings))}
    differences = [
        f"{name} was {json.dumps(old.get(name))}, now {json.dumps(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if differences:
        raise RefusedError(
            f"{store.url} was written with another configuration: {'; '.join(differences)}."
            " Choose another output, or --overwrite to start anew"
        )


def _holds_other_files(store: Store) -> bool:
    try:
        names = [x["name"].rsplit("/", 1)[-1] for x in store.fs.ls(store.root, detail=True)]
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(name and name != "_surge" for name in names)


def clear(store: Store) -> None:
    """Removes every file that a manifest names, and all of ours but the lock."""
    for _, lines in manifest.entries(store):
        for line in lines:
            for file in line["files"]:
                store.remove(file["path"])
                store.remove_empty_folders(file["path"].rpartition("/")[0])
    for name in list(store.walk("_surge")):
        if name != LOCK:
            store.remove(name)


def finish(store: Store) -> None:
    """Removes what only a run under way needs."""
    for name in (STAGING, PENDING, Store.TEMPORARY):
        store.remove_tree(name)


def scans_folder() -> str:
    return SCANS


def check_paths(input_: str, output: str) -> None:
    """Raises RefusedError where the output would overwrite the input."""
    source_fs, source = filesystem(input_)
    target_fs, target = filesystem(output)
    same = type(source_fs) is type(target_fs) and (source + "/").startswith(target + "/")
    if same:
        raise RefusedError(f"the output {output} holds the input {input_}; choose another output")


_RAISED = re.compile(r"surge_beam\.records\.(\w+Error): (.*)")


def explain(error: BaseException) -> tuple[str, str]:
    """Kind and text of what ended a pipeline, found in the traceback a runner wraps it in."""
    text = str(error)
    found = None
    for found in _RAISED.finditer(text):
        pass
    if found is not None:
        kind, message = found.group(1), found.group(2)
    elif type(error).__module__.startswith("surge_beam"):
        kind, message = type(error).__name__, text
    else:
        lines = [x for x in text.splitlines() if x.strip()] or [type(error).__name__]
        kind, message = type(error).__name__, lines[-1]
    return kind, re.sub(r"\s*\[while running .*?\]\s*$", "", message).strip()


def as_settings(value: Any) -> Any:
    """A frozen configuration as plain JSON values."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
