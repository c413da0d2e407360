"""Check that a job's hosts answer, can run the job, and have the same Python, packages and MPI as this host.

The check runs `host_facts` on each host with the ranks' Python, over the connection with which the MPI starts its
daemons: srun in a Slurm allocation, otherwise ssh or the --launch-agent. The result has one line for each host that
differs from this host, with the remedy. It has one line for each finding of the doctor, with the hosts that have this
finding.
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
_ANSWER_SECONDS = 60.0  # A file system is slow if many hosts read it for the first time.
_MOST_AT_ONCE = 32
_MOST_NAMED = 5  # Limit for the names of hosts with the same finding of the doctor.
_DOCTOR, _SHARED = f"{_PACKAGE.name}.doctor", "/dev/shm"
_SRUN_OPTIONS = ("--quiet", "--mpi=none", "--overlap", "--nodes=1", "--ntasks=1")
_REMEDIES = (  # remedies by the message of ssh; {host} is the host's name
    ("Could not resolve hostname", "check the spelling, or add the name to the DNS or to /etc/hosts"),
    ("Host key verification failed", "check and accept the host's key: ssh {host}"),
    ("Permission denied", "allow a login without a password: ssh-copy-id {host}"),
    ("Connection refused", "start sshd there, or set another program with --launch-agent"),
    ("timed out", "check that the host is up, and that the firewall allows ssh"),
    ("No route to host", "check that the host is up, and that a network connects it with this host"),
)
# Forward only variables that affect Python, the MPI and the GPUs. Other variables of --env may be secret, and every
# user of a host can read the command lines on this host.
_PASSED_ON = (
    host_facts.PROBE,
    *command.FORWARDED,
    *("PATH", "PYTHON", "LD_", "TMPDIR", "OMPI_", "OPAL_", "MPICH_", "I_MPI_", "FI_", "CUDA_"),
)
_NAMES = {"python": "Python", "torch": "torch", "torchmpi_py": "torchmpi_py", "mpi4py": "mpi4py", "mpi": "the MPI"}


def asking_command(spec: JobSpec, plan: StarterCommand, host: str, doctor: str) -> list[str]:
    """Return the command that runs `host_facts` on a host of the job.

    ``plan`` contains the environment of the command. ``doctor`` is `WITH_DOCTOR` or `WITHOUT_DOCTOR`.
    """
    # Send the program as one word without line breaks, because a shell may change other text.
    text = base64.b64encode(zlib.compress(Path(host_facts.__file__).read_bytes())).decode()
    # With `-c` the current folder is first on sys.path, and may contain a user's file zlib.py. Remove this entry.
    source = "p=__import__('sys').path;p[:1]==['']and(p.pop(0));"
    source += f"exec(__import__('zlib').decompress(__import__('base64').b64decode('{text}')))"
    files = [spec.starter, *(os.path.abspath(word) for word in spec.program[:1] if not spec.as_module)]
    python = [sys.executable, "-c", source, str(_PACKAGE), doctor, *files]
    if is_this_host(host):
        return python
    srun = shutil.which("srun", path=plan.environment.get("PATH"))
    if not spec.launch_agent and srun and spec.has_srun:
        return [srun, *_SRUN_OPTIONS, f"--nodelist={host}", *python]
    # Every user can read a command line, so do not send the key of a notebook.
    names = [name for name in plan.forwarded if name.startswith(_PASSED_ON) and name != variables.NOTEBOOK]
    there = shlex.join(["env", *(f"{name}={plan.environment[name]}" for name in names), *python])
    options = [word for name in spec.vendor.ssh_environment for word in shlex.split(plan.environment.get(name, ""))]
    ssh = [spec.launch_agent] if spec.launch_agent else ["ssh", "-o", "BatchMode=yes", *options]
    return [*ssh, host, there]


def ask(spec: JobSpec, plan: StarterCommand, host: str, doctor: str = WITHOUT_DOCTOR) -> dict[str, Any] | str:
    """Return the facts of a host (`host_facts.facts` and `findings`), or a message that explains a missing answer.

    ``plan`` is the command of the job. `host_facts` gets the environment of this command.
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
    except subprocess.TimeoutExpired as error:  # The facts may be complete if only the doctor has not ended.
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        if host_facts.MARK not in output:
            return f"no answer within {_ANSWER_SECONDS:g} s; check that {host} is reachable and runs Python quickly"
    except OSError as error:
        return f"{error.filename}: {error.strerror}; install this program, or set another with --launch-agent"
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
    return f"{lines[-1] if lines else 'no answer'} (exit code {code}); check that {host} is reachable and runs Python"


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Return a message about all differences between this host and another host, with the remedies; "" if none."""
    problems, packages, remedies = [], [], []
    for key, name in _NAMES.items():
        own, other = here[key], there[key]
        if key == "mpi" and there["mpi_error"]:
            problems.append(f"mpi4py cannot load an MPI library ({there['mpi_error']})")
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
        problems.append(f"cannot connect back to this host ({there['blocked']})")
        remedies.append("open the ports between the hosts in the firewall, or set another network with --interface")
    if there["missing"]:
        problems.append(f"no {', '.join(there['missing'])}")
        remedies.append("copy each missing file to the same path there, or share a file system")
    if packages:
        remedies.insert(0, f"run there: {sys.executable} -m pip install {' '.join(packages)}")
    return f"{', '.join(problems)}; {'; '.join(dict.fromkeys(remedies))}" if problems else ""


def _ways(key: str, here: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the remedies for a difference in ``key``: packages to install with pip, and texts for other remedies."""
    if key == "python":
        return [], [f"install Python {here[key]} there, at {sys.executable}"]
    if key == "torchmpi_py":
        return [], [_COPY_PACKAGE]  # The package is not on PyPI.
    if key == "mpi":
        wheels = [mpirun.WHEELS[vendor.name] for vendor in [mpirun.of_library(here[key])] if vendor]
        wheels = [f"{wheel}=={here[wheel]}" for wheel in wheels if here[wheel]]
        return wheels, [] if wheels else ["load the same MPI module there"]
    return [f"{key}=={here[key]}" if here[key] else key], []


