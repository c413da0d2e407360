"""``benchmarks/parameter_server.py``: every rule at every number of clients, and a server with wrong values."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from torchmpi_py import paramserver as ps
from torchmpi_py.bench import UsageError, WrongValue
from torchmpi_py.core.mpi_api import MPI

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # programs, not a package
try:
    parameter_server = importlib.import_module("parameter_server")
finally:
    del sys.path[0]
RULES = parameter_server.RULES
QUICK = ["--sizes", "4,20K", "--seconds", "0.001", "--idle-seconds", "0.05"]


def run(*words):
    parameter_server.measure(MPI.COMM_WORLD, parameter_server.parse([*QUICK, *words]))


@pytest.mark.mpi
def test_every_number_of_clients(mpi, capsys, tmp_path):
    """Queued requests count once each; times are of one of them."""
    file = tmp_path / "ps.json"
    run("--rules", "add,copy", "--queued", "3", "--json", str(file))
    if mpi.rank() == 0:
        assert capsys.readouterr().out.count("\n|") == 2 + 2 * 3 * mpi.size()
        stored = json.loads(file.read_text())
        assert [(row["num_bytes"], row["num_clients"], row["what"]) for row in stored["rows"]] == [
            (size, clients, what)
            for size in (4, 20 << 10)
            for clients in range(1, mpi.size() + 1)
            for what in ("send add", "send copy", "receive")
        ]
        queued = {(row["num_queued"], row["wire_median_seconds"] is None) for row in stored["rows"]}
        assert queued == {(3, mpi.num_nodes() == 1)}
        assert (stored["idle_percent"] is None) == (mpi.size() == 1)


@pytest.mark.mpi
@pytest.mark.parametrize("mistake", ["a send that counts twice", "a wrong element"])
def test_a_wrong_value_of_the_last_rank_is_found_by_all(mpi, monkeypatch, mistake):
    send, receive = ps.ParameterServer.send, ps.ParameterServer.receive

    def twice(server, tensor, *args, **options):
        send(server, tensor, *args, **options)
        return send(server, tensor, *args, **options)

    def wrong(server, tensor):
        handle = receive(server, tensor)
        handle.wait()[-1] += 1
        return handle

    if mpi.rank() == mpi.size() - 1:
        is_send = mistake.startswith("a send")
        monkeypatch.setattr(ps.ParameterServer, "send" if is_send else "receive", twice if is_send else wrong)
    with pytest.raises(WrongValue, match=r"^parameter server, .* of \d+ bytes by .* clients: rank \d got .* is right$"):
        run("--rules", "add", "--clients", str(mpi.size()))


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
    for words, message in (("--rules add,foo", "'foo'.*known rules: zero, copy"), ("--clients 0", "above 0, found")):
        with pytest.raises(UsageError, match=message):
            parameter_server.parse(words.split())
