"""``benchmarks/parameter_server.py``: every rule at every number of clients, and a server with wrong values."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.bench import UsageError, WrongValue
from torchmpi_py.core import communicators
from torchmpi_py.core.channels import Place
from torchmpi_py.paramserver import shard

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # programs, not a package
try:
    parameter_server = importlib.import_module("parameter_server")
    wire_messages = importlib.import_module("wire_messages")
finally:
    del sys.path[0]
RULES = parameter_server.RULES
pytestmark = pytest.mark.timeout(240)
QUICK = ["--sizes", "4,20K", "--seconds", "0.001", "--idle-seconds", "0.05"]


def run(*words):
    from mpi4py import MPI

    parameter_server.measure(MPI.COMM_WORLD, parameter_server.parse([*QUICK, *words]))


@pytest.mark.mpi
def test_every_number_of_clients(mpi, capsys, tmp_path):
    file = tmp_path / "ps.json"
    run("--rules", "add,copy", "--json", str(file))
    if mpi.rank() == 0:
        assert capsys.readouterr().out.count("\n|") == 2 + 2 * 3 * mpi.size()
        stored = json.loads(file.read_text())
        whats = [(row["num_bytes"], row["num_clients"], row["what"]) for row in stored["rows"]]
        assert whats == [
            (size, clients, what)
            for size in (4, 20 << 10)
            for clients in range(1, mpi.size() + 1)
            for what in ("send add", "send copy", "receive")
        ]
        assert (stored["idle_percent"] is None) == (mpi.size() == 1)


@pytest.mark.mpi
def test_requests_that_are_queued(mpi, tmp_path):
    """Each counts once; times are of one of them."""
    file = tmp_path / "ps.json"
    run("--rules", "add", "--queued", "7", "--json", str(file))
    if mpi.rank() == 0:
        rows = json.loads(file.read_text())["rows"]
        assert {(row["num_queued"], row["wire_median_seconds"] is None) for row in rows} == {(7, mpi.num_nodes() == 1)}


@pytest.mark.mpi
def test_plain_messages_as_if_between_nodes(mpi, monkeypatch):
    """Even ranks are on one node, odd ones on another; what arrives is what the shards' nodes and clients have sent."""
    from mpi4py import MPI

    world = communicators.communicator(0).direct
    monkeypatch.setattr(world, "places", tuple(Place(rank % 2, rank // 2) for rank in range(mpi.size())))
    bounds = shard.shards(1021, mpi.size())
    seen = []
    planned = wire_messages._planned

    def spy(*arguments):
        seen.extend(planned(*arguments))
        return list(seen)

    monkeypatch.setattr(wire_messages, "_planned", spy)
    for has_payload, is_receive in ((True, False), (False, True), (False, False)):
        seconds = wire_messages.median_seconds(
            MPI.COMM_WORLD, bounds, mpi.size(), has_payload, is_receive, seconds=0.001
        )
        assert (seconds is None) == (mpi.size() == 1)
        sizes = [4 * sum(end - begin for begin, end in bounds[node::2]) for node in (0, 1)]
        right = [(client, 1 - client % 2) for client in range(mpi.size()) if mpi.rank() in (client, 1 - client % 2)]
        if mpi.size() > 1:
            both = [(c, n, sizes[n] if has_payload else 1, sizes[n] if is_receive else 1) for c, n in right]
            assert [message for message in seen if mpi.rank() in message[:2]] == both
        seen.clear()


@pytest.mark.slow
@pytest.mark.mpi
def test_every_rule(mpi):
    if mpi.size() != 2:
        pytest.skip("the first use of an optimizer imports for seconds a rank; two ranks show as much")
    run("--rules", ",".join(RULES), "--sizes", "20K")


def fails_on_the_last_rank(mpi, monkeypatch, method, wrong):
    if mpi.rank() == mpi.size() - 1:
        monkeypatch.setattr(ps.ParameterServer, method, wrong)
    with pytest.raises(WrongValue, match=r"^parameter server, .* of \d+ bytes by .* clients: rank \d got .* is right$"):
        run("--rules", "add", "--clients", str(mpi.size()))


@pytest.mark.mpi
def test_a_send_that_counts_twice_is_found_by_all(mpi, monkeypatch):
    send = ps.ParameterServer.send

    def twice(server, tensor, *args, **options):
        send(server, tensor, *args, **options)
        return send(server, tensor, *args, **options)

    fails_on_the_last_rank(mpi, monkeypatch, "send", twice)


@pytest.mark.mpi
def test_a_wrong_element_is_found_by_all(mpi, monkeypatch):
    receive = ps.ParameterServer.receive

    def wrong(server, tensor):
        handle = receive(server, tensor)
        handle.wait()[-1] += 1
        return handle

    fails_on_the_last_rank(mpi, monkeypatch, "receive", wrong)


@pytest.mark.mpi
def test_more_clients_than_ranks(mpi):
    with pytest.raises(UsageError, match=f"--clients 99: there are {mpi.size()} ranks"):
        run("--clients", "1,99")


@pytest.mark.parametrize("name", RULES)
def test_what_is_done_locally_is_the_rule(name):
    """On values of which the rule's own function, on one shard, makes the same."""
    from torchmpi_py.paramserver import rules

    rule, known = RULES[name], rules.named("test", name)
    here, there = torch.zeros(parameter_server.PERIOD), torch.zeros(parameter_server.PERIOD)
    memory = rules.Memory([torch.zeros_like(there) for _ in range(known.num_slots)], torch.zeros(()).double())
    take = rule.local(here)
    for turn in range(3):
        payload = parameter_server.pattern(turn)
        take(payload)
        known.fn(there, payload, *([memory] if known.memory else []), **rule.options)
    torch.testing.assert_close(here, there, rtol=rule.tolerance, atol=0)


def test_mistakes():
    for words, message in (("--rules add,foo", "'foo'.*known rules: zero, copy"), ("--clients 0", "'0' is not")):
        with pytest.raises(UsageError, match=message):
            parameter_server.parse(words.split())
