"""The arithmetic of shards, and rules, in one process."""

import math

import pytest
import torch

from torchmpi_py.memory.devices import HostCopy
from torchmpi_py.paramserver import register_rule, rules
from torchmpi_py.paramserver.shard import shards


def test_shards():
    """Below, at and above one element for each rank: all elements, in order, and the first ranks have one more."""
    for size in range(1, 38):
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


@pytest.mark.parametrize(
    ("name", "options", "dtype", "words"),
    [
        ("none", {}, torch.float32, "'none' is unknown; use one of zero, copy, add, scaled_add, average, elastic"),
        ("scaled_add", {}, torch.float32, "missing .*'scale'"),
        ("add", {"scale": 2}, torch.float32, "not valid for rule 'add': .*scale"),
        ("elastic", {"weight": "a"}, torch.float32, "weight='a': expected a number"),
        ("elastic", {"weight": 0.5}, torch.int32, r"needs floating-point numbers.* torch\.int32"),
        ("average", {}, torch.bfloat16, "of at least 32 bits"),  # with 8 bits a mean of a thousand values stands still
        ("scaled_add", {"scale": 0.5}, torch.int64, r"scale is a float, but the elements are torch\.int64"),
        ("sgd", {"lr": -0.1}, torch.float32, "lr=-0.1: torch expects a number of at least 0"),
        ("sgd", {"nesterov": True}, torch.float32, "nesterov=True needs a momentum"),
        ("adam", {"betas": [0.9, 1.5]}, torch.float32, "betas=.*: torch expects two numbers"),
    ],
)
def test_mistakes_in_rules(name, options, dtype, words):
    with pytest.raises((TypeError, ValueError), match=words):
        rules.checked(name, options, dtype, name)


@pytest.mark.parametrize(("name", "fn"), [("zero", print), ("", print), (3, print), ("mine", 3)])
def test_mistakes_in_registering(name, fn):
    with pytest.raises((TypeError, ValueError), match=r"register_rule: .*(is a built-in rule|pass a)"):
        register_rule(name, fn)


def test_the_way_of_tensors_on_a_gpu():
    """On the host, where streams do their work at once; tests/gpu has it on a card."""
    x, done = torch.arange(5.0), []
    copy = HostCopy(x)
    taken = copy.to_host()
    assert torch.equal(taken, x)
    assert taken.data_ptr() != x.data_ptr()
    copy.from_host(taken + 1, lambda: done.append(x.clone()))
    assert torch.equal(x, torch.arange(5.0) + 1)
    assert torch.equal(done[0], x)
    assert copy.empty().shape == x.shape
