"""What tests of flavours ask of the machine, and what they see of the flavours that are chosen."""

import functools

import pytest

from torchmpi_py.collectives import registry, selector as selector_module
from torchmpi_py.collectives.flavours import ring
from torchmpi_py.collectives.plan import Carrier


@pytest.fixture
def one_node(mpi):
    """Skips the test where ranks are on several nodes: they have no memory in common, other flavours serve them."""
    if mpi.num_nodes() > 1:
        pytest.skip("this is so on one node alone")


@pytest.fixture
def posted(monkeypatch):
    """Bytes of each step of flavour ring on this rank: (sent, received)."""
    lengths, post = [], ring.post

    def noted(comm, step, given, received):
        lengths.append((len(given), len(received)))
        return post(comm, step, given, received)

    monkeypatch.setattr(ring, "post", noted)
    return lengths


@pytest.fixture
def asked(monkeypatch):
    """The flavours that carry out allreduce from now on, in order."""
    log = []
    for flavour in registry.FLAVOURS:

        def allreduce(channel, *args, name=flavour.name, real=flavour.allreduce):
            log.append(name)
            return real(channel, *args)

        monkeypatch.setattr(flavour, "allreduce", allreduce)
        monkeypatch.setattr(flavour, "bind", functools.partial(Carrier.bind, flavour))
    selector_module.selector.generation += 1  # plans made before are used no more
    yield log
    selector_module.selector.generation += 1
