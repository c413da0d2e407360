"""The autotuner: choices from times, the file that keeps them, and a small real run."""

import json
import logging
import math
import os
import types

import pytest
from support import jobs

from torchmpi_py.collectives import autotune, measured_cache
from torchmpi_py.collectives.selector import Choice, Key
from torchmpi_py.core import config
from torchmpi_py.core.channels import Place
from torchmpi_py.errors import RanksDisagree, TorchMPIError

pytestmark = pytest.mark.timeout(240)

FACTS = measured_cache.MachineFacts("Some MPI 1.2", "here", "2x1", "a processor")
ON_GPU = FACTS._replace(gpu="A GPU 80GB")
ROWS = {
    Key("allreduce"): [Choice(4096, "mpi", "2.0x shared at 64 B, measured"), Choice(math.inf, "shared", "measured")],
    Key("broadcast", "nodes", True): [Choice(math.inf, "mpi", "measured")],
}


def pairs(choices):
    return [(choice.max_bytes, choice.flavour) for choice in choices]


# From times to choices


def chosen(points):
    return autotune.choose([(size, {name: [took] * 3 for name, took in times.items()}) for size, times in points])


def test_crossovers_are_between_the_sizes_where_the_winner_changes():
    points = [(4, {"mpi": 1, "ring": 9}), (16, {"mpi": 2, "ring": 4}), (64, {"mpi": 8, "ring": 4})]
    choices = chosen(points)
    assert pairs(choices) == [(32, "mpi"), (math.inf, "ring")]
    assert [each.why for each in choices] == [f"2.0x as fast as {x}, measured" for x in ("ring at 16 B", "mpi at 64 B")]
    assert chosen([(4, {"mpi": 1})]) == [Choice(math.inf, "mpi", "the only flavour measured")]


def test_who_displaces_nobody():
    """A flavour that is as fast, one that is faster when the load comes and goes, and one that was dropped."""
    close = [(4, {"mpi": 1, "ring": 2}), (16, {"mpi": 1.04, "ring": 1}), (64, {"mpi": 1, "ring": 1.01})]
    assert pairs(chosen(close)) == [(math.inf, "mpi")]
    clear = [(4, {"mpi": 1, "ring": 2}), (16, {"mpi": 1.06, "ring": 1}), (64, {"mpi": 1, "ring": 1.04})]
    assert pairs(chosen(clear)) == [(8, "mpi"), (math.inf, "ring")]
    calm, loaded = {"mpi": [1, 1, 1, 1], "ring": [2, 2, 2, 2]}, {"mpi": [1, 1, 9, 9, 9], "ring": [2, 2, 2, 2, 2]}
    assert pairs(autotune.choose([(4, calm), (16, loaded)])) == [(math.inf, "mpi")]
    dropped = [(1 << 20, {"mpi": 1, "ring": 2}), (4 << 20, {"ring": 3, "shared": 2})]
    assert pairs(chosen(dropped)) == [(2 << 20, "mpi"), (math.inf, "shared")]
    assert chosen(dropped)[1].why == "1.5x as fast as ring at 4 MiB, measured"


def test_hopeless_is_twice_running_and_where_it_costs():
    def hopeless(name, *points):
        return autotune.is_hopeless(name, [(size, {key: [took] for key, took in row.items()}) for size, row in points])

    slow = {"mpi": 1, "ring": 9}
    assert hopeless("ring", (256 << 10, slow), (1 << 20, slow))
    assert not hopeless("mpi", (256 << 10, slow), (1 << 20, slow))
    assert not hopeless("ring", (4, slow), (16, slow))
    assert not hopeless("ring", (256 << 10, {"mpi": 1, "ring": 7}), (1 << 20, slow))


def test_what_was_not_measured_stays():
    """Beyond the largest size measured the former selector holds, from its next change on."""
    former = [Choice(100, "mpi", ""), Choice(1 << 24, "ring", ""), Choice(math.inf, "shared", "")]
    measured = [Choice(500, "mpi", "measured"), Choice(math.inf, "ring", "measured")]
    assert [c[:2] for c in autotune.beyond(measured, 4096, former)] == [
        (500, "mpi"),
        (1 << 24, "ring"),
        (math.inf, "shared"),
    ]
    assert autotune.beyond(measured, 1 << 25, former) == measured
    assert autotune.beyond(measured, 4096, []) == measured


