"""The hosts and ranks that the variables of a batch system stand for, and starts that are refused."""

import os
import re

import pytest
from support import jobs

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import __main__ as launcher, allocation, command, hosts, job_spec, topology
from torchmpi_py.launch.topology import Core

pytestmark = pytest.mark.timeout(20)

AB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodea,nodeb", "SLURM_JOB_NUM_NODES": "2"}
A = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nodea", "SLURM_JOB_NUM_NODES": "1"}
CORES = "ranks: one for each core of the 2 hosts of Slurm's job"
GPUS = "ranks: one for each GPU of the 2 hosts of Slurm's job"


def slurm(base, tasks, cpus, ntasks=None, **others):
    given = {"TASKS_PER_NODE": tasks, "JOB_CPUS_PER_NODE": cpus, "NTASKS": ntasks, **others}
    return base | {f"SLURM_{name}": value for name, value in given.items() if value}


# Recorded from Slurm 22.05: nodes of 4 cores with 2 hardware threads each, and 2 GPUs. What the user gave to salloc or
# sbatch, which set the same; a core that a job gets comes with both threads.
RECORDED = {
    "-N2": (slurm(AB, "2(x2)", "2(x2)"), "nodea:1,nodeb:1", f"2 {CORES}"),
    "-N2 --exclusive": (slurm(AB, "8(x2)", "8(x2)"), "nodea:4,nodeb:4", f"8 {CORES}"),
    "-N2 -n4": (slurm(AB, "2(x2)", "2(x2)", "4"), "nodea:2,nodeb:2", ""),
    "-N2 -n4 --exclusive": (slurm(AB, "2(x2)", "8(x2)", "4"), "nodea:2,nodeb:2", ""),
    "-N2 -n3": (slurm(AB, "2,1", "2(x2)", "3"), "nodea:2,nodeb:1", ""),
    "-N2 --ntasks-per-node=3": (
        slurm(AB, "3(x2)", "4(x2)", "6", NTASKS_PER_NODE="3"),
        "nodea:3,nodeb:3",
        "",
    ),
    "-n12": (slurm(AB, "8,4", "8,4", "12"), "nodea:8,nodeb:4", ""),
    "-n3": (slurm(A, "3", "4", "3"), 3, ""),
    "-N1": (slurm(A, "2", "2"), 1, ""),
    "-N2 -c4": (slurm(AB, "1(x2)", "4(x2)", CPUS_PER_TASK="4"), "nodea:1,nodeb:1", f"2 {CORES}"),
    "-N2 -c3 --ntasks-per-node=2": (
        slurm(AB, "2(x2)", "6(x2)", "4", NTASKS_PER_NODE="2", CPUS_PER_TASK="3"),
        "nodea:2,nodeb:2",
        "",
    ),
    "-N2 --gpus-per-node=2": (slurm(AB, "2(x2)", "2(x2)", GPUS_PER_NODE="2"), "nodea:2,nodeb:2", f"4 {GPUS}"),
    "-N2 --gpus-per-node=a100:3": (slurm(AB, "2(x2)", "2(x2)", GPUS_PER_NODE="a100:3"), "nodea:3,nodeb:3", f"6 {GPUS}"),
    "sbatch -N2 --exclusive": (
        slurm(AB, "8(x2)", "8(x2)", PROCID="0", NODEID="0") | {"CUDA_VISIBLE_DEVICES": "0,1"},
        "nodea:2,nodeb:2",
        f"4 {GPUS}",
    ),
    "srun -n1 in -N2": (slurm(AB, "1", "8(x2)", "1", PROCID="0", STEP_NUM_TASKS="1"), 1, ""),
    "outside of a job": ({}, 4, ""),
    "2 GPUs here": ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, ""),
    "variables of nonsense": ({"SLURM_NTASKS": "²", "SLURM_TASKS_PER_NODE": "x", "SLURM_JOB_NODELIST": "n[1"}, 4, ""),
}


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """This host has 4 cores with 2 hardware threads each."""
    monkeypatch.setattr(topology, "cores", lambda: [Core(0, 0, False, n, (n, n + 4)) for n in range(4)])
    monkeypatch.setattr(topology, "num_usable_cores", lambda: 4)


def place(environment, num_ranks=None, text=None):
    return allocation.place(num_ranks, text, None, {"CUDA_VISIBLE_DEVICES": "", "PATH": "/nowhere", **environment})


