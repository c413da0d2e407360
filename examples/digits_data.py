"""What the examples share: options, the data sets, a small network for them, and how well it does over time.

The digits come with scikit-learn: 1797 images of 8 x 8 pixels. With a directory, MNIST is read from it: the four idx
files under their own names, plain or gzipped.
"""

import argparse
import gzip
import json
import math
import os
import pathlib
import sys
import time

import torch
from torch.utils.data import TensorDataset

import torchmpi_py


def parser(description):
    """The options of every example; an example adds its own."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="directory of MNIST's idx files; default: scikit-learn's digits")
    options.add_argument("--epochs", type=int, default=25)
    options.add_argument("--seed", type=int, default=1111)
    options.add_argument("--batch", type=int, default=60, help="samples per step, over all ranks; rounded up")
    options.add_argument("--lr", type=float, default=0.1)
    options.add_argument("--pause", type=float, default=0.0, help="seconds that the last rank sleeps in every step")
    options.add_argument("--curve", help="file for seconds and accuracy after each epoch, as JSON")
    return options


def prepare(options):
    """(training set, test set, network) for these options; the network is the same on every rank."""
    if "OMP_NUM_THREADS" not in os.environ:  # the launcher sets it: cores / ranks
        torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    train_set, test_set = load(options.data)
    return train_set, test_set, conv_net(image_size=train_set.tensors[0].shape[-1])


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
    device = next(network.parameters()).device
    images, labels = (x.to(device) for x in test_set.tensors)
    with torch.no_grad():
        return (network(images).argmax(1) == labels).double().mean().item()


class Curve:
    """Accuracy over time, on every rank: for ``--curve``, which rank 0 writes. ``--pause`` acts here too.

    Seconds count from the first step, without those that the tests after each epoch take. A network that is divided
    among the ranks brings an ``evaluate`` of its own, which all of them call.
    """

    def __init__(self, options, network, test_set, evaluate=accuracy):
        self.file, self.network, self.test_set, self.evaluate = options.curve, network, test_set, evaluate
        rank, self.num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.is_writer = rank == 0
        self.pause = options.pause if rank == self.num_ranks - 1 else 0.0
        self.begin = None
        self.points = []

    def follow(self, engine):
        """Watch the training of an engine."""
        engine.hooks.on_sample = lambda state: state.training and self.step()
        if self.file:  # else the engine writes a line
            engine.hooks.on_end_epoch = lambda state: self.end_epoch()

    def steps(self, batches):
        """The batches of an epoch, for a loop of one's own."""
        for batch in batches:
            self.step()
            yield batch
        self.end_epoch()

    def step(self):
        """A step begins."""
        if self.begin is None:
            self.begin = time.perf_counter()
        time.sleep(self.pause)

    def end_epoch(self):
        """Test what there is after an epoch, if it is to be written."""
        if self.file:
            seconds = time.perf_counter() - self.begin
            self.points.append((seconds, self.evaluate(self.network, self.test_set)))
            self.begin = time.perf_counter() - seconds

    def end(self):
        """The accuracy of the result."""
        seconds = time.perf_counter() - self.begin
        result = self.evaluate(self.network, self.test_set)
        if self.file and self.is_writer:
            seconds, accuracies = zip(*self.points, (seconds, result), strict=True)
            about = {"program": pathlib.Path(sys.argv[0]).stem, "ranks": self.num_ranks}
            about["versions"] = f"torchmpi_py {torchmpi_py.__version__}, torch {torch.__version__}"
            about["date"] = time.strftime("%Y-%m-%d", time.gmtime())
            pathlib.Path(self.file).write_text(json.dumps({"seconds": seconds, "accuracy": accuracies, **about}))
        return result
