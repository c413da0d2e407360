"""What a rank sees in a job on several hosts; ``test_jobs.py`` starts such jobs. On one node these tests are skipped.

Element j of rank r holds a value that depends on both, so that a swapped or lost piece shows; sizes lie around those at
which the selector changes the flavour between nodes.
"""

import os
import socket
from pathlib import Path

import pytest
import torch
from support.networks import perceptron
from support.values import total, values

from torchmpi_py import errors
from torchmpi_py.collectives import registry, selector

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(200)]
VERBS = ["allreduce", "reduce", "broadcast", "allgather", "gather", "reduce_scatter", "scatter", "alltoall"]
ROOTED = ("reduce", "broadcast", "gather", "scatter")
FLAVOURS = [each.name for each in registry.FLAVOURS if "cpu" in each.devices]
MOST_BYTES = 2 << 20


@pytest.fixture(scope="module")
def ranks(mpi):
    """The package, where its ranks are on several hosts."""
    if mpi.num_nodes() == 1:
        pytest.skip("all ranks are on one node; tests/hosts/test_jobs.py starts jobs on several hosts")
    return mpi


@pytest.fixture(scope="module")
def host_of(ranks):
    """The host of each rank."""
    return ranks.allgather_object(socket.gethostname())


def counts(verb, size):
    """Elements of float32, a multiple of the ranks: small, and on both sides of each crossover between nodes."""
    limits = {choice.max_bytes for choice in crossovers(verb) if choice.max_bytes <= MOST_BYTES}
    wanted = [4, 20_004] + [int(limit) + more for limit in limits for more in (-4 * size, 0, 4 * size)]
    return sorted({max(1, num_bytes // 4 // size) * size for num_bytes in wanted})


def crossovers(verb):
    keys = [key for key in selector.selector._rows if key[:2] == (verb, "nodes") and key.device == "cpu"]
    return [choice for key in keys for choice in selector.selector._rows[key]]


def expected(verb, inputs, me, root):
    """What the rank ``me`` has to get; None where the result is another rank's alone."""
    size, count = len(inputs), inputs[0].numel()
    part, reduced = slice(me * count // size, (me + 1) * count // size), total(size, count)
    return {
        **{"allreduce": reduced, "reduce": reduced if me == root else inputs[me], "reduce_scatter": reduced[part]},
        **{"allgather": torch.cat(inputs), "gather": torch.cat(inputs) if me == root else None},
        **{"broadcast": inputs[root], "scatter": inputs[root][part]},
        "alltoall": torch.cat([x[part] for x in inputs]),
    }[verb]


@pytest.mark.parametrize("flavour", [None, *FLAVOURS])
@pytest.mark.parametrize("verb", VERBS)
def test_verbs(ranks, verb, flavour):
    """Blocking and asynchronous, in ordinary memory and in memory that the ranks of a node share."""
    me, size = ranks.rank(), ranks.size()
    rows = {(row.verb, row.flavour): row.status for row in ranks.availability() if row.device == "cpu"}
    if flavour and rows[verb, flavour] != "available":
        pytest.skip(f"{flavour}: {rows[verb, flavour]}")
    for number, count in enumerate(counts(verb, size)):
        inputs = [values(rank, count) for rank in range(size)]
        root = (number * 2 + 1) % size
        wanted = expected(verb, inputs, me, root)
        for form in ("", "_async"):
            for make in (torch.empty, ranks.symmetric_empty):
                x = make(count).copy_(inputs[me])
                arguments = (x, root) if verb in ROOTED else (x,)
                result = getattr(ranks, verb + form)(*arguments, flavour=flavour)
                result = result.wait() if form else result
                if wanted is None:
                    assert result is None or me == root
                else:
                    assert torch.equal(result, wanted), f"{verb}{form} of {count}, {make.__name__}, root {root}"


def test_places_numbers_and_objects(ranks, host_of):
    """The node of a rank is its host, and no other."""
    me, size = ranks.rank(), ranks.size()
    mine = [rank for rank, host in enumerate(host_of) if host == host_of[me]]
    assert ranks.num_nodes() == len(set(host_of))
    assert (ranks.local_size(), ranks.local_rank()) == (len(mine), mine.index(me))
    with ranks.at(1):  # the default level: a group for each node
        assert ranks.allgather(me) == mine
    assert ranks.allreduce(me + 1) == size * (size + 1) // 2
    assert ranks.allgather(me * me) == [rank * rank for rank in range(size)]
    given = {"host": host_of[me], "rank": me}
    assert ranks.broadcast_object(given, size - 1) == {"host": host_of[-1], "rank": size - 1}


def test_splits_and_spans(ranks, host_of):
    me, size = ranks.rank(), ranks.size()
    with ranks.split(me % 2, key=-me) as comm:
        members = list(range(me % 2, size, 2))[::-1]
        assert comm.num_nodes == len({host_of[rank] for rank in members})
        expected_sum = sum(values(rank, 70_001) for rank in members)
        assert torch.equal(ranks.allreduce(values(me, 70_001), comm=comm), expected_sum)
        assert torch.equal(ranks.broadcast(values(me, 9), len(members) - 1, comm=comm), values(members[-1], 9))
    crossing = ranks.push_communicator(me % 2)  # groups that do not follow the hosts
    ranks.set_collective_span(0, crossing)
    assert torch.equal(ranks.allreduce(values(me, 300_001), flavour="hierarchical"), total(size, 300_001))
    ranks.set_collective_span(0, 1)


def test_symmetric_memory_is_a_nodes(ranks, host_of):
    """The flavour of shared memory is refused across hosts; tensors from there are ordinary ones to the others."""
    me, size = ranks.rank(), ranks.size()
    wide = ranks.symmetric_empty(5000).copy_(values(me, 5000))
    with pytest.raises(errors.Unavailable, match=f"span {len(set(host_of))} nodes"):
        ranks.allreduce(wide, flavour="shared")
    with ranks.at(1):
        near = ranks.symmetric_empty(5000)
    of_host = sum(values(rank, 5000) for rank in range(size) if host_of[rank] == host_of[me])
    for flavour in (None, "mpi", "ring", "hierarchical"):
        for x in (wide, near):
            assert torch.equal(ranks.allreduce(x.copy_(values(me, 5000)), flavour=flavour), total(size, 5000))
        with ranks.at(1):
            assert torch.equal(ranks.allreduce(near.copy_(values(me, 5000))), of_host)
    x = near.copy_(values(me, 5000)) if me == 0 else values(me, 5000)  # symmetric on some ranks only
    assert torch.equal(ranks.allreduce(x), total(size, 5000))


def network():
    return perceptron(20, 700, 3, dtype=torch.float64)


def samples():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(240, 20, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))


def trained_alone(size, epochs):
    """What one process makes of the batches that all ranks had together."""
    from torchmpi_py.engine import DatasetIterator

    net, data = network(), samples()
    order = DatasetIterator(data, 10, seed=5, rank=0, size=1).order
    for epoch in range(epochs):
        indices = order(epoch)
        taught(net, [data[indices[begin : begin + 10 * size]] for begin in range(0, len(data), 10 * size)])
    return net


def check_alike(ranks, net, size, epochs):
    for mine, alone in zip(net.parameters(), trained_alone(size, epochs).parameters(), strict=True):
        torch.testing.assert_close(mine, alone, rtol=0, atol=1e-9)
    ranks.nn.check_with_allreduce(net)


def trained(folder=None, epochs=2, asynchronous=True):
    from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator, checkpoint

    checkpoint.completed.clear()  # as if in a process of its own
    options = {} if folder is None else {"extensions": [Checkpoint(folder)]}
    net, engine = network(), AllReduceSGDEngine(asynchronous=asynchronous)
    criterion, batches = torch.nn.CrossEntropyLoss(), DatasetIterator(samples(), 10, seed=5)
    engine.train(network=net, criterion=criterion, iterator=batches, lr=0.1, maxepoch=epochs, **options)
    return net


def test_checkpoints_in_a_folder_that_only_the_host_of_rank_0_has(ranks):
    folder = Path(ranks.broadcast_object(f"/tmp/of-one-host-{os.getuid()}-{os.getppid()}"))
    trained(folder, epochs=1, asynchronous=False)
    check_alike(ranks, trained(folder, epochs=2), ranks.size(), 2)
    assert folder.exists() or ranks.rank() > 0


def taught(model, batches):
    """The model after a step with each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model
