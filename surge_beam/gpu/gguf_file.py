"""A GGUF file (llama.cpp's format, versions 2 and 3), read without torch."""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from surge_beam.gpu.refusals import unsupported_error
from surge_beam.records import SurgeError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_CONFIG = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_NOTHING = (0, "none")
_GROUP = 1 << 18


class GgufFile:
    """A GGUF file: its header, read at once, and its tensors, read when asked for.

    gguf's own reader makes several arrays of every string, 5 seconds for a vocabulary of 49,152.

    Attributes:
      path: of the file.
      architecture: ``general.architecture``.
      metadata: keys and values; an array of numbers is a numpy array, of an array of strings it
        has the number of them.
      tensors: shape (rows first), ggml type and byte range of every tensor, by name.

    Raises:
      SurgeError: if it is no GGUF file, or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (OSError, ValueError, TypeError, ArithmeticError, struct.error) as error:
            raise self.broken(str(error)) from error
        self.architecture = str(self.metadata.get("general.architecture"))

    def broken(self, why: str) -> SurgeError:
        """An error about this file."""
        return SurgeError(f"the GGUF file {self.path} cannot be read: {why}")

    @property
    def adds_bos(self) -> bool:
        """Whether a prompt begins with the begin token; llama.cpp's default where unsaid."""
        spelled = self.metadata.get("tokenizer.ggml.model") == "llama"
        return bool(self.metadata.get("tokenizer.ggml.add_bos_token", spelled))

    def settings(self) -> dict[str, Any]:
        """What the metadata say of the model, under the names of a ``config.json``.

        Raises:
          SurgeError: if the family, a key or a tensor is one that is not computed here.
        """
        if self.architecture not in ARCHITECTURES:
            why = f"of GGUF files the families are {', '.join(ARCHITECTURES)}"
            raise self._unsupported(why)
        head = f"{self.architecture}."
        said = {k[len(head) :]: v for k, v in self.metadata.items() if k.startswith(head)}
        fields = {name: said.pop(key) for key, name in _CONFIG.items() if key in said}
        sizes = [said.pop(key) for key in _HEAD_SIZES if key in said]
        if not all(isinstance(size, int) for size in sizes):
            raise self.broken("the size of its heads is no number")
        head_sizes = set(sizes)
        unknown = [key for key, v in said.items() if isinstance(v, np.ndarray) or v not in _NOTHING]
        if unknown:
            raise self._unsupported(f"it sets {unknown[0]}")
        if "rope_freqs.weight" in self.tensors:
            raise self._unsupported("a tensor scales its rotary positions")
        if len(head_sizes) > 1:
            raise self._unsupported("parts of its heads differ in size")
        if head_sizes:
            fields["head_dim"] = head_sizes.pop()
        fields.setdefault("vocab_size", self.metadata.get("tokenizer.ggml.tokens"))
        for name in ("bos", "eos"):
            fields[f"{name}_token_id"] = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        fields["tie_word_embeddings"] = "output.weight" not in self.tensors
        return fields

    def config(self) -> Any:
        """The transformers config that ``settings`` make.

        Raises:
          SurgeError: as ``settings``, or if they make none.
        """
        from transformers import AutoConfig

        settings = self.settings()
        try:
            return AutoConfig.for_model(self.architecture, **settings)
        except Exception as error:
            raise self.broken(f"its settings make no model: {error}") from error

    def read(self, name: str) -> np.ndarray | None:
        """A tensor dequantized to float32, or None if there is none of that name."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        if name not in self.tensors:
            return None
        shape, kind, start, elements = self.tensors[name]
        try:
            quantization = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[quantization]
            if shape[-1] % block:
                raise ValueError(f"{name} has rows of {shape[-1]}, no multiple of {block}")
            raw = np.frombuffer(self._data, np.uint8, elements // block * size, start)
            out = np.empty(elements, np.float32)
            step = _GROUP // block
            for at in range(0, elements // block, step):
                # one row: gguf dequantizes 16 rows at a time, and these rows are short
                part = raw[at * size : (at + step) * size]
                out[at * block : (at + step) * block] = dequantize(part, quantization)
        except (ValueError, LookupError, ArithmeticError, NotImplementedError) as error:
            raise self.broken(f"{name}: {error}") from error
        return out.reshape(shape)

    def _unsupported(self, why: str) -> SurgeError:
        return unsupported_error(str(self.path), self.architecture, why)

    def _read_header(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin as GGUF files do")
        at = 4
        (version,), at = self._unpack("I", at)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}")
        (tensors, pairs), at = self._unpack("QQ", at)
        for _ in range(pairs):
            key, at = self._string(at)
            (kind,), at = self._unpack("I", at)
            self.metadata[key], at = self._value(kind, at)
        found = []
        for _ in range(tensors):
            name, at = self._string(at)
            (axes,), at = self._unpack("I", at)
            if not 1 <= axes <= 4:
                raise ValueError(f"{name} has {axes} axes")
            sizes, at = self._unpack(f"{axes}Q", at)
            (ggml_type, offset), at = self._unpack("IQ", at)
            found.append((name, tuple(reversed(sizes)), ggml_type, offset))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int):
            raise ValueError("its alignment is no number")
        start = -(-at // alignment) * alignment
        for name, shape, ggml_type, offset in found:
            self.tensors[name] = (shape, ggml_type, start + offset, math.prod(shape))

    def _unpack(self, form: str, at: int) -> tuple[tuple[Any, ...], int]:
        values = struct.unpack_from(f"<{form}", self._data, at)
        return values, at + struct.calcsize(f"<{form}")

    def _string(self, at: int) -> tuple[str, int]:
        end = self._skip(at)
        return str(self._data[at + 8 : end], "utf-8"), end

    def _skip(self, at: int) -> int:
        """Where the string at ``at`` ends."""
        (size,), at = self._unpack("Q", at)
        if size > len(self._data) - at:
            raise ValueError("it is cut off")
        return int(at + size)

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(at)
        if kind in _SCALARS:
            (value,), at = self._unpack(_SCALARS[kind], at)
            return value, at
        if kind != _ARRAY:
            raise ValueError(f"a value is of type {kind}")
        (item, count), at = self._unpack("IQ", at)
        if item not in (*_SCALARS, _STRING):
            raise ValueError(f"values of a list are of type {item}")
        if item == _STRING:
            for _ in range(count):
                at = self._skip(at)
            return count, at
        size = struct.calcsize(f"<{_SCALARS[item]}")
        values = np.frombuffer(self._data, f"<{_SCALARS[item]}", count, at) if count else None
        return values, at + count * size
