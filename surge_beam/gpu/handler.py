"""Any Beam ModelHandler as an encoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from surge_beam.records import SurgeError


@dataclasses.dataclass(frozen=True)
class TextTokens:
    """Texts as they are.

    Attributes:
      texts: the texts.
      lengths: characters / 4, at least 1, int32 [n].
    """

    texts: list[str]
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


class ModelHandlerEncoder:
    """Runs a Beam ``ModelHandler`` over micro-batches of texts.

    Results may be ``PredictionResult`` or vectors (list, numpy array, tensor), one a text.

    Args:
      handler: has ``load_model()`` and ``run_inference(batch, model, inference_args=None)``.
      dimension: size of a vector; None finds it with one probe text.
      inference_args: given to every ``run_inference``.

    Attributes:
      dimension: size of a vector.
      device: ``handler``; where it computes is the handler's business.
      dtype: ``float32``.
      identity: digest of the handler's class and ``dimension``; pass ``identity`` where the
        handler's model must be told apart from another one of the same class.
    """

    def __init__(
        self,
        handler: Any,
        dimension: int | None = None,
        *,
        inference_args: dict[str, Any] | None = None,
        identity: str | None = None,
    ) -> None:
        self.device, self.dtype = "handler", "float32"
        self._handler, self._arguments = handler, inference_args
        self._model = handler.load_model()
        self.dimension = dimension or len(self._vectors(["probe"])[0])
        kind = type(handler)
        name = f"handler:{kind.__module__}.{kind.__qualname__}:{self.dimension}"
        self.identity = identity or xxhash.xxh3_128_hexdigest(name.encode())

    def tokenize(self, texts: Sequence[str]) -> TextTokens:
        """Keeps the texts and guesses their lengths."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        return TextTokens(list(texts), np.maximum(sizes // 4, 1).astype(np.int32))

    def forward(self, tokens: TextTokens, rows: np.ndarray) -> np.ndarray:
        """One ``run_inference`` over rows: float32 [len(rows), dimension].

        Raises:
          SurgeError: if the handler returned too few or too many results, or a vector of another
            size.
        """
        vectors = self._vectors([tokens.texts[row] for row in rows])
        out = np.empty((len(rows), self.dimension), np.float32)
        for row, vector in enumerate(vectors):
            if vector.shape != (self.dimension,):
                raise SurgeError(
                    f"{type(self._handler).__name__} returned a vector of shape {vector.shape}, "
                    f"not ({self.dimension},)"
                )
            out[row] = vector
        return out

    def _vectors(self, batch: list[str]) -> list[np.ndarray]:
        if self._arguments is None:
            results = self._handler.run_inference(batch, self._model)
        else:
            results = self._handler.run_inference(
                batch, self._model, inference_args=self._arguments
            )
        found = _at_most(results, len(batch) + 1)
        if len(found) != len(batch):
            more = "or more " if len(found) > len(batch) else ""
            raise SurgeError(
                f"{type(self._handler).__name__} returned {len(found)} {more}results "
                f"for {len(batch)} texts"
            )
        return [_vector(result) for result in found]


def _at_most(results: Iterable[Any], count: int) -> list[Any]:
    found = []
    for result in results:
        found.append(result)
        if len(found) == count:
            break
    return found


def _vector(result: Any) -> np.ndarray:
    """A result's vector as float32 [d]; a 16-bit tensor on a device too."""
    value = getattr(result, "inference", result)
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value, dtype=np.float32)
