"""The selector: what may be assigned, what is then chosen, and what it and ``availability`` say about it."""

import math
import types

import pytest
import torch

from torchmpi_py.collectives import registry, selector as selector_module
from torchmpi_py.collectives.selector import Choice, Key, Selector
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.errors import Unavailable, Unimplemented

pytestmark = pytest.mark.timeout(240)
in_a_job = pytest.mark.mpi
NAMES = [flavour.name for flavour in registry.FLAVOURS]
CPU = torch.device("cpu")


# The table by itself.


def test_assignment():
    table = Selector()
    table["alltoall"] = "ring"
    assert table["alltoall"] == [Choice(math.inf, "ring", "assigned")]
    table["gather", "nodes"] = [(100, "gloo"), (math.inf, "mpi")]
    assert table["gather", "nodes"] == [Choice(100, "gloo", "assigned"), Choice(math.inf, "mpi", "assigned")]
    assert [choice.flavour for choice in table["gather"]] == ["mpi"]
    table["gather", "node", True] = "shared"
    assert table["gather", "node", True] == [Choice(math.inf, "shared", "assigned")]
    assert table["gather", "node", False] == table["gather", "node"] == table["gather"]
    assert Key("gather", "nodes") in list(table)
    assert Selector()["alltoall"] != table["alltoall"]
    table.load({Key("scatter"): [Choice(math.inf, "ring", "planted")]}, "a file")
    assert list(table) == [Key("scatter")]
    assert table.source == "a file"


def test_bad_keys():
    table = Selector()
    of_allreduce = [("world",), (True,), ("node", 2), ("node", True, 2)]
    for key in ("all_reduce", (), *(("allreduce", *rest) for rest in of_allreduce)):
        with pytest.raises(KeyError, match=r"pass a collective \(broadcast, .*A scope \(node or nodes\)"):
            table[key] = "mpi"
        with pytest.raises(KeyError, match=r"whether the tensors are symmetric \(True or False\)"):
            table[key]


def test_bad_choices():
    table, inf = Selector(), math.inf
    before = table["allreduce"]
    wrong = ["udp", [], [(100, "mpi")], [(100, "mpi"), (inf, "udp")], [("ring", 100), (inf, "mpi")]]
    wrong += [[(inf, "mpi"), (100, "ring")], [(200, "mpi"), (100, "ring"), (inf, "mpi")]]  # not in rising order
    wrong += [5, [5], [(100, "ring", 3)], None]
    for choices in wrong:
        with pytest.raises(ValueError, match=r"expected a flavour, or .*math\.inf, .*; flavours: mpi, shared, ring"):
            table["allreduce"] = choices
        assert table["allreduce"] == before


def test_printing_says_why():
    table = Selector()
    table["alltoall"] = [(1000, "mpi"), (math.inf, "ring")]
    lines = str(table).splitlines()
    assert lines[0] == "source: built-in defaults"
    at = lines.index("alltoall on one node:")
    assert lines[at + 1].split() == ["to", "1000", "B", "mpi", "assigned"]
    assert lines[at + 2].split() == ["larger", "ring", "assigned"]
    assert "allreduce on one node, symmetric:" in lines
    assert "links between nodes" in lines[lines.index("allreduce on several nodes:") + 2]


def test_every_default_is_sound():
    table = Selector()
    for key in table:
        again = Selector()
        again[tuple(key)] = [(choice.max_bytes, choice.flavour) for choice in table[key]]
        assert all(registry.BY_NAME[choice.flavour].implements(key.verb) for choice in table[key])


# What is chosen.


@pytest.mark.parametrize(
    ("num_nodes", "usable", "ordinary", "symmetric"),
    [
        (1, "nccl cudaipc staged", "nccl nccl", "cudaipc cudaipc"),
        (1, "cudaipc staged mpi", "cudaipc cudaipc", "cudaipc cudaipc"),
        (1, "mpi", "mpi mpi", "mpi mpi"),
        (2, "nccl staged hierarchical", "nccl nccl", "nccl nccl"),
        (2, "staged hierarchical", "staged hierarchical", "staged hierarchical"),
        (2, "staged", "staged staged", "staged staged"),
    ],
)
def test_choices_on_gpus(monkeypatch, num_nodes, usable, ordinary, symmetric):
    """For 4 bytes and 64 MiB, given what is available."""
    says = {name: "available" if name in usable.split() else "no" for name in registry.BY_NAME}
    monkeypatch.setattr(selector_module, "status", lambda flavour, verb, device, comm: says[flavour.name])
    comm, table = types.SimpleNamespace(choices={}, num_nodes=num_nodes), Selector()

    def names(is_symmetric):
        choices = table.choices("allreduce", comm, torch.device("cuda", 0), symmetric=is_symmetric, name=None)
        return " ".join(choices.flavour_for(size).name for size in (4, 64 << 20))

    assert (names(False), names(True)) == (ordinary, symmetric)
    table["allreduce"] = "ring"  # does not serve GPU tensors: their choices stay
    assert names(False) == ordinary
    table["allreduce", "node", False, "cuda"] = table["allreduce", "nodes", False, "cuda"] = [(math.inf, "staged")]
    assert names(False) == ("staged staged" if "staged" in usable else ordinary)


