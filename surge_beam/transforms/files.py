"""Files on any fsspec file system: listing an input, and writing an output atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from surge_beam.records import SurgeError

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
COMPRESSIONS = {
    ".gz": "gzip",
    ".bz2": "bz2",
    ".xz": "xz",
    ".lzma": "lzma",
    ".zst": "zstd",
    ".lz4": "lz4",
    ".zip": "zip",
}


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a path or URL, and the path within it, without a trailing slash.

    A path without ``://`` is local as it stands, where fsspec would see a chain in ``a::b``.
    """
    if "://" not in url:
        path = LocalFileSystem._strip_protocol(url)
        return LocalFileSystem(use_listings_cache=False), path.rstrip("/") or path
    try:
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise SurgeError(f"cannot open {url}: {error}") from error
    except ValueError as error:
        raise SurgeError(f"cannot open {url}: {error}") from error
    return fs, path.rstrip("/") or path


def absolute(url: str) -> str:
    """A local path from the root, so that every process understands it; a URL as it is."""
    return url if "://" in url else os.path.abspath(filesystem(url)[1])


def absolute_model(name: str) -> str:
    """A model's folder here from the root; any other name as it is."""
    return absolute(name) if os.path.isdir(name) else name


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether renames and fsync are to be had."""
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def join(base: str, *names: str) -> str:
    return posixpath.join(base, *names)


def digest(*parts: object) -> str:
    """A 128-bit digest of the parts, 32 hex digits; parts cannot run into one another."""
    framed: list[bytes] = []
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        framed += (len(data).to_bytes(8, "little"), data)
    return str(xxhash.xxh3_128_hexdigest(b"".join(framed)))


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One input file as listed.

    Attributes:
      url: what opens it through fsspec.
      name: its path below the input's root; orders the input and names a file partition.
      size: bytes.
      version: etag, checksum or modification time, whichever the file system tells.
      format: ``parquet``, ``jsonl``, ``csv``, or ``""`` where the name does not say.
      compression: fsspec's name of the codec, or None.
    """

    url: str
    name: str
    size: int
    version: str
    format: str
    compression: str | None

    @property
    def key(self) -> str:
        """Digest of the name: what belongs to this file, in whatever version."""
        return digest(self.name)

    @property
    def fingerprint(self) -> str:
        """Digest of name, size and version: changes when the file does."""
        return digest(self.name, self.size, self.version)


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of an input in name order, and how many names were passed over."""

    root: str
    files: list[InputFile]
    passed_over: int


def _endings(name: str) -> tuple[str, str | None]:
    stem, extension = posixpath.splitext(name.lower())
    if extension in COMPRESSIONS:
        return posixpath.splitext(stem)[1], COMPRESSIONS[extension]
    return extension, None


def classify(name: str) -> tuple[str, str | None]:
    """Format and compression by a file's ending; an unknown format is ``""``."""
    extension, compression = _endings(name)
    return FORMATS.get(extension, "jsonl" if extension == ".json" else ""), compression


def list_input(pattern: str, *, exclude: str | None = None) -> Listing:
    """Lists a file, a folder or a glob.

    A folder means its files with a known ending, at any depth, whose path below it has no name
    that begins with ``_`` or ``.``; a glob means every file that it matches.

    Args:
      pattern: path or URL.
      exclude: a folder to leave out (the output, where it lies inside the input).

    Raises:
      SurgeError: nothing is there, or the file system cannot be reached.
    """
    fs, path = filesystem(pattern)
    try:
        if fs.isdir(path):
            root, found, folder = path, _find(fs, path), True
        elif fs.exists(path) or not has_magic(path):
            root, folder = posixpath.dirname(path), False
            found = {path: fs.info(path)}
        else:
            root, folder = glob_root(path), False
            found = {
                name: info
                for name, info in fs.glob(path, detail=True).items()
                if info.get("type") != "directory"
            }
    except FileNotFoundError:
        raise SurgeError(f"no such input: {pattern}") from None
    except OSError as error:
        raise SurgeError(f"cannot list the input {pattern}: {error}") from error
    skip = _within(fs, root, exclude) if exclude else None
    files, passed_over = [], 0
    for full, info in found.items():
        if skip and full.startswith(skip):
            continue
        name = full[len(root) :].lstrip("/") if root else full.lstrip("/")
        format_, compression = classify(name)
        hidden = any(part[:1] in ("_", ".") for part in name.split("/"))
        # a pipe or a socket, of which a reader would wait for ever
        special = info.get("type") == "other" and not info.get("islink")
        if special or (folder and (hidden or _endings(name)[0] not in FORMATS)):
            passed_over += 1
            continue
        files.append(
            InputFile(
                fs.unstrip_protocol(full) if not is_local(fs) else full,
                name,
                int(info.get("size") or 0),
                _version(full, info),
                format_,
                compression,
            )
        )
    if not files:
        raise SurgeError(f"no input files at {pattern} ({passed_over} passed over)")
    return Listing(root, sorted(files, key=lambda f: f.name), passed_over)