class Outcome(NamedTuple):
    """The problems that prevent a job, the warnings, and the message if there are no problems."""

    problems: list[str]
    warnings: list[str]
    text: str


def check(spec: JobSpec, doctor: str = WITH_DOCTOR) -> Outcome:
    """Collect the facts of all hosts, and compare them with the facts of this host."""
    plan = command.build(spec, Path(os.devnull))
    here = ask(spec, plan, "localhost", doctor)
    if isinstance(here, str):
        return Outcome([f"this host: {here}"], [], "")
    hosts = spec.host_names
    others = [host for host in hosts if not is_this_host(host)]
    own_name, has_ranks_here = f"{here['host']} (this host)", not hosts or len(others) < len(hosts)
    answers = {own_name: here, **(_ask_others(spec, plan, others, doctor) if others else {})}
    summary = f"{len(answers)} hosts answer and have the same software" if others else "this host can run a job"
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
    """Return the facts of the other hosts, or messages that explain missing answers.

    Without --launch-agent, each of the other hosts also tests a connection to a port of this host.
    """
    # The other host connects to the address from which ssh has connected, which may be an IPv6 address.
    family, is_dual = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
    listening = socket.create_server(("", 0), family=family, backlog=len(others) + 1, dualstack_ipv6=is_dual)
    with listening as probe, ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        # Do not test the connection with --launch-agent, because an agent may forward this host's environment. Then
        # SSH_CONNECTION would contain the address of the user's own machine.
        if not spec.launch_agent:
            variables_there = {**plan.environment, host_facts.PROBE: str(probe.getsockname()[1])}
            plan = replace(plan, environment=variables_there, forwarded=(*plan.forwarded, host_facts.PROBE))
        return dict(zip(others, pool.map(lambda host: ask(spec, plan, host, doctor), others), strict=True))


def _misfit(spec: JobSpec, here: Mapping[str, Any]) -> str:
    return mpirun.misfit(spec.vendor, spec.starter, here["mpi"], here["mpi_error"])


def _findings(answer: Mapping[str, Any], vendor: mpirun.Vendor, *, is_to_be_there: bool) -> list[dict[str, str]]:
    """Return the doctor's problems and warnings on a host, for the MPI of the job.

    If the doctor should have run but returned no findings, the result is a warning.
    """
    findings = answer.get("findings")
    if isinstance(findings, list):
        return [
            {**each, "level": "warning"} if each["subject"] == _SHARED and not vendor.shared_bytes else each
            for each in findings
            if each["level"] != "ok"
        ]
    if not is_to_be_there:
        return []  # The doctor may be missing in a different version of the package.
    text, remedy = f"could not be examined: {findings or 'no answer'}", f"run there: {sys.executable} -m {_DOCTOR}"
    return [{"level": "warning", "subject": "host", "text": text, "remedy": remedy}]


def _merged(examined: Mapping[str, list[dict[str, str]]], level: str) -> list[str]:
    """Return the doctor's findings of a level as lines, with one line for all hosts that share a finding.

    Two findings count as equal if they differ only in numbers and in the name of the host.
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
    """Return the versions of the software on this host, as lines.

    ``no_starter`` is a message if there is no mpirun, else "".
    """
    here = ask(spec, command.build(spec, Path(os.devnull)), "localhost")
    if isinstance(here, str):
        return [here]
    *packages, mpi = _versions(here)
    problem = no_starter or _misfit(spec, here)
    return [*packages, f"MPI: {problem}" if problem else f"{mpi} ({spec.starter})"]


def refuse_misfit(spec: JobSpec) -> None:
    """Raise LaunchError if mpirun and the MPI library that mpi4py loads do not match.

    If the library is in mpirun's own prefix, return without loading mpi4py, which takes time.
    """
    variables_of_user, own = {**spec.environment, **spec.variables}, mpirun.own_libraries(spec.vendor, spec.starter)
    is_own = variables_of_user.get("MPI4PY_LIBMPI", next(filter(os.path.isfile, own), "")) in own
    # Only mpi4py's wheels support several MPIs. Other builds support one, which may be a different MPI.
    is_own &= any(next(Path(folder).glob("mpi4py/MPI.mpich.*"), None) for folder in sys.path)
    if not spec.vendor.label or (is_own and "MPI4PY_MPIABI" not in variables_of_user):
        return
    here = ask(spec, command.build(spec, Path(os.devnull)), "localhost")
    # This host may be a login node, without the files that the library needs.
    if isinstance(here, str) or (spec.host_names and not here["mpi"]):
        return
    if misfit := _misfit(spec, here):
        raise LaunchError(misfit)


def _versions(facts: Mapping[str, Any]) -> list[str]:
    packages = [f"{_NAMES[key]} {facts[key] or 'missing'}" for key in ("torchmpi_py", "python", "torch", "mpi4py")]
    return [*packages, facts["mpi"] or "MPI:"]
