"""Who can reach a job of one host: the ports that its processes listen on, and what a stranger can do at them."""

import os
import pathlib
import re
import subprocess

import pytest
from support import jobs

from torchmpi_py.launch import cleanup, transports, variables

pytestmark = pytest.mark.timeout(240)
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "launch" / "environment.md"

# Each rank writes its process id, and waits for the test to have looked: before a group on gloo, and with one.
PROGRAM = """
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("torchmpi")
folder = pathlib.Path(os.environ["LAUNCH_TEST"])
def wait(stage):
    dist.barrier()
    (folder / f"{stage}-{dist.get_rank()}").write_text(f"{os.getpid()}")
    until = time.monotonic() + 120
    while not (folder / f"seen {stage}").exists() and time.monotonic() < until:
        time.sleep(0.05)
wait("MPI")
dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
wait("gloo")
dist.destroy_process_group()
"""


def look(job, tmp_path, stage):
    """Wait for a stage of a job of 2 ranks; (listeners of the ranks alone, listeners of the starter)."""
    files = [tmp_path / f"{stage}-{rank}" for rank in range(2)]
    jobs.until(lambda: job.poll() is not None or all(file.exists() and file.read_text() for file in files), 120)
    assert job.poll() is None, job.communicate()
    ranks = {int(file.read_text()) for file in files}
    everyone = set(cleanup.processes_with(f"LAUNCH_TEST={tmp_path}")) - {os.getpid()}
    starters = {inode: where for each in everyone - ranks for inode, where in jobs.listeners(each).items()}
    of_ranks = {inode: where for each in ranks for inode, where in jobs.listeners(each).items()}
    (tmp_path / f"seen {stage}").touch()
    own = [where for inode, where in of_ranks.items() if inode not in starters]  # MPICH's starter leaves ranks its own
    return [sorted("loopback" if "0100007F" in where else "all" for where in some) for some in (own, starters.values())]


def on_the_page(who):
    """The number of ports for two ranks that the page's first table states for ``who`` and this MPI."""
    rows = [line.split("|") for line in PAGE.read_text().partition("## Ports and security")[2].splitlines()]
    row = next(row for row in rows if len(row) > 2 and row[1].strip() == who)
    return int(re.findall(r"\d+", row[2])[jobs.VENDOR == "mpich"])


@jobs.needs_mpi
@pytest.mark.skipif(jobs.VENDOR not in ("openmpi", "mpich"), reason="the page states nothing of this MPI")
def test_the_listeners_of_a_job_are_those_of_the_page(program, tmp_path, no_leftovers):
    with jobs.start(*jobs.TORCHMPIRUN, "-n", 2, program(PROGRAM), stderr=subprocess.STDOUT) as job:
        for stage, who in (("MPI", "rank, MPI"), ("gloo", "rank, a group on gloo")):
            of_ranks, of_starter = look(job, tmp_path, stage)
            assert of_ranks == ["loopback"] * on_the_page(who)
            assert len(of_starter) == on_the_page("mpirun")
        output = job.communicate(timeout=100)[0]
    assert job.returncode == 0, output
    assert on_the_page("rank, MPI") == 0


ONE_HOST = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
OF_MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environment", "num_bytes", "expected"),
    [
        (ONE_HOST, 1 << 26, ("^ofi,tcp", None)),
        (OF_MPICH, 1 << 26, ("^ofi,tcp", "^tcp")),
        (ONE_HOST | {"OMPI_MCA_btl": "self,tcp"}, 1 << 26, ("self,tcp", None)),
        (OF_MPICH | {"UCX_TLS": "tcp"}, 1 << 26, ("^ofi,tcp", "tcp")),
        (ONE_HOST, 1 << 24, (None, None)),  # for one rank of the two
        (ONE_HOST | {"OMPI_COMM_WORLD_SIZE": "3"}, 1 << 26, (None, None)),  # another host has the third
        (dict.fromkeys(ONE_HOST, "1"), 1 << 26, (None, None)),  # it may spawn others
        ({}, 1 << 26, (None, None)),
    ],
)
def test_tcp_is_left_out_on_one_host(monkeypatch, tmp_path, environment, num_bytes, expected):
    monkeypatch.setattr(transports.parameter_files, "have", lambda *_: False)
    monkeypatch.setattr(transports.os, "statvfs", lambda _: os.statvfs_result((1, 1, 1, 1, num_bytes, 0, 0, 0, 0, 255)))
    names = ("OMPI_MCA_btl", "UCX_TLS")
    unset = (*variables._RANK, *variables.SIZE, *variables._LOCAL_SIZE, *names)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    monkeypatch.setattr(os, "environ", kept | environment)  # the function sets variables
    transports.leave_tcp_out(str(tmp_path))
    assert tuple(map(os.environ.get, names)) == expected


def test_a_job_that_a_rank_starts_has_tcp_again():
    ours = {"OMPI_MCA_btl": "^ofi,tcp", "UCX_TLS": "^tcp", "PATH": "/bin"}
    assert transports.without_ours(ours) == ours  # the user's own
    assert transports.without_ours(ours | {"PMIX_RANK": "1"}) == {"PATH": "/bin", "PMIX_RANK": "1"}
    assert "UCX_TLS" in transports.without_ours({"UCX_TLS": "tcp", "PMIX_RANK": "1"})


NETWORKS = """
import os, socket
import torch, torch.distributed as dist
dist.init_process_group("torchmpi")
x, size = torch.full((3,), dist.get_rank() + 1.0), dist.get_world_size()
dist.all_reduce(x, group=dist.new_group(backend="gloo"))
assert x.tolist() == [size * (size + 1) / 2] * 3, x
networks = [None] * size
dist.all_gather_object(networks, (os.readlink("/proc/self/ns/net"), os.readlink(f"/proc/{os.getppid()}/ns/net")))
if dist.get_rank() == 0:
    print(*set(sum(networks, ())), os.geteuid(), *(name for _, name in socket.if_nameindex()))
dist.destroy_process_group()
"""


@jobs.needs_mpi
def test_a_job_in_a_network_of_its_own(program, no_leftovers):
    """As docs/launch/environment.md says; its processes share a network with a loopback alone."""
    alone = ["unshare", "--user", "--map-current-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if jobs.run(*alone, "true").returncode:
        pytest.skip("unshare or ip is missing, or user namespaces are not allowed here")
    done = jobs.run(*alone, *jobs.TORCHMPIRUN, "-n", 2, program(NETWORKS))
    assert done.returncode == 0, done.stderr
    network, *rest = done.stdout.split()
    assert rest == [str(os.geteuid()), "lo"]
    assert network != os.readlink("/proc/self/ns/net")
