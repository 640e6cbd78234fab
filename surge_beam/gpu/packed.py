"""An embedding model without padding: tokenizer, packed transformer, pooling and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surge_beam.gpu.device import Device
from surge_beam.gpu.folder import DenseStage, ModelFolder
from surge_beam.gpu.models import build_model
from surge_beam.gpu.models.batch import pack
from surge_beam.gpu.models.pooling import pool
from surge_beam.gpu.models.weights import Weights
from surge_beam.gpu.tokens import FlatTokens, TextTokenizer


class PackedEncoder:
    """Encoder of a folder whose family is in ``surge_beam.gpu.models``.

    Attributes:
      dimension: size of a vector.
      device: ``cpu`` or ``cuda``.
      dtype: what the weights were rounded to. On a CPU without 16-bit matrix units they are then
        kept and computed in float32, which is 8 times faster there than bfloat16.
      identity: digest of the model, see ``model_identity``.
    """

    def __init__(
        self,
        folder: ModelFolder,
        model: Callable[..., Tensor],
        tokenizer: Any,
        *,
        device: Device,
        prompt: str,
        truncate_dim: int | None,
        identity: str,
    ) -> None:
        self.device, self.dtype, self.identity = device.name, device.dtype_name, identity
        self._device, self._folder, self._model = device.torch, folder, model
        self._truncate_dim = truncate_dim
        self._skip = 0
        positions = getattr(model, "max_positions", None)
        limit = set_truncation(tokenizer, positions)
        self._tokenizer = TextTokenizer(tokenizer._tokenizer, limit, prompt)
        if prompt and not folder.pooling.include_prompt:
            self._skip = prompt_length(
                tokenizer, TextTokenizer(tokenizer._tokenizer, limit), prompt
            )
        width = model.width * len(folder.pooling.modes)  # type: ignore[attr-defined]
        self._head: list[_Dense] = []
        for stage in folder.stages:
            if isinstance(stage, DenseStage):
                self._head.append(_Dense(stage, device))
                width = self._head[-1].out_features
        self.dimension = width if truncate_dim is None else min(width, truncate_dim)

    def tokenize(self, texts: Sequence[str]) -> FlatTokens:
        """Token ids of texts, the prompt before each, cut at the model's maximum length."""
        return self._tokenizer(texts)

    def forward(self, tokens: FlatTokens, rows: np.ndarray) -> np.ndarray:
        """One forward pass: the vectors of rows, float32 [len(rows), dimension]."""
        if not len(rows):
            return np.empty((0, self.dimension), np.float32)
        rows = np.asarray(rows, dtype=np.int64)
        lengths = tokens.offsets[rows + 1] - tokens.offsets[rows]
        order = np.argsort(-lengths, kind="stable")
        with torch.inference_mode():
            batch = pack(tokens.ids, tokens.offsets, rows[order], self._device)
            x = pool(self._model(batch), batch, self._folder.pooling.modes, self._skip)
            dense = iter(self._head)
            for stage in self._folder.stages:
                x = next(dense)(x) if isinstance(stage, DenseStage) else F.normalize(x, dim=-1)
            if self._truncate_dim is not None and self._truncate_dim < x.shape[1]:
                x = x[:, : self._truncate_dim]
                x = F.normalize(x, dim=-1) if self._folder.normalizes else x
            vectors = x.cpu().numpy()
        if np.array_equal(order, np.arange(len(order))):
            return np.ascontiguousarray(vectors)
        out = np.empty_like(vectors)
        out[order] = vectors
        return out


class _Dense:
    """A sentence-transformers Dense module, float32."""

    def __init__(self, stage: DenseStage, device: Device) -> None:
        weights = Weights(
            stage.folder, dtype=torch.float32, device=device.torch, round_to=device.round_to
        )
        self.weight = weights.tensor("linear.weight")
        self.bias = weights.find("linear.bias")
        self.residual = weights.find("residual.weight") if stage.use_residual else None
        self.use_residual = stage.use_residual
        self.out_features = len(self.weight)
        self.activation: Callable[[Tensor], Tensor] = getattr(
            torch.nn, stage.activation.rpartition(".")[2]
        )()

    def __call__(self, x: Tensor) -> Tensor:
        out = self.activation(F.linear(x, self.weight, self.bias))
        if self.use_residual:
            out = out + (x if self.residual is None else F.linear(x, self.residual))
        return out


def load_packed(
    folder: ModelFolder, *, device: Device, prompt: str, truncate_dim: int | None, identity: str
) -> PackedEncoder | None:
    """The packed encoder of a folder; None if its family or its tokenizer is not ours."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder.transformer, trust_remote_code=False)
    tokenizer = load_tokenizer(folder, config)
    if tokenizer is None:
        return None
    model = build_model(config, folder.transformer, device)
    if model is None:
        return None
    return PackedEncoder(
        folder,
        model,
        tokenizer,
        device=device,
        prompt=prompt,
        truncate_dim=truncate_dim,
        identity=identity,
    )


def load_tokenizer(folder: ModelFolder, config: Any) -> Any:
    """The folder's fast tokenizer set up as sentence-transformers does, or None."""
    from tokenizers.normalizers import Lowercase
    from tokenizers.normalizers import Sequence as Normalizers
    from transformers import AutoTokenizer

    asked = {} if folder.max_seq_length is None else {"model_max_length": folder.max_seq_length}
    tokenizer = AutoTokenizer.from_pretrained(folder.transformer, trust_remote_code=False, **asked)
    if not getattr(tokenizer, "is_fast", False):
        return None
    places = getattr(config, "max_position_embeddings", -1)
    if folder.max_seq_length is None and places != -1:
        tokenizer.model_max_length = min(tokenizer.model_max_length, places)
    if folder.do_lower_case:
        normalizer = tokenizer._tokenizer.normalizer
        before = list(normalizer) if isinstance(normalizer, Normalizers) else [normalizer]
        if not any(isinstance(step, Lowercase) for step in before):
            steps = [Lowercase(), *(step for step in before if step is not None)]
            tokenizer._tokenizer.normalizer = Normalizers(steps)
    probe = tokenizer._tokenizer.encode("probe")
    return None if any(probe.type_ids) else tokenizer


def set_truncation(tokenizer: Any, positions: int | None) -> int | None:
    """Sets the backend to truncate and not to pad; returns the tokens kept, None for all."""
    backend = tokenizer._tokenizer
    backend.no_padding()
    limit = int(tokenizer.model_max_length)
    if positions is not None:
        limit = min(limit, positions)
    if limit > 10**9:
        backend.no_truncation()
        return None
    backend.enable_truncation(
        max_length=limit, stride=0, strategy="longest_first", direction=tokenizer.truncation_side
    )
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return limit


def prompt_length(tokenizer: Any, encode: TextTokenizer, prompt: str) -> int:
    """Tokens of the prompt alone, without a special token at the end."""
    ids = encode([prompt]).ids
    return len(ids) - int(len(ids) > 0 and int(ids[-1]) in tokenizer.all_special_ids)
