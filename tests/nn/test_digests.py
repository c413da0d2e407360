"""Digests of what ranks compare: equal content has one, in all processes, and other content another one."""

import dataclasses
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from torchmpi_py.nn.first_batches import short_digest, whole_digest


class Unread(Dataset):
    """A dataset whose samples nobody may ask for."""

    def __init__(self, files, handle=None):
        self.files, self.handle = files, handle

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        raise AssertionError("read")


class Closed:
    def __len__(self):
        raise ValueError("closed")


def tensors(change=None, total=5000):
    x = torch.arange(3.0 * total).view(total, 3)
    if change is not None:
        x[change, 1] += 1
    return x


SAME = {
    "number": lambda: 3,
    "batch": lambda: (tensors(), [torch.tensor(1), "text"], {"y": np.arange(4)}),
    "strided": lambda: tensors().t(),
    "bfloat16": lambda: tensors().bfloat16(),
    "bool": lambda: tensors() > 7,
    "complex": lambda: torch.view_as_complex(tensors()[:, :2].contiguous()).conj(),
    "scalar": lambda: torch.tensor(2.5),
    "one element, with a stride": lambda: torch.full((5,), 3.5)[::5],
    "empty": lambda: torch.empty(0, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "texts": lambda: np.array(["a", "b"]),
    "objects": lambda: np.array([object()], dtype=object),
    "TensorDataset": lambda: TensorDataset(tensors()),
    "Subset": lambda: Subset(TensorDataset(tensors()), range(7, 900)),
    "ConcatDataset": lambda: ConcatDataset([TensorDataset(tensors()), Unread(["a", "b"])]),
    "unread": lambda: Unread(["a.jpg", "b.jpg"], Closed()),
}
OTHER = [
    *(4, 3.0, "3", None),
    *(tensors(), tensors(0), tensors(-1), tensors(total=4999), tensors().double()),
    *(TensorDataset(tensors(0)), TensorDataset(tensors(), tensors())),
    Subset(TensorDataset(tensors()), range(8, 901)),
    Subset(TensorDataset(tensors()), list(range(7, 900, 2))),
    Subset(TensorDataset(tensors(0)), range(7, 900)),
    Unread(["a.jpg", "c.jpg"]),
    Subset(Subset(Unread(["a.jpg", "c.jpg"]), [0, 1]), [1]),
    Subset(Subset(Unread(["a.jpg", "c.jpg"]), [0, 1]), [0]),
    Subset(Subset(Unread(["a.jpg", "d.jpg"]), [0, 1]), [0]),
]


def test_equal_content_has_one_digest_and_different_content_different_ones():
    digests = {name: short_digest(make()) for name, make in SAME.items()}
    assert {name: short_digest(make()) for name, make in SAME.items()} == digests
    assert len({*digests.values(), *map(short_digest, OTHER)}) == len(SAME) + len(OTHER)


def test_what_contains_itself_ends():
    endless = []
    endless.extend([endless] * 600)
    assert short_digest(endless)


@dataclasses.dataclass
class Sample:
    """It has no length."""

    x: object
    text: str = "text"


WHOLE = {
    **{name: make for name, make in SAME.items() if name not in ("meta", "objects", "unread", "ConcatDataset")},
    "sample": lambda: Sample(tensors()),
    "middle": lambda: Sample(tensors(2500)),
    "array": lambda: Sample(tensors(2500).numpy()),
    "text": lambda: Sample(tensors(), "other"),
    "numbers": lambda: (np.int64(3), np.float32(0.5)),
    "other numbers": lambda: (np.int64(3), np.float32(0.25)),
    "sparse numbers": lambda: 2 * torch.eye(3).to_sparse(),
    "long": lambda: ["".join(["a", str(number % 2999)]) for number in range(3000)],
    "long, other": lambda: ["".join(["a", str(number % 2998)]) for number in range(3000)],
}


def test_whole_digests_are_those_of_the_whole_content_in_all_processes():
    here = str([whole_digest(make()).hex() for make in WHOLE.values()])
    assert len(set(here.split())) == len(WHOLE)
    program = "import test_digests as t; print([t.whole_digest(make()).hex() for make in t.WHOLE.values()])"
    there = subprocess.check_output([sys.executable, "-c", program], cwd=os.path.dirname(__file__), text=True)
    assert there.strip() == here
    texts = ["".join(["a", "b"]) for _ in range(2)]
    assert whole_digest(texts) == whole_digest(texts[:1] * 2)
    for content in (torch.empty(3, device="meta"), lambda: 3):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            whole_digest(content)
