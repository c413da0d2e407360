"""How ranks, hosts, cores and GPUs are divided between groups of ranks; when a group is started again."""

import pickle
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import binding, group_jobs, group_of_ranks, hosts, topology
from torchmpi_py.launch.group_of_ranks import GroupOfRanks
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.signals import Signals

pytestmark = pytest.mark.timeout(60)


def divide(count, num_ranks, named="", environment=None, **more):
    named = hosts.parse_hosts(named) if named else ()
    spec = JobSpec(num_ranks=num_ranks, hosts=named, environment=environment or {}, **more)
    return group_jobs.divide(spec, count, "folder")


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 1), (3, 2), (4, 4)])
def test_cores_of_this_host(monkeypatch, count, size):
    for num_cores in range(1, 40):
        cores = [topology.Core(0, 0, False, cpu, (cpu,)) for cpu in range(0, 2 * num_cores, 2)]
        monkeypatch.setattr(topology, "cores", lambda cores=cores: cores)
        groups = divide(count, count * size, environment={"CUDA_VISIBLE_DEVICES": ""})
        places = [(spec.group.index, spec.group.count, spec.num_ranks) for spec, _ in groups]
        assert places == [(index, count, size) for index in range(count)]
        assert len({spec.group.token for spec, _ in groups}) == 1
        if num_cores < count:
            assert all((spec.bind, own) == ("none", ()) for spec, own in groups)
        else:
            assert [core for _, own in groups for core in own] == list(range(0, 2 * num_cores, 2))
            assert all(spec.bind == "core" for spec, _ in groups)


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
    groups = divide(count, 4, environment={"CUDA_VISIBLE_DEVICES": visible})
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec, _ in groups] == expected


def test_hosts():
    def divided(*arguments):
        return [(",".join(map(str, spec.hosts)), spec.bind == "none") for spec, _ in divide(*arguments)]

    assert divided(3, 6, "a:3,b:2,c:1") == [("a:2", True), ("a:1,b:1", True), ("b:1,c:1", True)]
    assert divided(2, 8, "a:4,b:4") == [("a:4", False), ("b:4", False)]
    assert divided(2, 4, "a:4,b:4") == [("a:2", True), ("a:2", True)]
    with pytest.raises(LaunchError, match="expected 6 slots, found 4"):
        divide(2, 6, "a:4")
    with pytest.raises(LaunchError, match="set -n to a multiple of 4"):
        divide(4, 6)


def test_the_job_of_a_group():
    others = {"MASTER_PORT": "1", "OMP_NUM_THREADS": "3"}
    spec, _ = divide(2, 8, "a:2,b:6", others, log_dir=Path("logs"), timeline=Path("page.html"))[1]
    assert (spec.num_ranks, spec.hosts, spec.bind) == (4, (hosts.Host("b", 4),), "none")
    assert (spec.log_dir, spec.timeline) == (Path("logs/group-1"), Path("page-group-1.html"))
    assert spec.environment == {"OMP_NUM_THREADS": "3"}
    assert spec.variables == {name: "1" for name in binding.THREAD_VARIABLES if name not in others}
    assert group_of_ranks.group_in({group_of_ranks.VARIABLE: spec.group.text}) == spec.group
    assert group_of_ranks.group_in({}) is None


def test_the_groups_end_at_the_same_time(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(group_jobs.subprocess, "Popen", lambda words, **_: started.append(Path(words[-1])))
    group_jobs._GroupJob(JobSpec(group=GroupOfRanks(0, 1, "token", str(tmp_path))), (), 0.0)
    spec = pickle.loads(started[0].read_bytes())
    assert 0 < spec.timeout < 1  # the time is over
    assert group_of_ranks.group_in(spec.variables).index == 0


@pytest.mark.parametrize(("is_here", "seconds", "most"), [(False, 100, 11), (False, 0, 1), (True, 100, 1)])
def test_how_often_a_group_is_started_again(tmp_path, monkeypatch, is_here, seconds, most):
    """Not for ever if it fails outside of experiments; without end if it has recorded one."""

    def start(job):
        job.started, job.ended = time.monotonic() - seconds, time.monotonic()

    monkeypatch.setattr(group_jobs._GroupJob, "start", start)
    monkeypatch.setattr(group_jobs.hosts, "is_this_host", lambda host: is_here, raising=False)
    group = GroupOfRanks(0, 1, "token", str(tmp_path))
    job = group_jobs._GroupJob(JobSpec(hosts=(hosts.Host("a", 2),), group=group), (), None)
    num_failures = 1
    while job.can_go_on(1) and num_failures < 50:
        num_failures += 1
        job.start()
    assert num_failures == most
    job = group_jobs._GroupJob(JobSpec(group=group), (), None)
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
    assert "group 0 failed with exit code 138, after signal 10" in capfd.readouterr().err
