from __future__ import annotations

from surge_beam.gpu.device_errors import is_fatal, is_out_of_memory


def test_kinds_of_errors():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(RuntimeError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_fatal(RuntimeError("shape mismatch"))
