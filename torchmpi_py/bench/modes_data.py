"""What the modes of distribution are compared on: scikit-learn's handwritten digits, and a small network for them.

The data set, its split and the network are those of the examples.
"""

from __future__ import annotations

import functools

import torch
from torch.utils.data import TensorDataset

from torchmpi_py.bench import UsageError


@functools.cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """(training set, test set) of 1437 and 360 images of 8 x 8 pixels. UsageError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError("modes needs scikit-learn, for its digits: pip install 'torchmpi-py[examples]'") from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def make_network(seed: int) -> torch.nn.Module:
    """Two convolutions and two linear layers, the same on every rank."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def accuracy(network: torch.nn.Module) -> float:
    """The share of the test set that is recognized, in percent."""
    images, labels = digits()[1].tensors
    with torch.no_grad():
        return 100 * float((network(images).argmax(1) == labels).double().mean())
