"""The ready scripts, of launch/ and of ``torchmpirun --template``, through the MPI of this environment."""

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.launch import command, mpirun, ready_scripts
from torchmpi_py.launch.job_spec import JobSpec

VENDOR, PROGRAM = mpirun.find("", os.environ) if jobs.VENDOR else (None, "")
FOLDER = Path(__file__).parents[2] / "launch"
HOST_LINE = {"openmpi": "localhost slots=2\n", "mpich": "localhost:2\n"}

OWN = {"PYTHON": sys.executable, "MPIRUN": PROGRAM, "MPIEXEC": PROGRAM}

pytestmark = pytest.mark.timeout(240)
needs_mpi = pytest.mark.skipif(jobs.VENDOR not in HOST_LINE, reason="neither Open MPI nor MPICH here")

HELLO = """
import os, sys
from mpi4py import MPI
print(MPI.COMM_WORLD.allreduce(1), sys.argv[1:], os.environ.get("TORCHMPI_PROFILE"))
"""


@pytest.mark.parametrize("several", ["", "_hostfile"])
@needs_mpi
def test_script(tmp_path, several):
    program = jobs.write(tmp_path, HELLO, "a program.py")
    hosts = jobs.write(tmp_path, HOST_LINE[jobs.VENDOR], "the hosts")
    where = {"HOSTFILE": str(hosts)} if several else {"NP": "2"}
    where |= {"LOG_DIR": str(tmp_path / "logs"), "PROFILE": "traces"}
    job = jobs.run(FOLDER / f"{jobs.VENDOR}{several}.sh", program, "a b", "$HOME", env=OWN | where)
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert log == f"2 ['a b', '$HOME'] {Path.cwd() / 'traces'}\n"


EARLY = """
import os
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    raise RuntimeError("early")
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
"""


@needs_mpi
def test_a_rank_that_fails_before_mpi_starts_ends_the_job_without_torchmpirun(tmp_path):
    job = jobs.run(FOLDER / f"{jobs.VENDOR}.sh", jobs.write(tmp_path, EARLY), env=OWN | {"NP": "2"})
    assert job.returncode != 0  # not always 1: some Open MPI starters crash over a rank that leaves this early
    assert job.stderr.count("Traceback") == 1


@pytest.mark.parametrize("vendor", HOST_LINE)
def test_the_default_number_of_ranks(tmp_path, vendor):
    """The cores, whatever is set for threads, or the slots."""
    settings = {"OMP_NUM_THREADS": "1000", "OMP_THREAD_LIMIT": "1", "MPIRUN": "echo", "MPIEXEC": "echo"}
    settings |= {"HOSTFILE": str(jobs.write(tmp_path, HOST_LINE[vendor] * 3, "hosts"))}
    for several, number in (("", len(os.sched_getaffinity(0))), ("_hostfile", 6)):
        job = jobs.run(FOLDER / f"{vendor}{several}.sh", "a.py", env=settings)
        assert job.stdout.startswith(f"{number} "), job.stderr  # echo takes the -n for itself


# Of Slurm: srun starts two ranks, without its own options; scontrol says what it was asked for.
SRUN = """\
#!/usr/bin/env bash
while [[ $1 == -* ]]; do echo "option $1"; shift; done
exec {starter} "$@"
"""
SCONTROL = "#!/bin/sh\necho scontrol $*\nexit {code}\n"
# Rank 0 agrees with rank 1 to end, or is killed by the same signal, or fails.
ENDS = """
import os, signal, sys
from mpi4py import MPI
from torchmpi_py.errors import EndRequested
MPI.COMM_WORLD.Barrier()
open(f"rank-{MPI.COMM_WORLD.rank}", "w").write(str(sys.argv[1:]))
MPI.COMM_WORLD.Barrier()
if sys.argv[1] == "agree":
    MPI.Finalize()
    raise EndRequested
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGTERM)
"""


