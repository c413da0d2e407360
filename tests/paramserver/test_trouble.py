"""What goes wrong stays with who asked for it: odd rules, options, modes, sizes; on one node and as if on two."""

import dataclasses
import pickle
import time

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.core import backoff, communicators, config
from torchmpi_py.core.channels import Place
from torchmpi_py.errors import CommunicatorError, ParameterServerError, RanksDisagree
from torchmpi_py.paramserver.remote import BYTES_TAG, HEADER_TAG, Kind, ShardRequest
from torchmpi_py.paramserver.service import ShardExchange

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Unreadable:
    """Leaves one process, and can be read in no other."""

    def __reduce__(self):
        return time.no_such_function, ()  # pickled by name


def test_a_rule_that_ends_the_program_is_an_error(mpi, comm):
    """SystemExit in a rule, here or on another node, and what is asked after it is as if nothing had been."""

    def leave(shard, payload):
        raise SystemExit("enough")

    ps.register_rule("leave", leave)
    size = mpi.size()
    server = ps.init(torch.zeros(3 * size), comm=comm)
    if mpi.rank() == 0:
        for turn in range(3):
            with pytest.raises((SystemExit, ParameterServerError), match="enough"):
                server.send(torch.zeros(3 * size), "leave").wait()
            server.send(torch.ones(3 * size)).wait()
            assert (server.receive().wait() == turn + 1).all()
    server.free()


@pytest.mark.mpi(min_size=2)
def test_options_that_cannot_be_read_there(mpi, comm):
    ps.register_rule("with option", lambda shard, payload, what=None: shard.add_(1))
    server = ps.init(torch.zeros(mpi.size()), comm=comm)
    if mpi.rank() == 0 and comm.num_nodes > 1:
        with pytest.raises(Exception, match="no_such_function"):
            server.send(torch.zeros(mpi.size()), "with option", what=Unreadable()).wait()
        server.send(torch.zeros(mpi.size()), "with option", what=1).wait()
    server.free()


def test_messages_in_pieces(mpi, comm, monkeypatch):
    small = dataclasses.replace(config.current, message_bytes=1000, native_async_bytes=0)
    monkeypatch.setattr(config, "current", small)
    count = 3001 * mpi.size()
    start = torch.arange(float(count))
    server = ps.init(start, comm=comm, optimizer="adam")
    if mpi.rank() == mpi.size() - 1:
        server.send(torch.ones(count), "copy").wait()
        server.send(start).wait()
        assert torch.equal(server.receive().wait(), start + 1)
        server.load_state_dict(server.state_dict())
        assert torch.equal(server.receive().wait(), start + 1)
    server.free()


def test_modes_of_autograd(mpi, comm):
    """A server made and used in inference mode is as any other; options with a gradient leave no graph."""
    with torch.inference_mode():
        server = ps.init(torch.zeros(2 * mpi.size()), comm=comm)
        server.send(torch.ones(2 * mpi.size())).wait()
        server.receive().wait()
    if mpi.rank() == 0:
        weight = torch.tensor(0.5, requires_grad=True)
        server.send(torch.zeros(2 * mpi.size(), requires_grad=True), "elastic", weight=weight).wait()
    mpi.barrier()
    got = server.receive().wait()
    assert not got.requires_grad
    got += 1
    assert not any(x.requires_grad for x in [server.state_dict()["values"]])
    server.free()


def test_a_mean_that_was_taken_in_begins_anew(mpi, comm):
    size = mpi.size()
    total, means = ps.init(torch.zeros(size), comm=comm), ps.init(torch.zeros(size), comm=comm)
    for _ in range(3):
        means.send(torch.full((size,), 6.0), "average").wait()
        mpi.barrier()
        total.take_in(means).wait()
        mpi.barrier()
    assert (total.receive().wait() == 18).all()
    ps.free_all()


def test_what_only_some_ranks_know(mpi):
    """An optimizer that is registered on one rank, or with other slots, is an error on all."""
    if mpi.size() == 1:
        return
    if mpi.rank() == 0:
        ps.register_rule("rank 0's", lambda *_: None, num_slots=1)
    with pytest.raises((ValueError, RanksDisagree), match=r'unknown|for "rank 0\'s" of 1 slots, rank 1: .* is unknown'):
        ps.init(torch.zeros(5), optimizer="rank 0's")
    ps.register_rule("of both", lambda *_: None, num_slots=1 + mpi.rank() % 2)
    with pytest.raises(RanksDisagree, match=r"'of both' of 1 slots, rank 1: .* of 2 slots"):
        ps.init(torch.zeros(5), optimizer="of both")
    with pytest.raises((TypeError, RanksDisagree), match="must be a torch"):
        ps.init(torch.zeros(5) if mpi.rank() else [0.0] * 5)


