"""What the examples share: the data sets, a small network for them, and how well it does.

The digits come with scikit-learn: 1797 images of 8 x 8 pixels. With a directory, MNIST is read from it: the four idx
files under their own names, plain or gzipped.
"""

import gzip
import math
import pathlib

import torch
from torch.utils.data import TensorDataset


def load(directory=None):
    """(training set, test set): images (N, 1, height, width) from -1 to 1, and labels (N,)."""
    return digits() if directory is None else mnist(pathlib.Path(directory))


def digits():
    """Every fifth sample is kept for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def mnist(directory):
    """The training set of 60000 images and the test set of 10000."""
    sets = []
    for part in ("train", "t10k"):
        images = read_idx(directory, f"{part}-images-idx3-ubyte").unsqueeze(1) / 127.5 - 1
        labels = read_idx(directory, f"{part}-labels-idx1-ubyte").long()
        sets.append(TensorDataset(images, labels))
    return tuple(sets)


def read_idx(directory, name):
    """A tensor of bytes from an idx file: two zeros, 8 for bytes, the number of dimensions, each of them, the data."""
    plain, zipped = directory / name, directory / f"{name}.gz"
    if not (plain.exists() or zipped.exists()):
        raise SystemExit(f"neither {plain} nor {zipped} exists: put MNIST's four files there")
    content = plain.read_bytes() if plain.exists() else gzip.decompress(zipped.read_bytes())
    num_dimensions = content[3] if content[:3] == b"\0\0\x08" else 0
    begin = 4 + 4 * num_dimensions
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, begin, 4)]
    if not shape or len(content) - begin != math.prod(shape):
        raise SystemExit(f"{directory / name} is not an idx file of bytes")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=begin).view(shape)


def conv_net(image_size):
    """Two convolutions and two linear layers; no dropout or batch statistics, so that any split trains alike."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * (image_size // 2) ** 2, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def accuracy(network, test_set):
    """The share of a test set that a network recognizes."""
    images, labels = test_set.tensors
    with torch.no_grad():
        return (network(images).argmax(1) == labels).double().mean().item()