def _find(fs: fsspec.AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    """Every file below a folder. fsspec takes a local folder that may not be read for empty."""
    if not is_local(fs):
        return fs.find(root, detail=True)
    found, folders = {}, [root]
    while folders:
        folder = folders.pop()
        try:
            listing = fs.ls(folder, detail=True)
        except FileNotFoundError:
            if folder == root:
                raise
            continue
        for info in listing:
            if info["type"] == "directory":
                folders.append(info["name"])
            else:
                found[info["name"]] = info
    return found


def _within(fs: fsspec.AbstractFileSystem, root: str, exclude: str) -> str | None:
    """The folder to leave out as a listing of ``root`` names it, links resolved, or None."""
    folder = filesystem(exclude)[1]
    if not is_local(fs) or "://" in exclude:
        return folder + "/"
    real, base = os.path.realpath(folder), os.path.realpath(root).rstrip("/") + "/"
    return join(root, real[len(base) :]) + "/" if real.startswith(base) else None


def _version(full: str, info: dict[str, Any]) -> str:
    if info.get("islink"):
        # a link's own time says nothing of the file that it leads to
        with contextlib.suppress(OSError):
            return str(os.stat(full).st_mtime)
    for name in ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "updated"):
        if info.get(name) is not None:
            return str(info[name])
    return ""


def current_version(url: str) -> str:
    """Size and version of a file as they are now."""
    fs, path = filesystem(url)
    info = fs.info(path)
    return f"{info.get('size')}:{_version(path, info)}"


def has_magic(path: str) -> bool:
    return any(c in path for c in "*?[")


def glob_root(path: str) -> str:
    parts = path.split("/")
    first = next(i for i, part in enumerate(parts) if has_magic(part))
    return "/".join(parts[:first])


class Store:
    """An output folder: atomic puts, listings and removals below one root.

    On a local file system a file is written below ``_surge/tmp``, synced and renamed, so that a
    name either is absent or holds the whole content; elsewhere a put is atomic by itself.
    """

    TEMPORARY = "_surge/tmp"

    def __init__(self, url: str):
        self.url = url
        self.fs, self.root = filesystem(url)
        self.local = is_local(self.fs)
        self._made: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Store, (self.url,))

    def path(self, name: str) -> str:
        return join(self.root, name) if name else self.root

    def url_of(self, name: str) -> str:
        """What opens a file of the output through fsspec."""
        return self.path(name) if self.local else str(self.fs.unstrip_protocol(self.path(name)))

    def put(self, name: str, data: Any) -> None:
        """Writes bytes-like ``data`` under ``name`` whole or not at all, durably."""
        if not self.local:
            self.fs.pipe_file(self.path(name), bytes(data))
            return
        with self.writing(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A file of any size under ``name``, there whole once the block ends without an error."""
        if not self.local:
            with self.fs.transaction, self.fs.open(self.path(name), "wb") as file:
                yield file
            return
        temporary = self.temporary()
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.rename(temporary, name)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError):
                error.filename = error.filename or self.path(name)
            raise

    def temporary(self) -> str:
        """A fresh local path below the output for a file in the making."""
        folder = self.path(self.TEMPORARY)
        self._make(folder)
        return join(folder, f"{os.getpid():x}-{time.monotonic_ns():x}-{os.urandom(4).hex()}")

    def rename(self, source: str, name: str) -> None:
        """Moves a finished local file to its name, and makes its folder first where needed."""
        target = self.path(name)
        try:
            self._make(posixpath.dirname(target))
            try:
                os.replace(source, target)
            except FileNotFoundError:
                # a folder this process made may since have been removed by a prune
                self._made.discard(posixpath.dirname(target))
                self._make(posixpath.dirname(target))
                os.replace(source, target)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise SurgeError(
                f"{target} cannot be written, since a file and a folder would share a name; what"
                " is there may be the output of an input that is gone, which --prune removes"
            ) from error

    def move(self, source: str, name: str) -> None:
        """Moves one file of the output to another name of the output."""
        if self.local:
            self.rename(self.path(source), name)
        else:
            self.fs.copy(self.path(source), self.path(name))
            self.fs.rm_file(self.path(source))

    def _make(self, folder: str) -> None:
        if folder not in self._made:
            try:
                os.mkdir(folder)
            except (FileExistsError, FileNotFoundError):
                os.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def get(self, name: str) -> bytes:
        return bytes(self.fs.cat_file(self.path(name)))

    def get_many(self, names: list[str]) -> list[bytes]:
        """Contents of several files; from an object store they are fetched at the same time."""
        if self.local or has_magic(self.root):
            return [self.get(name) for name in names]
        found = self.fs.cat([self.path(name) for name in names])
        return [bytes(found[self.path(name)]) for name in names]

    def get_or_none(self, name: str) -> bytes | None:
        try:
            return self.get(name)
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(self.path(name)))

    def names(self, folder: str) -> list[str]:
        """Names of the files directly in ``folder``, sorted; empty where there is none."""
        if self.local:
            try:
                with os.scandir(self.path(folder)) as found:
                    return sorted(x.name for x in found if x.is_file())
            except FileNotFoundError:
                return []
        try:
            listing = self.fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(x["name"]) for x in listing if x["type"] == "file")

    def walk(self, folder: str) -> Iterator[str]:
        """Every file below ``folder``, as names relative to the root."""
        try:
            found = self.fs.find(self.path(folder))
        except FileNotFoundError:
            return
        for full in found:
            yield full[len(self.root) :].lstrip("/")

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def remove_tree(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)
        self._made = {m for m in self._made if not m.startswith(self.path(name))}

    def remove_empty_folders(self, name: str) -> None:
        """Removes ``name`` and its parents below the root while they are empty (local only)."""
        if not self.local:
            return
        while name:
            try:
                os.rmdir(self.path(name))
            except OSError:
                return
            self._made.discard(self.path(name))
            name = posixpath.dirname(name)