# The file


def test_ranks_per_node():
    assert measured_cache.ranks_per_node([Place(0, 0), Place(0, 1)]) == "2x1"
    assert measured_cache.ranks_per_node([Place(0, 0), Place(1, 0), Place(0, 1), Place(3, 0), Place(1, 1)]) == "2x2+1x1"


def test_where_the_file_is(monkeypatch):
    assert config.tuning_directory({"TORCHMPI_TUNING_DIR": "/a", "XDG_CACHE_HOME": "/b"}).as_posix() == "/a"
    assert config.tuning_directory({"XDG_CACHE_HOME": "/b"}).as_posix() == "/b/torchmpi_py"
    assert config.tuning_directory({}).as_posix().endswith("/.cache/torchmpi_py")
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", "/a")
    assert FACTS.path().as_posix() == "/a/selector-Some_MPI_1.2-here-2x1.json"
    assert ON_GPU.path().as_posix() == "/a/selector-Some_MPI_1.2-here-2x1-A_GPU_80GB.json"


def test_the_file_gives_back_what_was_written_and_keeps_other_rows(tmp_path):
    path = tmp_path / "new" / "file.json"
    date = measured_cache.write(path, FACTS, ROWS)
    assert measured_cache.read(path, FACTS) == (ROWS, date)
    more = {Key("allreduce"): [Choice(math.inf, "ring", "measured")]}
    measured_cache.write(path, FACTS, more)
    assert measured_cache.read(path, FACTS)[0] == {**ROWS, **more}
    other = FACTS._replace(host="there")
    measured_cache.write(path, other, more)
    assert measured_cache.read(path, other)[0] == more
    assert os.listdir(path.parent) == ["file.json"]


@pytest.fixture
def kept(tmp_path, monkeypatch, caplog):
    """The path of a sound file for a made-up job, and a function that starts that job: it returns what was logged."""
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(measured_cache, "facts", lambda world, device="cpu": FACTS if device == "cpu" else ON_GPU)
    caplog.set_level(logging.INFO, "torchmpi_py")
    measured_cache.write(FACTS.path(), FACTS, ROWS)
    channel = types.SimpleNamespace(mpi=types.SimpleNamespace(bcast=lambda x: x))

    def load():
        measured_cache.load_for(types.SimpleNamespace(rank=0, direct=channel))
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return FACTS.path(), load


def test_loading_fills_the_selector_and_says_so(selector, kept):
    path, load = kept
    text = path.read_text()
    path.unlink()
    assert load() == []
    path.write_text(text)
    selector["reduce"] = "mpi"
    selector["broadcast", "nodes", True] = [(100, "mpi"), (math.inf, "shared")]
    ((level, said),) = load()
    assert level == "INFO"
    assert selector.source in said
    assert str(path) in said
    assert selector["allreduce"] == ROWS[Key("allreduce")]
    assert pairs(selector["broadcast", "nodes", True]) == [(100, "mpi"), (math.inf, "shared")], (
        "the program's own choice"
    )
    assert pairs(selector["reduce"]) == [(math.inf, "mpi")]


def test_a_session_with_gpus_loads_their_file_too(selector, kept, monkeypatch):
    path, load = kept
    key = Key("allreduce", "node", False, "cuda")
    measured_cache.write(ON_GPU.path(), ON_GPU, {key: [Choice(math.inf, "gloo", "measured")]})
    load()
    assert selector.source.endswith(str(path)), "a session without GPUs"
    monkeypatch.setattr("torchmpi_py.memory.gpus.table", lambda: {})
    load()
    assert pairs(selector[key]) == [(math.inf, "gloo")]
    assert selector["allreduce"] == ROWS[Key("allreduce")]
    assert str(path) in selector.source
    assert selector.source.endswith(str(ON_GPU.path()))
    ON_GPU.path().write_text(ON_GPU.path().read_text().replace("A GPU 80GB", "Another"))
    assert "measured with gpu 'Another', not 'A GPU 80GB'" in load()[-1][1]


def spoil(content, **changes):
    return json.dumps({**content, **changes})


def with_choices(content, *choices):
    return spoil(content, rows=[{"verb": "allreduce", "scope": "node", "symmetric": False, "choices": choices}])


