"""The arithmetic of shards, and rules, in one process."""

import pytest
import torch

from torchmpi_py.paramserver import register_rule, rules
from torchmpi_py.paramserver.shard import shards


@pytest.mark.parametrize("size", range(1, 38))
def test_shards(size):
    for count in (0, 1, size - 1, size, size + 1, 10, 1000, 911 * 101):
        bounds = shards(count, size)
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == count
        lengths = [end - begin for begin, end in bounds]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) - min(lengths) <= 1
    assert shards(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        ("zero", {}, [0, 0, 0]),
        ("copy", {}, [10, 20, 30]),
        ("add", {}, [11, 22, 33]),
        ("scaled_add", {"scale": -0.5}, [-4, -8, -12]),
        ("elastic", {"weight": 0.5}, [5.5, 11, 16.5]),
    ],
)
def test_rules(rule, options, expected):
    shard, payload = torch.tensor([1.0, 2, 3]), torch.tensor([10.0, 20, 30])
    rules.checked(rule, options, torch.float32, None).fn(shard, payload, **options)
    assert shard.tolist() == expected
    assert payload.tolist() == [10, 20, 30]


def test_mistakes_in_rules():
    with pytest.raises(
        ValueError, match=r"rule 'none' is unknown; known rules: zero, copy, add, scaled_add, average, elastic"
    ):
        rules.checked("none", {}, torch.float32, None)
    with pytest.raises(TypeError, match=r"rule 'scaled_add' does not take the options \{\}: missing .*'scale'"):
        rules.checked("scaled_add", {}, torch.float32, None)
    with pytest.raises(TypeError, match=r"rule 'add' does not take the options \{'scale': 2\}"):
        rules.checked("add", {"scale": 2}, torch.float32, None)
    for name in ("zero", "add"):
        with pytest.raises(ValueError, match="is built in"):
            register_rule(name, print)
    for name, fn in (("", print), (3, print), ("mine", 3)):
        with pytest.raises(TypeError, match="register_rule"):
            register_rule(name, fn)