def printed(name, tmp_path):
    """The template as a user saves it."""
    return jobs.write(tmp_path, jobs.torchmpirun("--template", name).stdout, f"job.{name}")


def start(words, tmp_path, **environment):
    """Run a template where no checkout is the folder: the package is found by its Python alone."""
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(FOLDER.parent), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return jobs.run(*words, env=own | environment, cwd=tmp_path)


@needs_mpi
@pytest.mark.parametrize(
    ("how", "is_queued_again", "code"),
    [("agree", True, 0), ("agree", True, 1), ("kill", False, 0), ("return", False, 0)],
)
def test_slurm_queues_again_only_what_has_saved(tmp_path, how, is_queued_again, code):
    jobs.write(tmp_path, ENDS)
    spec = JobSpec(vendor=VENDOR, starter=PROGRAM, num_ranks=2)
    added = command.build(spec, tmp_path).added
    settings = {name: value for name, value in added.items() if not name.startswith("TORCHMPIRUN_")}
    starter = [PROGRAM, *command.starter_words(spec, forwarded=["MPI4PY_LIBMPI", "PYTHONPATH"])]
    jobs.script(tmp_path, SRUN.format(starter=shlex.join(starter)), "srun")
    jobs.script(tmp_path, SCONTROL.format(code=code), "scontrol")
    settings |= {"SLURM_JOB_ID": "77", "SRUN_MPI": "pmi9", "TMPDIR": str(tmp_path)}
    before = set(os.listdir(tmp_path))
    job = start(["bash", printed("slurm", tmp_path), "program.py", how, "a b"], tmp_path, **settings)
    assert "option --mpi=pmi9\n" in job.stdout
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == [f"['{how}', 'a b']"] * 2
    assert ("\nscontrol requeue 77\n" in job.stdout) is is_queued_again
    assert job.stderr.count("job 77 is not queued again, because scontrol failed; submit it again") == code
    assert (job.returncode in (0, code)) is (how == "return")  # and never the code of scontrol
    assert {name for name in set(os.listdir(tmp_path)) - before if name.startswith("tmp.")} == set()


def test_slurms_script_stages_an_environment(tmp_path):
    """On nodes whose stand-in is this host; the environment's Python says how it was called."""
    folder = str(tmp_path / "torchmpi-77")
    show = '#!/bin/sh\n[ "$1" = -c ] && echo package || echo "$0" "$@"\n'
    jobs.script(tmp_path / "env" / "bin", show, "python")
    assert jobs.run("tar", "-cf", tmp_path / "env.tar", "-C", tmp_path / "env", ".").returncode == 0
    jobs.script(tmp_path, SRUN.format(starter=""), "srun")
    jobs.script(tmp_path, '#!/bin/sh\nshift\nexec cp "$@"\n', "sbcast")
    settings = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "TMPDIR": str(tmp_path), "STAGE": "env.tar"}
    job = start(["bash", printed("slurm", tmp_path), "program.py", "a b"], tmp_path, **settings)
    assert (job.returncode, job.stderr) == (0, "")
    assert f"{folder}/bin/python package/launch/wrap.py --bind core --ended " in job.stdout
    assert job.stdout.count("option --ntasks=2\n") == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(("torchmpi-", "tmp."))]


