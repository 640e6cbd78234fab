"""Models outside our families, through sentence-transformers' own forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from surge_beam.gpu.device import Device
from surge_beam.gpu.folder import ModelFolder
from surge_beam.records import SurgeError


@dataclasses.dataclass(frozen=True)
class TextTokens:
    """Attributes:
    texts: the texts; the model tokenizes a micro-batch itself.
    lengths: tokens of every text, a guess where the tokenizer is not the usual one, int32 [n].
    """

    texts: list[str]
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


class SentenceTransformerEncoder:
    """Runs ``SentenceTransformer.encode`` on one micro-batch after another.

    Attributes: see ``surge_beam.gpu.encoder.Encoder``.
    """

    def __init__(
        self, model: Any, *, device: Device, prompt: str, truncate_dim: int | None, identity: str
    ) -> None:
        self.device, self.dtype, self.identity = device.name, device.dtype_name, identity
        self._model, self._prompt, self._truncate_dim = model, prompt, truncate_dim
        self._normalizes = any(type(module).__name__ == "Normalize" for module in model)
        self._tokenizer = getattr(model, "tokenizer", None)
        self.dimension = int(self.forward(TextTokens(["probe"], np.ones(1)), np.zeros(1)).shape[1])

    def tokenize(self, texts: Sequence[str]) -> TextTokens:
        """Keeps the texts and guesses their tokens from their characters."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts)) // 4 + 2
        limit = getattr(self._model, "max_seq_length", None)
        if limit:
            sizes = np.minimum(sizes, limit)
        return TextTokens(list(texts), sizes.astype(np.int32))

    def forward(self, tokens: TextTokens, rows: np.ndarray) -> np.ndarray:
        """One forward pass: vectors of rows, float32 [len(rows), dimension]."""
        if not len(rows):
            return np.empty((0, self.dimension), np.float32)
        vectors = self._model.encode(
            [tokens.texts[int(row)] for row in rows],
            batch_size=len(rows),
            prompt=self._prompt,
            truncate_dim=self._truncate_dim,
            normalize_embeddings=self._normalizes and self._truncate_dim is not None,
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors.float().cpu().numpy())


def load_sentence_transformer(
    folder: ModelFolder, *, device: Device, prompt: str, truncate_dim: int | None, identity: str
) -> SentenceTransformerEncoder:
    """Loads a folder with sentence-transformers: safetensors only, no remote code.

    Raises:
      SurgeError: if sentence-transformers cannot load it under these terms.
    """
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(
            str(folder.path),
            device=device.name,
            trust_remote_code=False,
            local_files_only=True,
            model_kwargs={"use_safetensors": True, "dtype": device.compute},
        )
    except Exception as error:
        raise SurgeError(f"sentence-transformers cannot load {folder.path}: {error}") from error
    if device.round_to is not None:
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(value.to(device.round_to))
    return SentenceTransformerEncoder(
        model.eval(), device=device, prompt=prompt, truncate_dim=truncate_dim, identity=identity
    )