def chosen(mpi, num_bytes, verb="allreduce", comm=None, symmetric=False):
    comm = comm or mpi.communicator(0)
    return mpi.selector.flavour_for(verb, comm, CPU, num_bytes, symmetric=symmetric, name=None).name


@in_a_job
def test_crossovers(mpi, selector, asked):
    selector["allreduce"] = [(400, "mpi"), (4000, "ring"), (math.inf, "gloo")]
    rows = [(0, "mpi"), (100, "mpi"), (101, "ring"), (1000, "ring"), (1001, "gloo"), (50_000, "gloo")]
    for count, name in [*rows, (100, "ring"), (100, "gloo")]:
        if (count, name) not in rows:  # an assignment counts at once, though an operation for that size is kept
            selector["allreduce"] = name
            assert [chosen(mpi, size) for size in (0, 1 << 40)] == [name, name]
        asked.clear()
        for _ in range(3):
            x = mpi.allreduce(torch.full((count,), mpi.rank() + 1.0))
            assert (x == sum(range(1, mpi.size() + 1))).all()
        assert set(asked) == {name}, count
        assert chosen(mpi, count * 4) == name


def test_defaults_begin_at_larger_sizes_where_a_meeting_takes_longer(monkeypatch):
    """With many nodes those of rings, with ranks that share cores those of memory; but not what a program assigns."""
    monkeypatch.setattr(selector_module, "status", lambda flavour, verb, device, comm: "available")
    monkeypatch.setattr(selector_module.caches, "last_level_cache_bytes", lambda: 32 << 20)

    def limits(*verbs):
        """Up to which sizes the first choices hold."""
        comm = types.SimpleNamespace(choices={}, num_nodes=num_nodes, size=size)
        return [table.choices(verb, comm, CPU, symmetric=False, name=None).limits[0] for verb in verbs]

    for num_nodes, grown in ((2, 1), (4, 1), (7, 2), (1024, 341)):
        table, size = Selector(), 2 * num_nodes
        assert limits("allreduce", "allgather", "broadcast") == [grown * (128 << 10), grown * (2 << 20), 128 << 10]
        once = selector_module.on_nodes(table["allreduce", "nodes"][0], num_nodes)
        assert selector_module.on_nodes(once, num_nodes) == once  # a table that autotune has measured keeps it
        table["allreduce", "nodes"] = [(128 << 10, "mpi"), (math.inf, "hierarchical")]
        assert limits("allreduce") == [128 << 10]
    for size, cores, grown in ((2, 2, 1), (2, 1, 4), (3, 4, 1), (3, 2, 2.25), (8, 2, 16)):
        table, num_nodes, least = Selector(), 1, (16 << 10) if size == 2 else (1 << 20)  # two: in one shot
        table.use_cores(cores)
        assert limits("allreduce", "reduce_scatter", "broadcast") == [grown * least, grown * (1 << 20), 4 << 20]
        table["allreduce", "node"] = [(1 << 20, "mpi"), (math.inf, "shared")]
        assert limits("allreduce") == [1 << 20]
    monkeypatch.setattr(selector_module.MPI, "get_vendor", lambda: ("Intel MPI", (2021, 18, 1)), raising=False)
    size, table = 2, Selector()
    assert limits("allreduce", "reduce_scatter") == [512 << 10, 1 << 20]


@in_a_job
@pytest.mark.usefixtures("one_node")
def test_symmetric_tensors_have_rows_of_their_own(mpi, selector, asked):
    selector["allreduce"] = "mpi"
    selector["allreduce", "node", True] = "ring"
    mpi.allreduce(mpi.symmetric_empty(10).fill_(1))
    mpi.allreduce(torch.ones(10))
    mpi.allreduce(torch.ones(10), out=mpi.symmetric_empty(10))
    mpi.allreduce(mpi.symmetric_empty(10).fill_(1), out=torch.ones(10))
    assert asked == ["ring", "mpi", "ring", "mpi"]  # it is the result that counts


