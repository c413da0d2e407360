"""Trouble with rules, and with shards on another node and the service there."""

import dataclasses
import pickle
import threading
import time

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.core import config
from torchmpi_py.errors import ParameterServerError
from torchmpi_py.paramserver.remote import BYTES_TAG, HEADER_TAG, Kind, ShardRequest
from torchmpi_py.paramserver.service import ShardExchange

pytestmark = pytest.mark.mpi(min_size=2)


class Odd(Exception):
    """One that cannot be pickled."""

    def __init__(self, a, b):
        super().__init__("odd")


class Unreadable:
    """Leaves one process, and can be read in no other."""

    def __reduce__(self):
        return time.no_such_function, ()  # pickled by name


@pytest.mark.mpi
@pytest.mark.parametrize("count", [3, 30_000])  # of a shard: within a message, and in pieces
def test_a_rule_that_fails_in_a_shard_among_requests_that_are_queued(mpi, comm, count):
    """Each handle has its own outcome, also SystemExit; what did not fail has been done, in order."""
    errors = {7: LookupError(f"seven of {count}"), 8: SystemExit("enough"), 9: Odd(1, 2)}

    def touchy(shard, payload):
        if payload[0].item() in errors:
            raise errors[payload[0].item()]
        shard.mul_(2).add_(payload)

    ps.register_rule("touchy", touchy)
    size = mpi.size()
    server = ps.init(torch.zeros(count * size, dtype=torch.float64), comm=comm)
    if mpi.rank() == 0:
        fragile = slice(count, 2 * count) if size > 1 else slice(count)  # the shard of rank 1
        right, sends, receives = torch.zeros(count * size, dtype=torch.float64), [], []
        for number in (1, 7, 2, 8, 9, 3):
            x = torch.arange(count * size, dtype=torch.float64) % count
            x[fragile] += number
            sends.append((number, server.send(x, "touchy")))
            before, right = right, 2 * right + x
            if number in errors:
                right[fragile] = before[fragile]
            receives.append((server.receive(), right))
        for number, send in sends:
            if number in errors:
                with pytest.raises((LookupError, SystemExit, Odd, ParameterServerError), match=r"seven of|enough|odd"):
                    send.wait()
            else:
                send.wait()
        assert all(torch.equal(receive.wait(), expected) for receive, expected in receives)


def test_what_cannot_be_read_on_another_node(mpi, nodes):
    """A rule that is registered on rank 0 alone, and an option; the shard of rank 0 has taken the send."""
    if mpi.rank() == 0:
        ps.register_rule("rank 0's alone", lambda shard, payload: shard.add_(payload))
    ps.register_rule("with option", lambda shard, payload, what=None: shard.add_(payload))
    size = mpi.size()
    server = ps.init(torch.zeros(size), comm=nodes)
    if mpi.rank() == 0:
        with pytest.raises(ValueError, match='rule "rank 0\'s alone" is unknown'):
            server.send(torch.ones(size), "rank 0's alone").wait()
        with pytest.raises(Exception, match="no_such_function"):
            server.send(torch.ones(size), "with option", what=Unreadable()).wait()
        server.send(torch.ones(size), "with option", what=1).wait()
        assert server.receive().wait()[1:].tolist() == [1.0] * (size - 1)


@pytest.mark.mpi
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


def test_a_request_to_one_server_tells_that_another_has_what_was_sent_before(mpi, nodes):
    """Rank 0 sends to all shards of a server, then to a flag in its own shard of another one; nobody waits."""
    size, count, turns = mpi.size(), 20_000, 20
    data, flag = ps.init(torch.zeros(count * size), comm=nodes), ps.init(torch.zeros(size), comm=nodes)
    if mpi.rank() == 0:
        ticks = torch.zeros(size)
        ticks[0] = 1
        for _ in range(turns):
            data.send(torch.ones(count * size))
            flag.send(ticks)
    else:
        seen = 0
        while seen < turns:
            seen = int(flag.receive().wait()[0])
            assert (data.receive().wait() >= seen).all()
    mpi.barrier()


def test_more_payloads_on_their_way_than_the_service_takes_at_a_time(mpi, nodes):
    servers = [ps.init(torch.zeros(100_000, dtype=torch.int64), comm=nodes) for _ in range(3)]
    for _ in range(5):
        for server in servers:
            server.send(torch.arange(100_000) * (mpi.rank() + 1))
    mpi.wait_all([server.receive() for server in servers])
    mpi.barrier()
    expected = torch.arange(100_000) * 5 * (mpi.size() * (mpi.size() + 1) // 2)
    assert all(torch.equal(server.receive().wait(), expected) for server in servers)
    ps.free_all()
    assert "parameter-serv" not in " ".join(thread.name for thread in threading.enumerate())


def test_who_comes_early_to_free_sleeps_and_serves(mpi, nodes):
    """A rank that waits in free still serves, at less than half a processor."""
    server = ps.init(torch.zeros(10), comm=nodes)
    begin, used = time.monotonic(), time.process_time()
    if mpi.rank() == 0:
        for _ in range(15):
            server.send(torch.ones(10)).wait()
            time.sleep(0.02)
        assert (server.receive().wait() == 15).all()
    server.free()
    if mpi.rank() == 1:
        assert time.process_time() - used < 0.5 * (time.monotonic() - begin)


@pytest.mark.mpi(min_size=3)
def test_a_read_does_not_wait_for_a_payload_that_does_not_come(mpi, nodes):
    """Rank 1 announces six sends, and holds their bytes back until the others have read."""
    count = 10_000  # of a shard: more than a message takes along
    server = ps.init(torch.zeros(count * mpi.size()), comm=nodes)
    if mpi.rank() == 1:
        links = nodes.direct.keep(ShardExchange, ShardExchange).links
        request = ShardRequest(0, 0, int(Kind.APPLY), 4 * count, pickle.dumps(("add", {})))  # the first server is 0
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
