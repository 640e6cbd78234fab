"""A deterministic stand-in for an embedding model: no torch, no weights, costs on demand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from surge_beam.records import EncoderConfig, EngineConfig, SurgeError

_CHUNK_NUMBERS = 1 << 16


def is_dummy(model: str) -> bool:
    """True if a model name asks for the stand-in."""
    return model == "dummy" or model.startswith("dummy:")


def refuse_cuda(config: EncoderConfig | EngineConfig) -> None:
    """Raises SurgeError if a stand-in is asked to run on CUDA."""
    if config.device == "cuda" or config.require_accelerator:
        raise SurgeError(f"{config.model} has no CUDA device, and this step asks for one")


@dataclasses.dataclass(frozen=True)
class DummyTokens:
    """Attributes:
    seeds: a 64-bit digest of every text, uint64 [n].
    lengths: a guess of the tokens, int32 [n].
    poisoned: texts that make a forward pass fail, bool [n], or None.
    """

    seeds: np.ndarray
    lengths: np.ndarray
    poisoned: np.ndarray | None

    def __len__(self) -> int:
        return len(self.seeds)


class DummyEncoder:
    """Vectors of unit length from a digest of the text.

    The name is ``dummy:D`` and then, in any order, ``:tau=S`` seconds slept for every call of
    ``EncodeWorker.encode``, ``:c=S`` seconds slept for every text of it that the model sees,
    ``:poison=TEXT`` a text that makes its forward pass raise ValueError, ``:oom=N`` rows above
    which a forward pass raises MemoryError, ``:nan=TEXT`` a text whose vector is not a number.

    Raises:
      SurgeError: if the name is malformed, or CUDA was asked for.
    """

    def __init__(self, config: EncoderConfig) -> None:
        from surge_beam.gpu.encoder import model_identity

        refuse_cuda(config)
        head, *options = config.model.split(":")[1:] or [""]
        known = {"tau": 0.0, "c": 0.0, "oom": 0.0}
        self._texts: dict[str, str] = {"poison": "", "nan": ""}
        try:
            width = int(head)
            for option in options:
                key, _, value = option.partition("=")
                if key in self._texts:
                    self._texts[key] = value
                else:
                    known[key] += float(value)
        except (KeyError, ValueError):
            raise SurgeError(f"{config.model!r} is not of the form dummy:D[:name=value]") from None
        if width < 1:
            raise SurgeError(f"{config.model!r}: a vector needs at least one dimension")
        self.tau, self.seconds_per_text = known["tau"], known["c"]
        self._most_rows = int(known["oom"])
        self._prompt = config.prompt or ""
        self.dimension = width if config.truncate_dim is None else min(width, config.truncate_dim)
        self.device, self.dtype = "cpu", "float32"
        self.identity = model_identity(config)
        rng = np.random.default_rng(width)
        self._multipliers = rng.integers(0, 1 << 31, width, dtype=np.uint32) * np.uint32(2) + 1
        self._multipliers = self._multipliers[: self.dimension].astype(np.uint32)

    def tokenize(self, texts: Sequence[str]) -> DummyTokens:
        """Digests of texts; a token is four characters."""
        digest, prompt = xxhash.xxh3_64_intdigest, self._prompt
        seeds = np.fromiter((digest((prompt + t).encode()) for t in texts), np.uint64, len(texts))
        lengths = np.fromiter(map(len, texts), np.int32, len(texts)) // 4 + 2
        poisoned = None
        if poison := self._texts["poison"]:
            poisoned = np.fromiter((poison in t for t in texts), bool, len(texts))
        if nan := self._texts["nan"]:
            seeds[np.fromiter((nan in t for t in texts), bool, len(texts))] = 0
        return DummyTokens(seeds, lengths, poisoned)

    def forward(self, tokens: DummyTokens, rows: np.ndarray) -> np.ndarray:
        """Vectors of rows, float32 [len(rows), dimension].

        Raises:
          ValueError: if a poisoned text is among the rows.
          MemoryError: if there are more rows than the name allows.
        """
        if self._most_rows and len(rows) > self._most_rows:
            raise MemoryError(f"{len(rows)} rows are more than {self._most_rows}")
        if tokens.poisoned is not None and tokens.poisoned[rows].any():
            raise ValueError(f"poisoned text with {self._texts['poison']!r}")
        seeds = tokens.seeds[rows]
        out = np.empty((len(rows), self.dimension), np.float32)
        low = seeds.astype(np.uint32) | np.uint32(1)
        high = (seeds >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        half = (self.dimension + 1) // 2
        step = max(1, _CHUNK_NUMBERS // self.dimension)
        mixed = np.empty((min(step, len(rows)), self.dimension), np.uint32)
        for start in range(0, len(rows), step):
            stop = min(start + step, len(rows))
            part, bits = out[start:stop], mixed[: stop - start]
            np.multiply(low[start:stop, None], self._multipliers[:half], out=bits[:, :half])
            np.multiply(high[start:stop, None], self._multipliers[half:], out=bits[:, half:])
            part[...] = bits.view(np.int32)
            norms = np.sqrt(np.einsum("nd,nd->n", part, part))
            part *= (1 / norms)[:, None]
        if self._texts["nan"]:
            out[seeds == 0] = np.nan
        return out

    def simulate_call(self, texts: int) -> None:
        """Sleeps as long as the name says one call over that many texts takes."""
        seconds = self.tau + self.seconds_per_text * texts
        if seconds > 0:
            time.sleep(seconds)
