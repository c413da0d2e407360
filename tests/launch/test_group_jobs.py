"""How ranks, hosts, cores and GPUs are divided between groups of ranks; when a group is started again."""

import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import group_jobs, hosts, topology
from torchmpi_py.launch.__main__ import parse
from torchmpi_py.launch.signals import Signals

pytestmark = pytest.mark.timeout(60)


def divide(count, num_ranks, named="", environment=None):
    return group_jobs.divide(count, num_ranks, hosts.parse_hosts(named) if named else (), environment or {}, "folder")


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_cores_of_this_host(monkeypatch, count, size):
    for num_cores in range(1, 40):
        cores = [topology.Core(0, 0, False, cpu, (cpu,)) for cpu in range(0, 2 * num_cores, 2)]
        monkeypatch.setattr(topology, "cores", lambda cores=cores: cores)
        groups = divide(count, count * size, environment={"CUDA_VISIBLE_DEVICES": ""})
        places = [(group.index, group.count, group.num_ranks) for group in groups]
        assert places == [(index, count, size) for index in range(count)]
        assert len({group.token for group in groups}) == 1
        if num_cores < count:
            assert all(group.shares_host and group.cores == () for group in groups)
        else:
            assert [core for group in groups for core in group.cores] == list(range(0, 2 * num_cores, 2))
            assert not any(group.shares_host for group in groups)


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [
        (2, "0,1,2,3", ["0,1", "2,3"]),
        (2, "7,GPU-b", ["7,GPU-b"] * 2),
        (2, "5", ["5", "5"]),
        (2, "", [""] * 2),
        (4, "0,1,2", ["0", "1", "2", "0"]),
    ],
)
def test_gpus_of_this_host(count, visible, expected):
    assert [group.gpus for group in divide(count, 4, environment={"CUDA_VISIBLE_DEVICES": visible})] == expected


def test_hosts():
    def divided(*arguments):
        return [(group.hosts, group.shares_host) for group in divide(*arguments)]

    assert divided(3, 6, "a:3,b:2,c:1") == [("a:2", True), ("a:1,b:1", True), ("b:1,c:1", True)]
    assert divided(2, 8, "a:4,b:4") == [("a:4", False), ("b:4", False)]
    assert divided(2, 4, "a:4,b:4") == [("a:2", True), ("a:2", True)]
    with pytest.raises(LaunchError, match="6 ranks need as many slots, and the hosts have 4"):
        divide(2, 6, "a:4")
    with pytest.raises(LaunchError, match="give -n a multiple of 4"):
        divide(4, 6)


def test_the_options_of_a_group(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["--groups", "2", "-n", "8", "--hosts", "a:2,b:6", "--log-dir", "logs", "--timeout", "9"]
    group = json.dumps({**vars(divide(2, 8, "a:2,b:6")[1]), "ends_at": 0.0})
    options = parse(["--group", group, "--nproc-per-node", "8", *words, "x.py", "--groups"])
    group_jobs.apply(options.group, options)
    assert options.ranks_per_host is None  # of all groups together
    assert (options.groups, options.num_ranks, options.hosts, options.bind) == (None, 4, "b:4", "none")
    assert (options.log_dir, options.program) == (Path("logs/group-1"), ["x.py", "--groups"])
    assert 0 < options.timeout < 1  # the time is over
    assert "OMP_NUM_THREADS=1" in options.env
    variable = dict(each.split("=", 1) for each in options.env)[group_jobs.VARIABLE]
    assert group_jobs.group_in({group_jobs.VARIABLE: variable}).index == 1
    assert group_jobs.group_in({}) is None


@pytest.mark.parametrize(
    ("is_here", "seconds", "most"), [(False, 100, 12), (False, 0, 2), (True, 100, 2), (True, 0, 2)]
)
def test_how_often_a_group_is_started_again(tmp_path, monkeypatch, is_here, seconds, most):
    """Not for ever if it fails outside of experiments; without end if it has recorded one."""

    def start(job):
        job.started, job.ended = time.monotonic() - seconds, time.monotonic()

    monkeypatch.setattr(group_jobs._GroupJob, "start", start)
    monkeypatch.setattr(group_jobs.host_check, "is_this_host", lambda host: is_here, raising=False)
    job = group_jobs._GroupJob(group_jobs.GroupOfRanks(0, 1, "token", str(tmp_path), hosts="a:2"), ())
    num_failures = 1
    while job.can_go_on(1) and num_failures < 50:
        num_failures += 1
        job.start()
    assert num_failures == most
    job = group_jobs._GroupJob(group_jobs.GroupOfRanks(0, 1, "token", str(tmp_path)), ())
    job.group.record_experiment()
    assert all(job.can_go_on(1) for _ in range(50))


class Group:
    """A group whose job ends as ``codes`` say, one a look; the last one stays."""

    def __init__(self, index, sent, *codes):
        self.group, self.codes, self.starts = SimpleNamespace(index=index), list(codes), 0
        self.process = SimpleNamespace(send_signal=lambda signum: sent.append((index, signum)))
        self.can_go_on, self.ended = lambda code: True, time.monotonic()

    def code(self):
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def start(self):
        self.starts, self.codes = self.starts + 1, [None, 0]


def wait(groups, signum):
    signals = Signals()
    signals.receive(signum)
    return group_jobs._wait(groups, signals)


def test_a_group_that_ends_after_such_a_signal_is_started_again_while_others_go_on(monkeypatch):
    """Nobody else records how its experiment has ended: they would wait for that."""
    monkeypatch.setattr(group_jobs, "SOON_SECONDS", 0.5)
    sent, begin = [], time.monotonic()
    first, second = Group(0, sent, 1), Group(1, sent, None)
    second.code = lambda: 0 if first.starts else None
    assert wait([first, second], signal.SIGUSR2) == 0
    assert (first.starts, sent) == (1, [(0, signal.SIGUSR2), (1, signal.SIGUSR2)])
    assert time.monotonic() - begin > 0.5


def test_groups_that_such_a_signal_ends_are_not_started_again(capfd):
    groups = [Group(index, [], None, 138) for index in range(2)]
    assert wait(groups, signal.SIGUSR1) == 138
    assert [each.starts for each in groups] == [0, 0]
    assert "group 0 failed after signal 10" in capfd.readouterr().err
