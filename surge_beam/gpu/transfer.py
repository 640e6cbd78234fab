"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """An array as a tensor on a device; later work of the current stream sees it.

    On a CPU the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    # torch keeps pinned memory until the copy is done, whoever lets go of it before
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies of pages of a KV pool in host memory.

    On CUDA they are pinned and made on a stream of their own, one after another. Pages may be
    written again as soon as ``save`` returns: what is written later on the current stream comes
    after they were read. Nothing but the stream that ``restore`` runs on waits for a copy.

    Args:
      pool: [layers, 2, kv_heads, slots, head_dim].
    """

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    def save(self, slots: Tensor) -> Any:
        """A copy of slots, int64 [n] on the pool's device, for ``restore``."""
        if self._stream is None:
            return self._pool[:, :, :, slots]
        # slots first, so that a part of them is one piece
        read = self._pool.index_select(3, slots).movedim(3, 0).contiguous()
        copy = torch.empty(read.shape, dtype=read.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copy.copy_(read, non_blocking=True)
            done = self._stream.record_event()
        # its memory is not given to others before the copy is done
        read.record_stream(self._stream)
        return copy, done

    def restore(self, copy: Any, first: int, slots: Tensor) -> None:
        """Writes a copy's slots from its ``first`` on to slots of the pool, int64 [n]."""
        if self._stream is None:
            self._pool[:, :, :, slots] = copy[:, :, :, first:]
            return
        host, done = copy
        done.wait()
        back = host[first:].to(self._pool.device, non_blocking=True)
        self._pool.index_copy_(3, slots, back.movedim(0, 3))
