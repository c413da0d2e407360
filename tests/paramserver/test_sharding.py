"""The arithmetic of shards, and rules, in one process."""

import math

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


def test_values_that_take_the_place_of_others_do_so_whatever_these_are():
    former, given = torch.tensor([math.inf, math.nan, 1.0, 3e38]), torch.tensor([1.0, 2.0, 3.0, -3e38])
    for rule, options in (("elastic", {"weight": 1}), ("average", {})):
        known = rules.checked(rule, options, torch.float32, None)
        memory = [] if known.memory is None else [rules.Memory([], torch.zeros((), dtype=torch.float64))]
        shard = former.clone()
        known.fn(shard, given, *memory, **options)
        assert torch.equal(shard, given)


def test_mistakes_in_rules():
    with pytest.raises(
        ValueError, match=r"rule 'none' is unknown; known rules: zero, copy, add, scaled_add, average, elastic"
    ):
        rules.checked("none", {}, torch.float32, None)
    with pytest.raises(TypeError, match=r"rule 'scaled_add' does not take the options \{\}: missing .*'scale'"):
        rules.checked("scaled_add", {}, torch.float32, None)
    with pytest.raises(TypeError, match=r"rule 'add' does not take the options \{'scale': 2\}"):
        rules.checked("add", {"scale": 2}, torch.float32, None)
    for name, options, dtype, words in (
        ("elastic", {"weight": "a"}, torch.float32, "weight is no number"),
        ("scaled_add", {"scale": 0.5}, torch.int64, r"scale is a float, and the elements are torch\.int64"),
        ("sgd", {"lr": -0.1}, torch.float32, "lr=-0.1: torch takes no negative number"),
        ("sgd", {"nesterov": True}, torch.float32, "nesterov=True takes a momentum"),
        ("adam", {"betas": [0.9, 1.5]}, torch.float32, "betas=.*: torch takes two numbers"),
    ):
        with pytest.raises(ValueError, match=f"rule '{name}' does not take the options .*: {words}"):
            rules.checked(name, options, dtype, name)
    for name in ("zero", "add"):
        with pytest.raises(ValueError, match="is built in"):
            register_rule(name, print)
    for name, fn in (("", print), (3, print), ("mine", 3)):
        with pytest.raises(TypeError, match="register_rule"):
            register_rule(name, fn)