@in_a_job
@pytest.mark.usefixtures("one_node")
def test_what_is_not_available_is_passed_over(mpi, selector, asked, monkeypatch):
    selector["allreduce"] = [(400, "hierarchical"), (800, "ring"), (math.inf, "shared")]
    assert [chosen(mpi, size) for size in (1, 400, 401, 801)] == ["ring", "ring", "ring", "shared"]
    monkeypatch.setattr(type(registry.BY_NAME["shared"]), "missing", lambda self, device: "planted")
    selector["allreduce"] = [(400, "shared"), (math.inf, "hierarchical")]
    assert [chosen(mpi, size) for size in (1, 401)] == ["mpi", "mpi"]  # the first of all that can
    assert mpi.allreduce(1.0) == mpi.size()
    selector["gather", "node"] = "hierarchical"  # which does not know that verb
    assert chosen(mpi, 1, "gather") == "mpi"
    with pytest.raises(Unavailable, match=r"on cpu: flavour 'shared' cannot carry it out .*planted"):
        mpi.allreduce(torch.ones(2), flavour="shared")


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("one_node")
def test_a_span_that_makes_a_flavour_available(mpi, selector):
    def status(comm):
        rows = {(row.verb, row.device, row.flavour): row.status for row in mpi.availability(comm)}
        return rows["allreduce", "cpu", "hierarchical"]

    selector["allreduce"] = "hierarchical"
    assert chosen(mpi, 1) == "mpi"
    level = mpi.push_communicator(mpi.rank() % 2)
    mpi.set_collective_span(0, level)
    try:
        assert (chosen(mpi, 1), status(None)) == ("hierarchical", "available")
        with mpi.at(level) as inner:
            assert chosen(mpi, 1, comm=inner) == "mpi"
            assert status(inner).startswith("unavailable: all ranks are on one node")
    finally:
        mpi.set_collective_span(0, 1)
    assert chosen(mpi, 1) == "mpi"
    half = mpi.split(mpi.rank() % 2)
    half.free()
    with pytest.raises(mpi.CommunicatorError, match="was freed"):
        mpi.availability(half)


@in_a_job
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("form", ["", "_async"])
def test_a_forced_flavour_stays_forced(mpi, selector, asked, form):
    def call(verb, *args, **kwargs):
        result = getattr(mpi, verb + form)(*args, **kwargs)
        return result.wait() if form else result

    selector["allreduce"] = "ring"
    for name in ("gloo", "mpi", "shared"):
        asked.clear()
        call("allreduce", torch.ones(100_000), flavour=name)
        assert asked == [name]
    x, on_meta = torch.ones(mpi.size()), torch.ones(3, device="meta")
    for error, words, verb, args, name in (
        (
            Unavailable,
            "all ranks are on one node; to define groups of your own, call set_collective_span",
            "allreduce",
            (x,),
            "hierarchical",
        ),
        (Unavailable, "on meta: .*mpi: unavailable: serves cpu, cuda", "allreduce", (on_meta,), None),
        (Unimplemented, "scatter of a tensor on cpu", "scatter", (x,), "hierarchical"),
        (Unimplemented, "shared: unimplemented", "sendreceive", (1, 0, 0), "shared"),
        (ValueError, "'udp' is unknown; .*: " + ", ".join(NAMES), "allreduce", (x,), "udp"),
        (ValueError, "'udp' is unknown", "allgather", (x,), "udp"),
    ):
        with pytest.raises(error, match=words):
            call(verb, *args, flavour=name)


@in_a_job
@pytest.mark.usefixtures("one_node")
def test_availability(mpi):
    table = mpi.availability()
    assert len(table) == len(COLLECTIVES) * 2 * len(NAMES)
    status = {(row.verb, row.device, row.flavour): row.status for row in table}
    assert {status[verb, "cpu", "mpi"] for verb in COLLECTIVES} == {"available"}
    assert all("unavailable: it is not known whether the MPI" in status[verb, "cuda", "mpi"] for verb in COLLECTIVES)
    assert all(row.status.startswith("un") for row in table if row.device == "cuda")  # available, implemented
    assert [status[verb, "cpu", "shared"] for verb in ("allreduce", "send")] == ["available", "unimplemented"]
    assert status["allreduce", "cpu", "hierarchical"].startswith("unavailable: all ranks are on one node")
    lines = str(table).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[4].replace(" ", "") == "|allreduce|yes|yes|yes|no1|no1|no1|no2|yes|"
    assert any(
        line.startswith("no 2: all ranks are on one node; to define groups of your own, call set_collective_span")
        for line in lines
    )