def test_slurms_script_without_the_package_and_ended_by_a_signal(tmp_path):
    script, bare = printed("slurm", tmp_path), {"PYTHON": "python", "PYTHONPATH": "", "TMPDIR": str(tmp_path)}
    jobs.script(tmp_path, f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', "python")
    job = start(["bash", script, "program.py"], tmp_path, **bare)
    assert job.returncode == 1
    assert job.stderr.endswith(
        " has no torchmpi_py; install it there, or use another Python: PYTHON=.venv/bin/python sbatch ...\n"
    )
    jobs.script(tmp_path, "#!/bin/sh\nls $TMPDIR/tmp.*\nkill $PPID\n", "srun")
    job = start(["bash", script, "program.py"], tmp_path, TMPDIR=str(tmp_path))
    assert (job.returncode, job.stdout.count("tmp.")) == (-signal.SIGTERM, 1)
    assert list(tmp_path.glob("tmp.*")) == []


@needs_mpi
def test_pbs(tmp_path):
    jobs.write(tmp_path, HELLO)
    (tmp_path / "nodes").write_text("localhost\n" * 3)
    settings = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path), "PROGRAM": "program.py a --b"}
    jobs.script(tmp_path, f'#!/bin/sh\nexec {sys.executable} -m torchmpi_py.launch "$@"\n', "torchmpirun")
    job = start(["bash", printed("pbs", tmp_path)], tmp_path, OPTIONS="--log-dir logs", END_AFTER="150", **settings)
    assert (job.returncode, job.stderr) == (0, "")
    for rank in range(3):
        assert (tmp_path / "logs" / f"rank-{rank}.log").read_text() == "3 ['a', '--b'] None\n"
    job = start(["bash", printed("pbs", tmp_path)], tmp_path)
    assert job.returncode != 0
    assert "PROGRAM: is not set; write qsub -v PROGRAM=" in job.stderr


@needs_mpi
def test_kubernetes(tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the MPIJob")
    job = yaml.safe_load(printed("kubernetes", tmp_path).read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["spec"]["mpiImplementation"] == "OpenMPI"  # whose hostfile is `name slots=N`
    replicas = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    (launcher,), (worker,) = (each["template"]["spec"]["containers"] for each in replicas)
    command = launcher["command"] + launcher["args"]
    assert command[:3] == ["torchmpirun", "--hostfile", "/etc/mpi/hostfile"]
    # As the operator starts it, but for the folder of the hostfile, and with this host in place of the workers.
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    jobs.write(tmp_path, HELLO, "train.py")
    own = {variable["name"]: variable["value"] for variable in launcher["env"]}
    words = [str(tmp_path / "hostfile") if word == "/etc/mpi/hostfile" else word for word in command[1:]]
    done = start([sys.executable, "-m", "torchmpi_py.launch", *words], tmp_path, **own)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 ['--epochs', '5'] None\n" * 2
    sshd = shutil.which(worker["command"][0])
    if sshd is not None and os.path.isdir("/run/sshd"):  # -t: read the options and the configuration, and end
        jobs.run("ssh-keygen", "-q", "-N", "", "-f", tmp_path / "key")
        assert jobs.run(sshd, *worker["args"], "-t", "-h", tmp_path / "key", "-f", "/dev/null").returncode == 0
    assert worker["volumeMounts"][0]["mountPath"] == "/dev/shm"
    assert worker["readinessProbe"] == {"tcpSocket": {"port": 22}}  # sshd's default


def test_the_image_has_what_the_job_starts(tmp_path):
    script = printed("kubernetes", tmp_path)
    sed = ["sed", "-n", r"s/^#| \{0,1\}//p", script]
    assert f"{' '.join(sed[:2])} '{sed[2]}' job.yaml > Dockerfile" in script.read_text()  # as its first line says
    dockerfile = jobs.run(*sed).stdout
    assert dockerfile == (ready_scripts.FOLDER / "Dockerfile").read_text()
    # What the image writes for ssh and sshd is configuration that they accept.
    lines = dockerfile.replace("\\\n", "").splitlines()
    writes = next(line for line in lines if "StrictModes" in line and line.startswith("RUN")).removeprefix("RUN ")
    folder = tmp_path / "etc"
    (folder / "sshd_config.d").mkdir(parents=True)
    (folder / "ssh_config.d").mkdir()
    assert jobs.run("sh", "-c", writes.replace("/etc/ssh", str(folder))).returncode == 0
    if shutil.which("ssh"):
        shown = jobs.run("ssh", "-F", folder / "ssh_config.d" / "job.conf", "-G", "somewhere").stdout
        assert "stricthostkeychecking false" in shown
        assert "userknownhostsfile /dev/null" in shown
