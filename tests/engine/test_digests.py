"""Digests of what ranks compare: equal content has one, in all processes, and other content another one."""

import dataclasses
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from torchmpi_py.engine.same_batches import digest


class Unread(Dataset):
    """A dataset whose samples nobody may ask for."""

    def __init__(self, files, transform=None):
        self.files, self.transform = files, transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        raise AssertionError("read")

    def method(self):
        pass


class Bound(Unread):
    """It holds itself."""

    def __init__(self, files):
        super().__init__(files)
        self.transform = self.method


@dataclasses.dataclass
class Sample:
    x: object
    text: str = "text"


def tensors(change=None, total=5000):
    x = torch.arange(3.0 * total).view(total, 3)
    if change is not None:
        x[change, 1] += 1
    return x


DIFFERENT = {
    "number": lambda: 3,
    "other number": lambda: 4,
    "batch": lambda: (tensors(), [torch.tensor(1), "text"], {"y": np.arange(4)}),
    "other batch": lambda: (tensors(), [torch.tensor(1), "text"], {"y": np.arange(1, 5)}),
    "first": lambda: tensors(0),
    "last": lambda: tensors(-1),
    "fewer": lambda: tensors(total=4999),
    "float64": lambda: tensors().double(),
    "strided": lambda: tensors().t(),
    "bfloat16": lambda: tensors().bfloat16(),
    "bool": lambda: tensors() > 7,
    "complex": lambda: torch.view_as_complex(tensors()[:, :2].contiguous()).conj(),
    "scalar": lambda: torch.tensor(2.5),
    "one element, with a stride": lambda: torch.full((5,), 3.5)[::5],
    "empty": lambda: torch.empty(0, 3),
    "texts": lambda: np.array(["a", "b"]),
    "set": lambda: {"a", "b", "c"},
    "TensorDataset": lambda: TensorDataset(tensors()),
    "other TensorDataset": lambda: TensorDataset(tensors(0)),
    "Subset": lambda: Subset(TensorDataset(tensors()), range(7, 900)),
    "other Subset": lambda: Subset(TensorDataset(tensors()), range(8, 901)),
    "ConcatDataset": lambda: ConcatDataset([TensorDataset(tensors()), Unread(["a", "b"])]),
    "unread": lambda: Unread(["a.jpg", "b.jpg"], lambda x: x),
    "other files": lambda: Unread(["a.jpg", "c.jpg"], lambda x: x),
    "method": lambda: Bound(["a.jpg"]),
    "sample": lambda: Sample(tensors()),
    "other sample": lambda: Sample(tensors(), "other"),
}


def test_equal_content_has_one_digest_and_different_content_different_ones():
    digests = [digest(make()) for make in DIFFERENT.values()]
    assert len(set(digests)) == len(DIFFERENT)
    program = "import test_digests as t; print([t.digest(make()) for make in t.DIFFERENT.values()])"
    there = subprocess.check_output([sys.executable, "-c", program], cwd=os.path.dirname(__file__), text=True)
    assert there.strip() == str(digests)
    texts = ["".join(["a", "b"]) for _ in range(2)]
    assert digest(texts) == digest(texts[:1] * 2)


def test_what_cannot_be_compared_is_refused():
    endless = []
    endless.append(endless)
    for content in (torch.empty(3, device="meta"), torch.eye(3).to_sparse(), sqlite3.connect(":memory:"), endless):
        with pytest.raises((TypeError, ValueError, RecursionError)):
            digest(content)
