"""torchrun's variables, from those of every launcher."""

import sys

import pytest
from support import jobs

from torchmpi_py.launch import __main__ as launcher, variables

pytestmark = pytest.mark.timeout(240)

OPENMPI = {
    "PMIX_NAMESPACE": "prterun-nodea-7826@1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_FD": "9", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "PMI_RANK": "3",  # --mpi=pmi2
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "nodea,nodeb",
    "SLURM_JOB_NODELIST": "nodea,nodeb",
}
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def set_in(environment):
    """torchrun's variables of a process that has this environment."""
    variables.set_variables(environment)
    return {name: environment[name] for name in variables.NAMES if name in environment}


def without_port(values):
    assert 10_000 <= int(values["MASTER_PORT"]) < 29_500
    return {name: value for name, value in values.items() if name != "MASTER_PORT"}


@pytest.mark.parametrize(
    ("environment", "local_size"), [(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), (MPICH, "MPI_LOCALNRANKS")]
)
def test_a_plain_mpirun(environment, local_size):
    """On several hosts it says neither where rank 0 is, nor which host this is: MPI does, in start."""
    found = dict(environment)
    assert without_port(set_in(found)) == PLACE
    variables.complete("10.0.0.1", 1, found)
    assert without_port(set_in(found)) == PLACE | {"MASTER_ADDR": "10.0.0.1", "GROUP_RANK": "1"}
    one_host = PLACE | {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0"}
    assert without_port(set_in(environment | {local_size: "4"})) == one_host


def test_srun():
    for nodes, first in (
        ("nodea,b", "nodea"),
        ("node[07-12,20]", "node07"),
        ("n[3,5]-ib,x", "n3-ib"),
        ("a-b,c", "a-b"),
    ):
        found = without_port(set_in(SRUN | {"SLURM_STEP_NODELIST": nodes}))
        assert found == PLACE | {"MASTER_ADDR": first, "GROUP_RANK": "1"}


def test_slurms_lists_of_nodes():
    assert variables.nodes("n[08-10,12]-ib,login") == ["n08-ib", "n09-ib", "n10-ib", "n12-ib", "login"]
    assert variables.nodes("") == variables.nodes("rack[0-1]node[0-3]") == []


TASK = {name: value for name, value in SRUN.items() if name != "PMI_RANK"}  # of srun, without an MPI


@pytest.mark.parametrize(
    "environment",
    [
        TASK,
        MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"PMIX_NAMESPACE": "a", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},  # a job's script
        {"HOME": "/", "TORCHELASTIC_RUN_ID": "x", "RANK": "1"},
    ],
)
def test_programs_that_may_have_nothing_to_do_with_each_other(environment):
    found = dict(environment)
    variables.set_variables(found)
    assert found == environment


def test_mpirun_inside_a_slurm_job(monkeypatch):
    """Slurm's variables are those of a daemon, which srun has started, and do not hold for the rank."""
    daemon = TASK | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "nodeb"}
    monkeypatch.setattr(variables.socket, "gethostname", lambda: "nodeb.x")
    assert without_port(set_in(daemon | OPENMPI)) == PLACE | {"MASTER_ADDR": "nodea", "GROUP_RANK": "1"}


def test_torchmpirun_names_the_hosts(tmp_path, monkeypatch):
    record = {variables.RECORD: variables.record_for_ranks([("user@nodea.x", 3), ("10.0.0.2", 3)], tmp_path)}
    assert without_port(set_in(OPENMPI | record)) == PLACE | {"MASTER_ADDR": "nodea.x", "GROUP_RANK": "1"}
    monkeypatch.setattr(variables.socket, "gethostname", lambda: "nodea")
    assert set_in(OPENMPI | record)["GROUP_RANK"] == "0"  # the name counts more than the slots
    record = {variables.RECORD: variables.record_for_ranks([("localhost", 3), ("nodeb", 3)], tmp_path)}
    assert set_in(OPENMPI | record)["MASTER_ADDR"] == "nodea"


def test_all_ranks_have_the_same_port():
    ranks = [set_in(OPENMPI | {"OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(4)]
    other = set_in(OPENMPI | {"PMIX_NAMESPACE": "prterun-nodea-7827@1"})
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    assert other["MASTER_PORT"] != ranks[0]["MASTER_PORT"]


def test_what_the_user_sets_stays():
    own = {"MASTER_ADDR": "nodex", "MASTER_PORT": "29500", "RANK": "0"}
    environment = OPENMPI | own
    assert set_in(environment) == PLACE | own
    assert all(variables.is_own(environment, name) for name in own)
    variables.complete("10.0.0.1", 1, environment)
    assert environment["MASTER_ADDR"] == "nodex"
    assert environment["GROUP_RANK"] == "1"


def test_what_an_outer_job_has_set_does_not():
    outer = OPENMPI | {"PMIX_NAMESPACE": "outer", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    set_in(outer)
    outer["MASTER_PORT"] = "29400"  # the program's own
    inner = set_in(outer | OPENMPI)
    assert inner == PLACE | {"MASTER_PORT": "29400"}  # no address of the outer job


def test_a_child_that_does_not_find_the_job_keeps_what_it_has(monkeypatch):
    set_in(rank := dict(MPICH))
    kept = rank | {variables.RECORD: rank[variables.RECORD].replace("JOB=", "JOB=a:1"), "LOCAL_RANK": "7"}
    monkeypatch.setattr(variables, "job_name", lambda *_: "")  # its ancestors are gone
    variables.set_variables(child := dict(kept))
    assert child == kept
    monkeypatch.setattr(variables, "job_name", lambda *_: "b:2")
    variables.set_variables(child)
    assert child["MASTER_PORT"] != kept["MASTER_PORT"]


SHOW = """
import os
from torchmpi_py.launch import variables
variables.set_variables()
print(os.environ["RANK"], os.environ["WORLD_SIZE"], any(name.startswith("TORCHELASTIC_") for name in os.environ))
"""
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def shown(parent, child, through=()):
    """What a process shows that another one starts by the command ``through``, with these environments."""
    line = [*through, sys.executable, "-c", SHOW]
    text = f"import os, subprocess; subprocess.run({line!r}, env=os.environ | {child!r}, check=True)"
    return jobs.python(text, env=parent).stdout.split()


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("through", [(), ("/bin/sh", "-c", '"$@"; true', "sh")])
def test_a_torchrun_that_a_rank_has_started_keeps_its_own(marked, through):
    """The parent, the rank, has the launcher's variables; its child has torchrun's as well, as has a shell's child."""
    rank = dict(OPENMPI)
    if marked:
        set_in(rank)
    assert shown(rank, TORCHRUN, through) == ["5", "8", "True"]


@pytest.mark.parametrize("outer", [{}, {"PMIX_NAMESPACE": "outer", "OMPI_COMM_WORLD_RANK": "3"}])
def test_what_an_outer_torchrun_has_set_does_not(outer):
    """The parent, the launcher, was started by a worker of torchrun, which may be of the same rank in another job."""
    assert shown(TORCHRUN | outer, OPENMPI) == ["3", "4", "False"]


def test_torchmpirun_drops_an_outer_place():
    outer = set_in(environment := dict(OPENMPI)) and environment | {"MASTER_ADDR": "mine", "TORCHELASTIC_X": "1"}
    left = launcher.inherited_environment(outer | {"A": "b"})
    assert left == {"A": "b", "MASTER_ADDR": "mine"}
