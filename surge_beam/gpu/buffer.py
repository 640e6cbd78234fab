"""Memory for results, kept from call to call."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffer:
    """Memory for a result that is done with before the next one comes.

    A result of several MiB that is allocated anew in every layer costs a page fault a page.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def empty(self, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, columns] on the CPU, in the memory of what it gave before."""
        size = rows * columns
        if self._memory is None or len(self._memory) < size or self._memory.dtype != dtype:
            self._memory = torch.empty(size, dtype=dtype)
        return self._memory[:size].view(rows, columns)