@pytest.mark.parametrize("given", RECORDED)
def test_slurm(given):
    environment, expected, note = RECORDED[given]
    placed = place(environment)
    named = hosts.parse_hosts(expected) if isinstance(expected, str) else ()
    num_ranks = sum(host.num_slots for host in named) or expected
    assert (placed.hosts, placed.num_ranks, placed.notes) == (named, num_ranks, [note] if note else [])
    assert placed.system == ("Slurm" if named else "")


@pytest.mark.parametrize(
    ("number", "text", "idle"),
    [
        *(
            (4, None, "nodeb"),
            (1, None, "nodeb"),
            (5, None, ""),
            (None, "nodea:2", "nodeb"),
            (2, "nodeb:1,nodea:1", ""),
        ),
        *((9, None, ""), (2, "nodeb:2,nodea:2", "nodea"), (2, "10.0.0.1:2", ""), (None, "elsewhere:2,nodea", "")),
    ],
)
def test_a_host_without_a_rank_is_named(number, text, idle):
    notes = place(slurm(AB, "8(x2)", "8(x2)"), number, text).notes
    assert [note.split(";")[0] for note in notes] == (
        [f"Slurm's job has hosts without a rank ({idle})"] if idle else []
    )


def test_a_list_of_many_idle_hosts_is_short():
    many = AB | {"SLURM_JOB_NODELIST": "n[001-600]", "SLURM_NTASKS": "600", "SLURM_TASKS_PER_NODE": "1(x600)"}
    (note,) = place(many, 2).notes
    assert "(n003, n004, n005, n006, ...); omit -n, --hosts and --hostfile, or list each host with its number" in note


def test_open_mpi_is_given_the_slots_of_slurms_nodes():
    slurms = slurm(AB, "8(x2)", "8(x2)")
    for text, layout in ((None, "4,4"), ("nodea:1,nodeb:3", "1,3"), ("nodeb:2", "1,2"), ("nodeb:3,nodea:2", "2,3")):
        placed = place(slurms, None, text)
        assert allocation.slurm_layout(placed.hosts, slurms) == {"SLURM_TASKS_PER_NODE": layout}
    assert allocation.slurm_layout(hosts.parse_hosts("a:2"), {}) == {}


def test_slurms_hosts_need_no_hostfile(tmp_path, monkeypatch, capfd):
    """Where srun starts the ranks a hostfile would place them one by one, and MPICH takes each for a node."""
    slurms = slurm(AB, "8(x2)", "8(x2)") | {"CUDA_VISIBLE_DEVICES": ""}
    for more, has_file in (([], False), (["--hosts", "nodea:1,nodeb:2"], True)):
        words = ["--dry-run", "--mpi", "srun", *more, "a.py"]
        spec = job_spec.read(launcher.parse(words), words, slurms)
        made = command.build(spec, tmp_path)
        assert (bool(made.hostfile), [host.name for host in spec.hosts]) == (has_file, ["nodea", "nodeb"])
        assert made.added["SLURM_TASKS_PER_NODE"] == ("1,2" if has_file else "4,4")
    for name, value in slurms.items():
        monkeypatch.setenv(name, value)
    assert launcher.main(["--groups", "2", "-m", "this"]) == 2
    assert "--groups: list Slurm's nodes explicitly; add --hosts nodea:4,nodeb:4" in capfd.readouterr().err


def test_files_and_lists_of_hosts(tmp_path):
    (tmp_path / "nodes").write_text("a.x\na.x\nb.x\nb.x\nb.x\n")
    (tmp_path / "sge").write_text("a.x 2 all.q@a.x UNDEFINED\nb.x 3 all.q@b.x <NULL>\n")
    nodes, sge, expected = str(tmp_path / "nodes"), str(tmp_path / "sge"), hosts.parse_hosts("a.x:2,b.x:3")
    for environment, system in (
        ({"PBS_NODEFILE": nodes}, "PBS"),
        ({"LSB_DJOB_HOSTFILE": nodes, "LSB_MCPU_HOSTS": "c 9"}, "LSF"),
        ({"LSB_MCPU_HOSTS": "a.x 2 b.x 3 "}, "LSF"),
        ({"PE_HOSTFILE": sge, "NSLOTS": "5"}, "Grid Engine"),
    ):
        assert place(environment)[:4] == (expected, 5, system, "")
        assert place(environment, 2).notes[0].startswith(f"{system}'s job has hosts without a rank (b.x); ")
    assert place({"LSB_MCPU_HOSTS": "", "PBS_NODEFILE": ""})[:2] == ((), 4)
    with pytest.raises(LaunchError, match="LSB_MCPU_HOSTS: 'b:' is not a host"):
        place({"LSB_MCPU_HOSTS": "a 2 b"})


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"])
def test_a_file_of_a_batch_system_that_cannot_be_read(tmp_path, name):
    (tmp_path / "empty").touch()
    for file, problem in (("missing", "No such file"), ("empty", "lists no hosts")):
        with pytest.raises(LaunchError, match=f"^{name} .*{file}.* {problem}.*; unset {name}, or .*--hosts"):
            place({name: str(tmp_path / file)})
        assert place({name: str(tmp_path / file)}, None, "a:2").num_ranks == 2  # that remedy


