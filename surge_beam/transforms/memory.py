"""What a job's process keeps of the memory that its threads have freed (glibc)."""

from __future__ import annotations

import contextlib
import ctypes

import pyarrow as pa

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def share_freed_memory() -> None:
    """Makes the threads of this process use each other's freed memory, rather than pools of theirs.

    A job's threads allocate in turns, and what each has ever held would add up. What is freed goes
    back to the system from 64 MiB on, not at once: a model's layers would otherwise get every
    result of some MiB anew from the system, a page fault a page.

    Arrow's readers and writers of Parquet take the pool that ``ARROW_DEFAULT_MEMORY_POOL`` named
    when Arrow was loaded, whatever is set here.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)  # other C libraries have no such functions
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most there is
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def give_back_freed_memory() -> None:
    """Gives what this process has freed back to the system, in some milliseconds.

    After some SuperBatches: what reading and writing them took, in pieces between what still
    lives, would otherwise stay.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