SPOILT = {
    "not JSON": lambda content: "{",
    "not text": lambda content: b"\xff\xfe\xff".decode("latin-1") + "\x00",
    "a list": lambda content: "[]",
    "another format": lambda content: spoil(content, format=0),
    "another processor": lambda content: spoil(content, facts={**content["facts"], "cpu": "another"}),
    "facts are missing": lambda content: spoil(content, facts={}),
    "rows are missing": lambda content: spoil(content, rows=None),
    "unknown verb": lambda content: spoil(content, rows=[{**content["rows"][0], "verb": "allred"}]),
    "unknown flavour": lambda content: with_choices(content, [None, "quick", ""]),
    "not monotonic": lambda content: with_choices(content, [64, "mpi", ""], [16, "shared", ""], [None, "mpi", ""]),
    "no choices": lambda content: with_choices(content),
    "no limits": lambda content: with_choices(content, ["mpi"]),
    "words": lambda content: with_choices(content, ["64", "mpi", ""], [None, "mpi", ""]),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_file_that_is_stale_or_broken_is_ignored_with_one_warning(selector, kept, how):
    path, load = kept
    before = str(selector)
    path.write_text(SPOILT[how](json.loads(path.read_text())))
    ((level, said),) = load()
    assert level == "WARNING"
    assert f"{path} is ignored" in said
    assert str(selector) == before


# The real thing


@pytest.mark.mpi
def test_a_small_run(mpi, selector, tmp_path):
    mpi.selector["reduce"] = "mpi"
    path = tmp_path / "rows.json"
    mpi.autotune(verbs=("allreduce", "allgather", "scatter"), max_bytes=300, seconds=0.2, path=path)
    if mpi.size() == 1:
        assert not path.exists()
        return
    assert len(set(mpi.allgather_object(str(mpi.selector)))) == 1
    scope = "node" if mpi.num_nodes() == 1 else "nodes"
    assert {Key(verb, scope, kind) for verb in ("allreduce", "allgather") for kind in (False, True)} < set(selector)
    assert pairs(selector["reduce"]) == [(math.inf, "mpi")]
    assert "gloo" not in str(selector)
    assert path.exists() == (mpi.rank() == 0)
    assert selector.source.startswith("measured on ")
    options = {"verbs": ["allreduce"], "flavours": ["gloo"], "max_bytes": 4, "seconds": 0.1}  # a peer on demand
    with pytest.raises(TorchMPIError, match="cannot be saved"):
        mpi.autotune(**options, path=os.path.join(os.devnull, "rows.json"))
    assert pairs(selector["allreduce", scope]) == [(math.inf, "gloo")]
    assert selector.source == "measured in this process"
    with pytest.raises(RanksDisagree, match=r"autotune: the ranks pass different.*'max_bytes': 4"):
        mpi.autotune(max_bytes=4 + mpi.rank())


@pytest.mark.mpi
def test_wrong_arguments(mpi):
    for options, said in (
        ({"verbs": ["send"]}, "verbs=.*pass one or more of .*allreduce"),
        ({"verbs": []}, "verbs="),
        ({"flavours": ["quick"]}, "flavours=.*pass one or more of mpi"),
        ({"max_bytes": 3}, "max_bytes=3"),
        ({"seconds": 0}, "seconds=0"),
        ({"device": "tpu"}, "device='tpu': pass one of cpu, cuda"),
        ({"device": "cuda"}, r"mpi.start\(with_cuda=True\)"),
    ):
        with pytest.raises(ValueError, match=said):
            mpi.autotune(**options)


@jobs.needs_mpi
def test_a_later_start_uses_the_file_and_says_so(tmp_path):
    program = """
    import logging, sys, torchmpi_py as mpi
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    mpi.start()
    if "measure" in sys.argv:
        mpi.autotune(verbs=["allreduce"], max_bytes=64, seconds=0.1)
    assert mpi.selector.source.startswith("measured on 2"), mpi.selector.source
    """
    path, folder, said = jobs.write(tmp_path, program), tmp_path / "tuning", []
    for arguments in (["measure"], []):
        done = jobs.torchmpirun("-n", "2", path, *arguments, env={"TORCHMPI_TUNING_DIR": str(folder)})
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
    (name,) = os.listdir(folder)
    assert f"autotune: wrote {folder / name}" in said[0]
    assert "selector: measured on 2" in said[1]
    assert said[1].count(name) == 1
