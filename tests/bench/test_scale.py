"""The programs of ``benchmarks/scale``: the simulator runs the flavours as they are, and the model is fitted."""

import json
import sys
from pathlib import Path

import pytest
import torch

from torchmpi_py.bench import wire
from torchmpi_py.bench.cases import VERBS

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale"
HOSTS = ([1, 1], [1, 1, 1], [2, 2], [3, 1], [2, 1, 2])
OF_HIERARCHICAL = ("allreduce", "broadcast", "reduce", "allgather")
KiB = 1 << 10


@pytest.fixture
def module(monkeypatch):
    """The import of a module of the programs, which are no package."""
    mpi4py = pytest.importorskip("mpi4py")
    monkeypatch.setattr(mpi4py.rc, "initialize", mpi4py.rc.initialize)  # the simulator needs no MPI
    monkeypatch.syspath_prepend(SCALE)
    yield __import__
    for name in ("engine", "fit", "model", "simulator"):
        sys.modules.pop(name, None)


def expected(verb, rank, inputs):
    """The right result of a rank, None where it has none."""
    size = len(inputs)
    return {
        "allreduce": lambda: sum(inputs),
        "broadcast": lambda: inputs[0],
        "reduce": lambda: sum(inputs) if rank == 0 else inputs[rank],
        "allgather": lambda: torch.cat(inputs),
        "reduce_scatter": lambda: sum(inputs).chunk(size)[rank],
        "alltoall": lambda: torch.cat([x.chunk(size)[rank] for x in inputs]),
        "gather": lambda: torch.cat(inputs) if rank == 0 else None,
        "scatter": lambda: inputs[0].chunk(size)[rank],
    }[verb]()


@pytest.mark.parametrize(
    ("flavour", "verb", "hosts"),
    [("ring", verb, HOSTS[number % 5]) for number, verb in enumerate(VERBS)]
    + [("hierarchical", verb, HOSTS[2 + number % 3]) for number, verb in enumerate(OF_HIERARCHICAL)],
    ids=str,
)
def test_simulated_ranks_get_the_right_values(module, flavour, verb, hosts):
    simulator, size = module("simulator"), sum(hosts)
    num_bytes = 60 * size * 12_000  # several chunks and rounds
    outcome = simulator.simulate(flavour, verb, num_bytes, hosts, simulator.Machine(), values=True)
    inputs = [simulator._inputs(verb, num_bytes, rank, size)[0] for rank in range(size)]
    for rank in range(size):
        right = expected(verb, rank, inputs)
        assert right is None or torch.equal(outcome.results[rank], right), rank
    if verb == "allreduce":  # the time is the same without values
        assert simulator.simulate(flavour, verb, num_bytes, hosts, simulator.Machine()).seconds == outcome.seconds
    floor = wire.floor_bytes(verb, num_bytes, hosts)
    assert outcome.seconds >= floor / simulator.Machine().link_bytes_per_second
    if flavour == "ring":
        outcome = simulator.simulate(flavour, verb, 3 * 60 * 12_000, [1] * 3, simulator.Machine())
        floor = wire.floor_bytes(verb, 3 * 60 * 12_000, [1] * 3)
    if verb != "gather":  # whose root receives the most
        assert max(outcome.sent_bytes.values()) == pytest.approx(floor, rel=0.01)


def machine_of(engine, **changed):
    return engine.Machine(**{"latency_seconds": 0.5, "message_seconds": 0.0, "link_bytes_per_second": 1000.0} | changed)


def run(engine, host_of, program, **changed):
    simulation = engine.Simulation(host_of, machine_of(engine, **changed), carries_values=True)
    simulation.run(program)
    return simulation


def test_the_time_of_messages(module):
    """1000 bytes take a second, and half a second of latency; a long message has asked for consent before."""
    engine = module("engine")

    def one_way(comm):
        if comm.rank == 0:
            comm.Isend([b"x" * 1000, None], 1).Wait()
        else:
            buffer = bytearray(1000)
            comm.Irecv([buffer, None], 0).Wait()
            assert buffer == b"x" * 1000

    assert run(engine, [0, 1], one_way, eager_bytes=1000).now == [0.0, 1.5]
    assert run(engine, [0, 1], one_way, eager_bytes=999).now == [2.0, 2.5]
    inside = run(engine, [0, 0], one_way, memory_bytes_per_second=10_000.0, memory_latency_seconds=0.25)
    assert inside.now == [0.0, 0.35]


def test_links_are_shared_in_one_direction_and_not_in_both(module):
    engine = module("engine")

    def to_one(comm):  # ranks 1 and 2 send to rank 0, which sends to rank 1
        if comm.rank == 0:
            requests = [comm.Irecv([bytearray(1000), None], source) for source in (1, 2)]
            requests[0].Waitall([*requests, comm.Isend([bytes(1000), None], 1)])
        else:
            requests = [comm.Isend([bytes(1000), None], 0)]
            requests += [comm.Irecv([bytearray(1000), None], 0)] if comm.rank == 1 else []
            requests[0].Waitall(requests)

    assert run(engine, [0, 1, 2], to_one, eager_bytes=1000).now == [2.5, 1.5, 0.0]
    assert run(engine, [0, 1, 1], to_one, eager_bytes=1000).now == [2.5, 1.5, 0.0]


def test_a_deadlock_and_an_error_of_a_rank_go_through(module):
    engine = module("engine")

    def program(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("here")
        comm.Barrier()

    with pytest.raises(engine.DeadlockError, match="2 ranks wait"):
        run(engine, [0, 1], lambda comm: comm.Irecv([bytearray(1), None], 1 - comm.rank).Wait())
    with pytest.raises(ZeroDivisionError, match="here"):
        run(engine, [0, 1], program)


def test_the_fit_finds_the_parameters_of_times_that_follow_the_model(module, tmp_path):
    fit, model = module("fit"), module("model")
    truth, rate = model.Parameters(3e-4, 2e-3, 0.8, 1.5e9), 125e6
    rows = []
    for hosts in ([1, 1], [1] * 3, [1] * 4, [2, 2]):
        for verb in ("allreduce", "broadcast", "reduce_scatter", "alltoall"):
            for num_bytes in (4 * KiB, 64 * KiB, 1024 * KiB, 16384 * KiB):
                ways = model.costs("ring", verb, num_bytes, hosts)
                seconds = truth.seconds(ways, rate, is_crowded=sum(hosts) > 2)
                row = {"hosts": hosts, "verb": verb, "what": "ring", "num_bytes": num_bytes, "median_seconds": seconds}
                rows.append(row)
    (tmp_path / "r.json").write_text(json.dumps({"facts": {"rate": "1gbit", "cores": 2}, "rows": rows}))
    found = fit.fit(fit.load([tmp_path / "r.json"]), "ring")
    assert found.alpha == pytest.approx(truth.alpha, rel=0.1)
    assert found.crowded == pytest.approx(truth.crowded, rel=0.1)
    assert found.share == pytest.approx(truth.share, rel=0.1)


@pytest.mark.parametrize("verb", OF_HIERARCHICAL)
def test_no_way_of_the_model_sends_less_than_the_floor(module, verb):
    costs = module("model").costs
    for flavour in ("mpi", "ring", "hierarchical", "gloo"):
        for hosts in ([1, 1], [1] * 5, [4] * 3, [8] * 128):
            for num_bytes in (64 * KiB, 32768 * KiB):
                floor = wire.floor_bytes(verb, num_bytes, hosts)
                assert all(way.link_bytes >= 0.999 * floor for way in costs(flavour, verb, num_bytes, hosts)), flavour
