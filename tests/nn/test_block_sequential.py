"""Blocks of layers: parameters and gradients of each lie in one tensor, and the backward pass goes block by block."""

import copy

import pytest
import torch
from support import networks

from torchmpi_py.nn import BlockSequential
from torchmpi_py.nn.block_sequential import partition

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("sizes", "partitions", "expected"),
    [
        ([110] * 31, 7, [4] * 7 + [3]),  # TorchMPI's own test
        ([5], 3, [1]),
        ([100, 1, 1], 3, [1, 2]),  # a first child above the target: no empty block before it
        ([1, 1, 100], 2, [2, 1]),
        ([0, 0, 0], 2, [3]),
        ([], 2, []),
        ([3, 0, 3, 0], 2, [2, 2]),
    ],
)
def test_partition(sizes, partitions, expected):
    runs = partition([[torch.nn.Parameter(torch.zeros(size))] for size in sizes], partitions)
    assert [len(run) for run in runs] == expected
    assert [index for run in runs for index in run] == list(range(len(sizes)))


def made(partitions):
    """Return a plain network, and an equal one of blocks."""
    sizes = [6] * 6
    return networks.perceptron(*sizes), BlockSequential(partitions, *networks.perceptron(*sizes))


def assert_same_gradients(plain, blocks):
    torch.testing.assert_close(networks.flat_gradients(plain), networks.flat_gradients(blocks))


@pytest.mark.parametrize("partitions", [1, 2, 3, 50])
def test_it_computes_what_sequential_computes(partitions):
    plain, blocks = made(partitions)
    x = networks.batch(4, 6).requires_grad_()
    y = x.detach().clone().requires_grad_()
    for _ in range(2):  # the second time gradients accumulate
        plain(x).square().sum().backward()
        output = blocks(y)
        (gradient,) = torch.autograd.grad(output.square().sum(), output)
        complete = []
        for block, expected in zip(blocks.backward_blocks(gradient), blocks.blocks[::-1], strict=True):
            assert block.children == expected.children
            complete = [block.gradients.clone(), *complete]
        torch.testing.assert_close(torch.cat(complete), networks.flat_gradients(plain))
        assert_same_gradients(plain, blocks)
        torch.testing.assert_close(x.grad, y.grad)
    with pytest.raises(RuntimeError, match="call forward first"):
        next(blocks.backward_blocks(gradient))


def test_ordinary_backward_and_optimizers_work():
    plain, blocks = made(2)
    for net in (plain, blocks):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            net(networks.batch(4, 6)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(networks.flat(plain), networks.flat(blocks))
    assert torch.equal(torch.cat([block.weights for block in blocks.blocks]), networks.flat(blocks))


def test_weights_stay_flat_when_the_module_is_converted_or_copied():
    _, blocks = made(2)
    for net in (blocks.double(), copy.deepcopy(blocks)):
        block = net.blocks[0]
        assert block.weights.dtype == torch.float64
        block.weights.zero_()
        assert all((p == 0).all() for p in block.parameters)
        assert [id(p) for b in net.blocks for p in b.parameters] == [id(p) for p in net.parameters()]


def test_forward_leaves_parameters_where_they_are():
    """Such as in the buckets of an optimizer; blocks that are asked for are flat again."""
    plain, blocks = made(2)
    memory = [p.detach().clone() for p in blocks.parameters()]
    for p, elsewhere in zip(blocks.parameters(), memory, strict=True):
        p.data = elsewhere
    x = networks.batch(4, 6)
    output = blocks(x)
    assert [p.data_ptr() for p in blocks.parameters()] == [elsewhere.data_ptr() for elsewhere in memory]
    plain(x).sum().backward()
    for block in blocks.backward_blocks(torch.ones_like(output)):
        block.weights.zero_()
        assert all((p == 0).all() for p in block.parameters)
    assert_same_gradients(plain, blocks)


def test_shared_and_frozen_parameters():
    first = torch.nn.Linear(3, 3)
    net = BlockSequential(2, first, torch.nn.Linear(3, 3), first)
    net[1].bias.requires_grad_(False)
    reference = copy.deepcopy(torch.nn.Sequential(*net))
    x = torch.randn(2, 3)
    reference(x).sum().backward()
    output = net(x)
    assert [block.gradients.numel() for block in net.backward_blocks(torch.ones_like(output))] == [21]
    assert net[1].bias.grad is None
    assert_same_gradients(reference, net)


def test_bad_arguments():
    with pytest.raises(ValueError, match="partitions=0"):
        BlockSequential(0, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="several dtypes or devices"):
        BlockSequential(1, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).double())


def test_blocks_follow_what_is_done_to_the_module():
    x = torch.randn(2, 3)
    net = BlockSequential(2, torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net.append(torch.nn.Linear(3, 2))
    assert net(x).shape == (2, 2)
    net[0] = torch.nn.Identity()
    assert torch.equal(net(x), net[2](net[1](x)))
    net.load_state_dict({name: torch.ones_like(value) for name, value in net.state_dict().items()}, assign=True)
    output = net(x)
    for block in net.backward_blocks(torch.ones_like(output)):
        block.gradients.add_(1)
    assert all((block.weights == 1).all() for block in net.blocks)
    assert [id(p) for block in net.blocks for p in block.parameters] == [id(p) for p in net.parameters()]
    again = copy.deepcopy(net)  # after a forward pass
    assert torch.equal(again(x), net(x))
    assert isinstance(net[1:], torch.nn.Sequential)
    assert len(net[1:]) == 2


def test_shared_memory_stays_shared():
    net = BlockSequential(2, torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net.share_memory()
    net(torch.ones(1, 3))
    assert all(p.is_shared() for p in net.parameters())
    assert all(block.weights.is_shared() for block in net.blocks)


def test_parameters_that_are_flat_already_stay_where_they_are():
    """A block within a block has the memory of the outer one; so has a network whose memory was moved as a whole."""
    inner = BlockSequential(2, torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net = BlockSequential(1, torch.nn.Linear(3, 3), inner)
    for _ in range(2):
        (block,) = net.blocks
        block.weights.copy_(torch.arange(36.0))
        assert [part.weights.tolist() for part in inner.blocks] == [list(range(12, 24)), list(range(24, 36))]
        elsewhere = torch.zeros(40)
        elsewhere[2:38] = block.weights
        for p in net.parameters():
            p.data = elsewhere.as_strided(p.shape, p.stride(), 2 + p.storage_offset())
        net(torch.ones(1, 3))
        net.blocks[0].weights.mul_(2)
        assert elsewhere.tolist() == [0, 0, *(2.0 * n for n in range(36)), 0, 0]
        elsewhere = net.blocks[0].weights.clone()
        for p in net.parameters():
            p.data = elsewhere.as_strided(p.shape, p.stride(), p.storage_offset() - 2)
