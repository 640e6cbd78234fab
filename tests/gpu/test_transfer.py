from __future__ import annotations

import numpy as np
import pytest
import torch

from surge_beam.gpu.transfer import HostCopies, to_device

without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_cuda])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_of_the_moment_it_was_made(device):
    """The pool is written again at once."""
    torch.manual_seed(0)
    pool = torch.randn(2, 2, 3, 4096, 64).to(device)
    before = pool.clone().cpu()
    copies = HostCopies(pool)
    slots = torch.randperm(4096)[:1000]
    back = torch.randperm(4096)[:1000]
    copy = copies.save(slots.to(device))
    pool.fill_(7.0)
    copies.restore(copy, 300, back[300:].to(device))
    after = pool.cpu()
    assert torch.equal(after[:, :, :, back[300:]], before[:, :, :, slots[300:]])
    others = np.setdiff1d(np.arange(4096), back[300:].numpy())
    assert (after[:, :, :, others] == 7.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_go_to_the_device(device):
    array = np.arange(10_000)
    sent = [to_device(array + i, torch.device(device)) for i in range(20)]
    assert all(tensor.device.type == device for tensor in sent)
    assert all(np.array_equal(t.cpu().numpy(), array + i) for i, t in enumerate(sent))
