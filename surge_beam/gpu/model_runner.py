"""A decoder model and its paged KV pool, one forward pass a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from surge_beam.gpu.attention_plan import (
    AttentionPlan,
    only_rows,
    plan_attention,
    share_groups,
)
from surge_beam.gpu.device_errors import free_device_memory, is_out_of_memory
from surge_beam.gpu.host import available_memory
from surge_beam.gpu.language_model import LanguageModel, load_language_model
from surge_beam.gpu.models.decoder import LayerKV
from surge_beam.gpu.runner import CopyFailed, OutOfDeviceMemory, Sampled, StepBatch
from surge_beam.gpu.sampling import sample
from surge_beam.gpu.transfer import HostCopies, to_device
from surge_beam.records import EngineConfig, SurgeError

if TYPE_CHECKING:
    from surge_beam.gpu.cuda_graphs import DecodeGraphs

_FREE_SHARE = {"cpu": 0.4, "cuda": 0.9}


class ModelRunner:
    """See ``Runner``.

    Attributes:
      pool: keys and values, [layers, 2, kv_heads, pages * page_size, head_dim].
      graphs: what runs steps in which every sequence decodes; None runs them like all others.

    Args:
      model: the model, on its device.
      pages: pages of the pool.
      page_size: tokens of a page.
    """

    def __init__(self, model: LanguageModel, *, pages: int, page_size: int) -> None:
        decoder = model.decoder
        self.model, self.pages, self.page_size = model, pages, page_size
        self.page_bytes = page_bytes(model, page_size)
        self.context_length, self.stop_ids = model.context_length, model.stop_ids
        self.vocabulary = decoder.vocab
        self.kv_tokens_read = self.kv_tokens_unshared = 0
        # share of the layers, by window
        self._windows = {
            window: decoder.windows.count(window) / decoder.layers
            for window in set(decoder.windows)
        }
        # not zeroed: memory of a CPU's pool is taken page by page, when it is first written
        self.pool = torch.empty(
            (decoder.layers, 2, decoder.kv_heads, pages * page_size, decoder.head_dim),
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self._layers = [(layer[0], layer[1]) for layer in self.pool]
        self._copies = HostCopies(self.pool)
        self.graphs = self._new_graphs()

    @property
    def decode_text(self) -> Callable[[list[int]], str]:
        """Text of token ids, without special tokens."""
        return self.model.decode

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> Sampled:
        """See ``Runner``."""
        try:
            return self.sample(self._forward(batch), batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error).splitlines()[0] if str(error) else "out of memory"
        if self.graphs is not None:
            self.graphs.clear()
        free_device_memory()
        raise OutOfDeviceMemory(message)

    def sample(self, logits: Tensor, batch: StepBatch) -> Sampled:
        """The tokens chosen from logits, float32 [R, vocabulary]."""
        return sample(logits, batch.sample, self.model.decoder.operations.chooser)

    def plan(self, batch: StepBatch) -> dict[int | None, AttentionPlan]:
        """How each kind of layer attends, by window."""
        tables, context, counts = batch.block_tables, batch.context, batch.counts
        groups = share_groups(tables, context, self.page_size)
        plans = {}
        for window, layers in self._windows.items():
            plan = plan_attention(
                tables, context, counts, self.page_size, window=window, groups=groups
            )
            self.kv_tokens_read += round(plan.kv_tokens_read * layers)
            self.kv_tokens_unshared += round(plan.kv_tokens_unshared * layers)
            plans[window] = plan
        return plans

    def layers(self, plans: dict[int | None, AttentionPlan], rows: np.ndarray) -> list[LayerKV]:
        """What the decoder takes for a step of these plans that wants the logits of some rows."""
        decoder = self.model.decoder
        used = [plans[window] for window in decoder.windows]
        # what other rows attend to in the last layer nobody reads
        used[-1] = only_rows(used[-1], rows)
        attentions = {
            key: decoder.operations.attention(
                plan, self.pool[0, 0], heads=decoder.heads, scale=decoder.scale
            )
            for key, plan in {id(plan): plan for plan in used}.items()
        }
        return [
            (attentions[id(plan)], keys, values)
            for plan, (keys, values) in zip(used, self._layers, strict=True)
        ]

    def _forward(self, batch: StepBatch) -> Tensor:
        decoder, plans = self.model.decoder, self.plan(batch)
        if self.graphs is not None and len(batch.rows) == len(batch.counts) == len(batch.ids):
            logits = self.graphs.logits(batch.ids, plans)
            if logits is not None:
                return logits
        positions = next(iter(plans.values())).positions
        return decoder(
            to_device(batch.ids, decoder.device),
            to_device(positions, decoder.device),
            self.layers(plans, batch.rows),
            to_device(batch.rows, decoder.device),
        )

    def _new_graphs(self) -> DecodeGraphs | None:
        decoder = self.model.decoder
        if decoder.device.type != "cuda" or not decoder.operations.capturable:
            return None
        from surge_beam.gpu.cuda_graphs import CudaCapture, DecodeGraphs

        return DecodeGraphs(decoder, self._layers, CudaCapture())

    @torch.inference_mode()
    def save(self, pages: Sequence[int]) -> Any:
        """See ``Runner``."""
        try:
            return self._copies.save(self._slots(pages))
        except (RuntimeError, MemoryError) as error:
            raise CopyFailed(str(error)) from error

    @torch.inference_mode()
    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """See ``Runner``."""
        try:
            self._copies.restore(copy, first * self.page_size, self._slots(pages))
        except (RuntimeError, MemoryError) as error:
            raise CopyFailed(str(error)) from error

    def close(self) -> None:
        """See ``Runner``. The model stays, for the next engine of this process."""
        self.pool = self.pool[:, :, :, :0].clone()
        self._layers, self.graphs = [], None
        self._copies = HostCopies(self.pool)

    def _slots(self, pages: Sequence[int]) -> Tensor:
        first = np.array(pages, np.int64)[:, None] * self.page_size
        return to_device((first + np.arange(self.page_size)).ravel(), self.pool.device)


def page_bytes(model: LanguageModel, page_size: int) -> int:
    """Bytes of a page over all layers."""
    decoder = model.decoder
    item = torch.empty((), dtype=decoder.dtype).element_size()
    return decoder.layers * 2 * decoder.kv_heads * decoder.head_dim * page_size * item


@functools.lru_cache(maxsize=1)
def _model(config: EngineConfig) -> LanguageModel:
    return load_language_model(config)


def load_model_runner(config: EngineConfig) -> ModelRunner:
    """The model of a recipe, and a pool of the bytes it allows.

    Without ``kv_bytes`` the pool takes a share of the memory that is free once the model is
    loaded, and never more than ``max_sequences`` whole contexts.

    Raises:
      SurgeError: if the model or the device is not there, or the pool would hold no page.
    """
    model = _model(
        EngineConfig(
            model=config.model,
            dtype=config.dtype,
            device=config.device,
            require_accelerator=config.require_accelerator,
            kernels=config.kernels,
        )
    )
    a_page = page_bytes(model, config.page_size)
    context = min(model.context_length, config.max_context or model.context_length)
    useful = config.max_sequences * -(-context // config.page_size)
    if config.kv_bytes is not None:
        pages = config.kv_bytes // a_page
    else:
        pages = min(useful, int(_free_bytes(model.decoder.device)) // a_page)
    if pages < 1:
        raise SurgeError(
            f"kv_bytes allows {config.kv_bytes or 0} bytes, and one KV page of "
            f"{config.page_size} tokens takes {a_page}"
        )
    try:
        return ModelRunner(model, pages=pages, page_size=config.page_size)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SurgeError(
            f"the KV pool of {pages * a_page} bytes does not fit the memory; give it fewer kv_bytes"
        ) from error


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return _FREE_SHARE["cuda"] * torch.cuda.mem_get_info(device)[0]
    return _FREE_SHARE["cpu"] * available_memory()