def test_the_hosts_of_a_flux_instance(tmp_path):
    jobs.script(tmp_path, '#!/bin/sh\n[ "$*" = "getattr hostlist" ] && echo "corona[8-9]"\n', "flux")
    initial = {"FLUX_URI": "local:///tmp/flux-x/local-0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    placed = place(initial)
    note = "8 ranks: one for each core of the 2 hosts of Flux's job"
    assert placed == (hosts.parse_hosts("corona8:4,corona9:4"), 8, "Flux", "", [note])
    task = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1", "PMI_SIZE": "1", "PMI_RANK": "0"}
    assert place(initial | task).hosts == ()
    allocation.check(initial | task)


STEPS = {
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
    "jsrun": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"},
}


@pytest.mark.parametrize("launcher", STEPS)
def test_several_torchmpiruns_of_another_launcher_are_refused(launcher):
    with pytest.raises(LaunchError, match=f"^{launcher} has started torchmpirun 4 times, but torchmpirun starts all"):
        allocation.check(STEPS[launcher])
    allocation.check(
        {name: re.sub("[14]", lambda found: str(int(found[0]) // 4), value) for name, value in STEPS[launcher].items()}
    )


def test_ranks_and_shells_are_not_taken_for_such_starts():
    for rank in ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, {"PMI_RANK": "2", "PMI_SIZE": "4"}):
        allocation.check(rank)
        allocation.check(rank | AB | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})  # of an MPI's daemon
    allocation.check(AB | {"SLURM_PROCID": "0"})  # the script of a job
    for inside in ("SLURM_PTY_PORT", "TORCHMPIRUN_JOB_DIR", "FLUX_URI"):  # srun --pty bash; a rank; flux batch
        for step in STEPS.values():
            allocation.check(step | {inside: "1"})


def test_a_heterogeneous_job_is_refused():
    for word in ("HET", "PACK"):
        components = {f"SLURM_JOB_ID_{word}_GROUP_{number}": str(15 + number) for number in (0, 1)}
        with pytest.raises(LaunchError, match="heterogeneous Slurm job; submit it without ` : ` and `hetjob`"):
            allocation.check({f"SLURM_{word}_SIZE": "2", "SLURM_NTASKS": "3", **components})


# As pbs_tmrsh does: no option of ssh, a host of PBS_NODEFILE, and a program started without a shell.
TMRSH = """#!/bin/bash
grep -qx -- "$1" "$PBS_NODEFILE" || { echo "pbs_tmrsh: bad host $1" >&2; exit 255; }
echo "$1" >> "$PBS_NODEFILE.asked"
shift
exec "$@"
"""


@jobs.needs_mpi
@pytest.mark.timeout(90)
def test_ranks_of_a_pbs_job_start_by_pbs_tmrsh(tmp_path):
    jobs.script(tmp_path, TMRSH, "pbs_tmrsh")
    (tmp_path / "nodes").write_text("localhost\nother.invalid\n")
    environment = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert place(environment).agent == str(allocation._PBS_AGENT)
    assert [place(environment, None, text).agent for text in ("localhost:2", "localhost,other.invalid")] == ["", ""]
    assert os.access(allocation._PBS_AGENT, os.X_OK)
    done = jobs.torchmpirun("--timeout", 60, jobs.write(tmp_path, "print('alive')"), env=environment)
    assert (tmp_path / "nodes.asked").read_text() == "other.invalid\n", done.stderr
    assert (done.returncode, done.stdout) == (0, "alive\n" * 2), done.stderr