def test_a_failed_send_of_a_list_is_forgotten_by_the_next(mpi):
    """And no part of a list is sent unless all of it can be."""

    def once(shard, payload):
        raise LookupError("once")

    ps.register_rule("once", once)
    with mpi.split(mpi.rank()) as alone:
        floats, whole = torch.zeros(3), torch.zeros(2, dtype=torch.int64)
        served = ps.init_tensors([floats, whole], comm=alone)
        ones = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
        for handle in ps.send_tensors(served, ones, "once"):
            with pytest.raises(LookupError):
                handle.wait()
        mpi.wait_all(ps.send_tensors(served, ones))
        with pytest.raises(ValueError, match="needs floating-point"):
            ps.send_tensors(served, ones, "elastic", weight=0.5)
        for wrong in ([torch.ones(1), ones[1]], [ones[0].double(), ones[1]]):
            with pytest.raises(ValueError, match="update 0 has shape"):
                ps.send_tensors(served, wrong)
        ps.integrate_tensors(served, lambda fetched, x: x.copy_(fetched))
        assert floats.tolist() == [1, 1, 1]
        assert whole.tolist() == [1, 1]
        state = served.state_dict()
        other = ps.init_tensors([torch.zeros(2, dtype=torch.int64), torch.zeros(3)], comm=alone)
        with pytest.raises(ValueError, match=r"saved from tensors of shapes \[\[3\], \[2\]\]"):
            other.load_state_dict(state)
        ps.free_all()


def test_nobody_sees_a_shard_half_changed_by_a_slow_rule(mpi, comm):
    def in_two_steps(shard, payload):
        shard[: len(shard) // 2] += 1
        time.sleep(0.01)
        shard[len(shard) // 2 :] += 1

    ps.register_rule("in two steps", in_two_steps)
    server = ps.init(torch.zeros(10 * mpi.size()), comm=comm)
    for _ in range(3):
        server.send(torch.zeros(10 * mpi.size()), "in two steps")
        got = server.receive().wait()
        assert all((got[begin:end] == got[begin]).all() for begin, end in server.bounds)
    server.free()


@pytest.mark.mpi(min_size=3)
def test_a_read_does_not_wait_for_a_payload_that_does_not_come(mpi):
    """Rank 1 announces six sends, and holds their bytes back until the others have read."""
    world = communicators.communicator(0).direct.mpi
    with communicators.Communicator(world.Dup(), Place(world.rank, 0), "nodes of one rank") as nodes:
        count = 10_000  # of a shard: more than a message takes along
        server = ps.init(torch.zeros(count * mpi.size()), comm=nodes)
        if mpi.rank() == 1:
            links = nodes.direct.keep(ShardExchange, ShardExchange).links
            rule = pickle.dumps(("add", {}))
            request = ShardRequest(0, 0, int(Kind.APPLY), 4 * count, rule)  # the communicator's first server is 0
            for _ in range(6):
                links.requests.send(tuple(request), 0, HEADER_TAG)
        mpi.barrier()
        if mpi.rank() != 1:
            assert not server.receive().wait(60).any()
        mpi.barrier()
        if mpi.rank() == 1:
            for turn in range(6):
                payload = torch.arange(float(count)) + turn
                links.requests.Send(payload.numpy().view("uint8"), 0, BYTES_TAG)
            answers = [links.replies.recv(source=0, tag=HEADER_TAG) for _ in range(6)]
            assert answers == 6 * [(None, None)]
        mpi.barrier()
        assert torch.equal(server.receive().wait()[:count], 6 * torch.arange(float(count)) + 15)
        server.free()


@pytest.mark.mpi(min_size=2)
def test_lists_that_differ(mpi):
    """As many elements, in another order: nobody gets numbers of another tensor."""
    shapes = [2, 4] if mpi.rank() == 1 else [4, 2]
    with pytest.raises(RanksDisagree, match=r"tensor 0 is \[[24]\] torch.float32 on cpu on rank \d, and \[[24]\]"):
        ps.init_tensors([torch.zeros(n) for n in shapes])


@pytest.mark.mpi(min_size=2)
def test_servers_that_are_freed_in_another_order(mpi, comm):
    """None is freed, and the memory and the service of all go with the communicator, or with the next ``free``."""
    servers = [ps.init(torch.zeros(mpi.size()), comm=comm) for _ in range(2)]
    turned = servers if mpi.rank() else servers[::-1]
    for server in turned:
        with pytest.raises(RanksDisagree, match="free different parameter servers"):
            server.free()
    for server in servers:
        server.send(torch.ones(mpi.size())).wait()
    mpi.barrier()
    assert all((server.receive().wait() == mpi.size()).all() for server in servers)
    mpi.barrier()
    servers[0].free()
    with pytest.raises(ParameterServerError, match="was freed"):
        servers[0].receive()


@pytest.mark.mpi(min_size=2)
def test_a_free_that_breaks_off(mpi, comm, monkeypatch):
    """By a signal's handler, say: the communicator gives memory and service back, and other servers are freed."""
    lost, other = ps.init(torch.zeros(5), comm=comm), ps.init(torch.zeros(5))

    def interrupted(request, *_):
        request.Wait()  # all ranks are here, and MPI is done with the memory
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backoff, "complete", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lost.free()
    with pytest.raises(CommunicatorError, match="an earlier call"):
        lost.free()
    comm.free()
    with pytest.raises(ParameterServerError, match="was freed, or lost"):
        lost.receive()
    ps.free_all()
    with pytest.raises(ParameterServerError, match="was freed"):
        other.receive()
