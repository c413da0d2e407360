"""The way of tensors on a GPU, on the host, where streams do their work at once; tests/gpu has it on a card."""

import torch

from torchmpi_py.memory.devices import HostCopy


def test_there_and_back():
    x = torch.arange(5.0)
    copy = HostCopy(x)
    taken = copy.to_host()
    assert torch.equal(taken, x)
    assert taken.data_ptr() != x.data_ptr()
    done = []
    copy.from_host(taken + 1, lambda: done.append(x.clone()))
    assert torch.equal(x, torch.arange(5.0) + 1)
    assert torch.equal(done[0], x)
    assert copy.empty().shape == x.shape
