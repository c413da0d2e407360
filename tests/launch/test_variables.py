"""torchrun's variables, from those of every launcher."""

import random
import time

import pytest
from support import jobs

from torchmpi_py.launch import variables
from torchmpi_py.launch.command import inherited_environment

pytestmark = pytest.mark.timeout(240)

OPENMPI = {"PMIX_NAMESPACE": "prterun-nodea-7826@1", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OPENMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_FD": "9", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TASK = {  # of srun, without an MPI
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"},
    **{"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    **dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "nodea,nodeb"),
}
SRUN = TASK | {"PMI_RANK": "3"}  # --mpi=pmi2
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
    firsts = {"nodea,b": "nodea", "node[07-12,20]": "node07", "n[3,5]-ib,x": "n3-ib", "a-b,c": "a-b"}
    for nodes, first in firsts.items():
        found = without_port(set_in(SRUN | {"SLURM_STEP_NODELIST": nodes}))
        assert found == PLACE | {"MASTER_ADDR": first, "GROUP_RANK": "1"}


def test_slurms_lists_of_nodes():
    assert variables.nodes("n[08-10,12]-ib,login") == ["n08-ib", "n09-ib", "n10-ib", "n12-ib", "login"]
    assert variables.nodes("") == variables.nodes("rack[0-1]node[0-3]") == []


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


def test_a_torchrun_that_a_rank_has_started_keeps_its_own():
    """The rank may have its own variables, or not yet."""
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    set_in(rank := dict(OPENMPI))
    for own in (OPENMPI, rank):
        worker = {**own, **torchrun}
        variables.set_variables(worker)
        assert worker == {**own, **torchrun}


def test_torchmpirun_drops_an_outer_place():
    outer = set_in(environment := dict(OPENMPI)) and environment | {"MASTER_ADDR": "mine", "TORCHELASTIC_X": "1"}
    left = inherited_environment(outer | {"A": "b"})
    assert left == {"A": "b", "MASTER_ADDR": "mine"}


# Environments that no launcher should set: ``import torch`` reads them, for it loads the package.

MOST_SECONDS = 1.0
NAMES = (
    *(*variables._RANK, *variables.SIZE, *variables._LOCAL_RANK, *variables._LOCAL_SIZE, *variables._JOBS),
    *(*variables.NAMES, variables.RECORD, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "TORCHELASTIC_RUN_ID"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
)
VALUES = (
    *("0", "1", "2", "3", "4", "-1", "", " 1", "1.5", "x", "9" * 30, "9" * 5000, "00000001", "1_000"),
    *("\u00b2", "\u0663", "\u2460", "1\u00b2", "\udcff", "n\udcff[1-2]", "a b", "a\nb", "\t", "\x1b[2J", "a=b", "="),
    *("node[1-2-3]", "node[1-40000000]", "node[1-99999999999999999999]", "node[5-1]", "node[-3]", "node[1-]", "n[,]"),
    *("n[", "n]", "[1-2]", "n[1-2]]", "n[[1-2]", ",", ",,a,", "node[1-3],b", "n[\u0661-\u0663]", "n[1-\u00b2]"),
    *("r[0-1]n[0-3]", "a," * 20000, "[" * 20000, "n[" + "1," * 20000 + "2]", "n[1-9999]," * 2000),
    *("2(x2)", "2(x2),3", "2(x)", "(x2)", "9(x99999999999)", "1(x" + "9" * 5000 + ")", "\u0662(x\u0662)"),
    *("JOB=a BY=3/4", "BY=3/4", "BY=0/4 JOB=", "HOSTS=a:x MASTER_PORT=1", "HOSTS=a:1,b", "HOSTS=:", "HOSTS=a:\u00b2"),
    *("MASTER_PORT=x HOSTS=a:" + "9" * 5000, "HOSTS=a:2,b:2 MASTER_PORT=10000", "RANK=3 JOB=x BY=2/4 MASTER_ADDR=a"),
)


def draw(random):
    """One environment: a plausible place in a job in most, so that what reads the rest is reached."""
    environment = {}
    if random.random() < 0.8:
        size = random.randint(1, 4)
        rank, size_name = random.choice(variables._RANK), random.choice(variables.SIZE)
        environment |= {rank: str(random.randrange(size)), size_name: str(size)}
    for name in random.sample(NAMES, random.randint(1, 12)):
        environment[name] = random.choice(VALUES)
    return environment


def test_the_variables_of_odd_launchers_are_read_without_errors():
    """Without the guard that turns an error of the import into a warning. A second call changes nothing."""
    drawn = random.Random(0)
    for _ in range(2000):
        before = draw(drawn)
        once = dict(before)
        begin = time.process_time()
        variables.set_variables(once)
        seconds = time.process_time() - begin
        twice = dict(once)
        variables.set_variables(twice)
        assert (twice, seconds < MOST_SECONDS) == (once, True), before


def test_an_error_of_the_import_is_a_warning():
    done = jobs.python("import sys; sys.modules['torchmpi_py.launch.variables'] = None; import torchmpi_py")
    assert done.returncode == 0, done.stderr
    assert "torchrun's variables are not set" in done.stderr
