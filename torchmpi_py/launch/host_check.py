"""Whether the hosts of a job can run it: each answers, is fit, and has the same Python, packages and MPI as this host.

Each host is asked by the way that its ranks take: in an allocation of Slurm by srun, as the MPIs start their daemons
there; else by ssh or the --launch-agent. There `host_facts` runs under the ranks' Python. What differs from this host
is a line for each host, with the remedy; what the doctor finds is a line for all hosts of which it is true.
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
_COPY_PACKAGE = f"copy {_PACKAGE} there, or share it by a common file system"
_ANSWER_SECONDS = 60.0  # a cold file system on many hosts at once is slow
_MOST_AT_ONCE = 32
_MOST_NAMED = 5  # hosts of which the doctor says the same
_DOCTOR, _SHARED = f"{_PACKAGE.name}.doctor", "/dev/shm"
_SRUN_OPTIONS = ("--quiet", "--mpi=none", "--overlap", "--nodes=1", "--ntasks=1")
_REMEDIES = (  # for what ssh says, with the host's name
    ("Could not resolve hostname", "check the spelling, or add the name to the DNS or to /etc/hosts"),
    ("Host key verification failed", "accept its key once: ssh {host}"),
    ("Permission denied", "let this user in without a password: ssh-copy-id {host}"),
    ("Connection refused", "start sshd there, or name the way with --launch-agent"),
    ("timed out", "is the host up, and does a firewall let ssh pass?"),
    ("No route to host", "is the host up, and on a network with this one?"),
)
# What is passed on: what loads Python, the MPI and the GPUs. The rest of --env may be secret, and every user of a host
# can read a command line there.
_PASSED_ON = (
    host_facts.PROBE,
    *command.FORWARDED,
    *("PATH", "PYTHON", "LD_", "TMPDIR", "OMPI_", "OPAL_", "MPICH_", "I_MPI_", "FI_", "CUDA_"),
)
_NAMES = {"python": "Python", "torch": "torch", "torchmpi_py": "torchmpi_py", "mpi4py": "mpi4py", "mpi": "the MPI"}


def asking_command(spec: JobSpec, made: StarterCommand, host: str, doctor: str) -> list[str]:
    """The command that asks a host of a job what it has."""
    # In one word, without line breaks, for any shell there may be.
    text = base64.b64encode(zlib.compress(Path(host_facts.__file__).read_bytes())).decode()
    # Of `-c` the current folder comes first on sys.path, where a user may have a zlib.py.
    source = "p=__import__('sys').path;p[:1]==['']and(p.pop(0));"
    source += f"exec(__import__('zlib').decompress(__import__('base64').b64decode('{text}')))"
    files = [spec.starter, *(os.path.abspath(word) for word in spec.program[:1] if not spec.as_module)]
    python = [sys.executable, "-c", source, str(_PACKAGE), doctor, *files]
    if is_this_host(host):
        return python
    srun = shutil.which("srun", path=made.environment.get("PATH"))
    if not spec.launch_agent and srun and spec.has_srun:
        return [srun, *_SRUN_OPTIONS, f"--nodelist={host}", *python]
    # On a command line, which every user can read: without the key of a notebook.
    names = [name for name in made.forwarded if name.startswith(_PASSED_ON) and name != variables.NOTEBOOK]
    there = shlex.join(["env", *(f"{name}={made.environment[name]}" for name in names), *python])
    options = [word for name in spec.vendor.ssh_environment for word in shlex.split(made.environment.get(name, ""))]
    ssh = [spec.launch_agent] if spec.launch_agent else ["ssh", "-o", "BatchMode=yes", *options]
    return [*ssh, host, there]


def ask(spec: JobSpec, made: StarterCommand, host: str, doctor: str = WITHOUT_DOCTOR) -> dict[str, Any] | str:
    """What a host has (`host_facts.facts`, and `findings`); else why there is no answer, with the remedy.

    ``made``: the command of the job, whose environment the host gets.
    """
    code, errors = 0, ""
    try:
        asked = subprocess.run(
            asking_command(spec, made, host, doctor),
            env=made.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
        output, code, errors = asked.stdout, asked.returncode, asked.stderr
    except subprocess.TimeoutExpired as error:  # perhaps of the doctor alone
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        if host_facts.MARK not in output:
            return f"no answer within {_ANSWER_SECONDS:g} s; try it by hand: ssh {host} true"
    except OSError as error:
        return f"{error.filename}: {error.strerror}; install it, or name another way with --launch-agent"
    answer: dict[str, Any] = {}
    for line in output.splitlines():
        before, mark, after = line.partition(host_facts.MARK)
        if mark and not before:
            answer |= json.loads(after)
    return answer or _why_silent(host, code, errors.splitlines())


def _why_silent(host: str, code: int, said: list[str]) -> str:
    lines = [line.strip() for line in said if line.strip()]
    for pattern, remedy in _REMEDIES:
        for line in lines:
            if pattern in line:
                return f"{line}; {remedy.format(host=host)}"
    if any(sys.executable in line for line in lines) or code == 127:
        return (
            f"no Python at {sys.executable}; make the environment there at the same path, or share it by a common "
            "file system"
        )
    return f"{lines[-1] if lines else 'no answer'} (exit code {code}); try it by hand: ssh {host} true"


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """What a host lacks, or has otherwise than this one, with the remedy; "" if nothing."""
    found, wanted, remedies = [], [], []
    for key, name in _NAMES.items():
        own, other = here[key], there[key]
        if key == "mpi" and there["mpi_error"]:
            found.append(f"mpi4py loads no MPI ({there['mpi_error']})")
        elif not other and not (key == "mpi" and not there["mpi4py"]):
            place = f" at {_PACKAGE}" if key == "torchmpi_py" else ""
            found.append(f"no {name}{place}" + (f" ({own} here)" if own else ""))
        elif other != own and own and other:
            found.append(f"{name} is {other} ({own} here)")
        elif key == "torchmpi_py" and other and there["checksum"] != here["checksum"]:
            found.append(f"torchmpi_py {other} has other files than here")
        else:
            continue
        of_pip, by_hand = _ways(key, here)
        wanted += of_pip
        remedies += by_hand
    if there["blocked"]:
        found.append(f"it cannot connect to this host ({there['blocked']})")
        remedies.append("open the ports between the hosts in the firewall, or name another network with --interface")
    if there["missing"]:
        found.append(f"no {', '.join(there['missing'])}")
        remedies.append("copy it to the same path there, or use a common file system")
    if wanted:
        remedies.insert(0, f"run there: {sys.executable} -m pip install {' '.join(wanted)}")
    return f"{', '.join(found)}; {'; '.join(dict.fromkeys(remedies))}" if found else ""


def _ways(key: str, here: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What pip has to install to make a host equal to this one in this respect, and what has to be done by hand."""
    if key == "python":
        return [], [f"install Python {here[key]} there, at {sys.executable}"]
    if key == "torchmpi_py":
        return [], [_COPY_PACKAGE]  # there is no release that pip could install
    if key == "mpi":
        wheels = [mpirun.WHEELS[vendor.name] for vendor in [mpirun.of_library(here[key])] if vendor]
        wheels = [f"{wheel}=={here[wheel]}" for wheel in wheels if here[wheel]]
        return wheels, [] if wheels else ["load the same MPI module there"]
    return [f"{key}=={here[key]}" if here[key] else key], []


class Outcome(NamedTuple):
    """What keeps a job from running on the hosts, what makes it slower, and what is said where it can run."""

    problems: list[str]
    warnings: list[str]
    text: str


def check(spec: JobSpec, doctor: str = WITH_DOCTOR) -> Outcome:
    """Ask this host and all others."""
    made = command.build(spec, Path(os.devnull))
    here = ask(spec, made, "localhost", doctor)
    if isinstance(here, str):
        return Outcome([f"this host: {here}"], [], "")
    hosts = spec.host_names
    others = [host for host in hosts if not is_this_host(host)]
    with socket.create_server(("", 0), backlog=len(others) + 1) as probe, ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        if not spec.launch_agent:  # one that passes this host's environment on would name the user's own machine
            variables_there = {**made.environment, host_facts.PROBE: str(probe.getsockname()[1])}
            made = replace(made, environment=variables_there, forwarded=(*made.forwarded, host_facts.PROBE))
        answers = dict(zip(others, pool.map(lambda host: ask(spec, made, host, doctor), others), strict=True))
    own_name, has_ranks_here = f"{here['host']} (this host)", not hosts or len(others) < len(hosts)
    answers = {own_name: here, **answers}
    who = f"{len(answers)} hosts answer, and have the same" if others else "this host can run a job"
    lines, examined = [], {}
    for host, answer in answers.items():
        misfit = _misfit(spec, here) if host == own_name else ""
        text = answer if isinstance(answer, str) else misfit or differences(here, answer)
        if text:
            lines.append(f"{host}: {text}")
        if not isinstance(answer, str) and (host != own_name or has_ranks_here):
            examined[host] = _findings(answer, spec.vendor, is_to_be_there=doctor == WITH_DOCTOR and not text)
    problems, warnings = (_merged(examined, level) for level in ("problem", "warning"))
    return Outcome(lines + problems, warnings, f"{who}: {', '.join(_versions(here))}")


def _misfit(spec: JobSpec, here: Mapping[str, Any]) -> str:
    return mpirun.misfit(spec.vendor, spec.starter, here["mpi"], here["mpi_error"])


def _findings(answer: Mapping[str, Any], vendor: mpirun.Vendor, *, is_to_be_there: bool) -> list[dict[str, str]]:
    """What the doctor has found on a host, for the MPI of the job; a warning if it has not answered but ought to."""
    findings = answer.get("findings")
    if isinstance(findings, list):
        return [
            {**each, "level": "warning"} if each["subject"] == _SHARED and not vendor.shared_bytes else each
            for each in findings
            if each["level"] != "ok"
        ]
    if not is_to_be_there:
        return []  # another version of the package may have no such doctor
    text, remedy = f"could not be examined: {findings or 'no answer'}", f"run there: {sys.executable} -m {_DOCTOR}"
    return [{"level": "warning", "subject": "host", "text": text, "remedy": remedy}]


def _merged(examined: Mapping[str, list[dict[str, str]]], level: str) -> list[str]:
    """The doctor's findings of a level, by host: a line for all hosts with the same but for numbers and their names."""
    lines: dict[str, tuple[str, list[str]]] = {}
    prefix = "warning, " if level == "warning" else ""
    for host, findings in examined.items():
        for finding in findings:
            if finding["level"] == level:
                text = f"{prefix}{finding['subject']}: {finding['text']}; {finding['remedy']}"
                alike = re.sub(rf"\b{re.escape(host.partition(' ')[0])}\b|\d+", "#", text)
                lines.setdefault(alike, (text, []))[1].append(host)
    return [f"{_named(hosts)}: {text}" for text, hosts in lines.values()]


def _named(hosts: list[str]) -> str:
    if len(hosts) <= _MOST_NAMED:
        return ", ".join(hosts)
    return f"{', '.join(hosts[: _MOST_NAMED - 1])} and {len(hosts) - _MOST_NAMED + 1} more"


def versions(spec: JobSpec, no_starter: str) -> list[str]:
    """What this host has, a line each; ``no_starter``: why the MPI has no starter."""
    here = ask(spec, command.build(spec, Path(os.devnull)), "localhost")
    if isinstance(here, str):
        return [here]
    *packages, mpi = _versions(here)
    problem = no_starter or _misfit(spec, here)
    return [*packages, f"MPI: {problem}" if problem else f"{mpi} ({spec.starter})"]


def refuse_misfit(spec: JobSpec) -> None:
    """LaunchError if starter and library do not fit; asks mpi4py only where the library is not the starter's own."""
    variables_of_user, own = {**spec.environment, **spec.variables}, mpirun.own_libraries(spec.vendor, spec.starter)
    is_own = variables_of_user.get("MPI4PY_LIBMPI", next(filter(os.path.isfile, own), "")) in own
    is_own &= any(next(Path(folder).glob("mpi4py/MPI.mpich.*"), None) for folder in sys.path)  # else built for one MPI
    if not spec.vendor.label or (is_own and "MPI4PY_MPIABI" not in variables_of_user):
        return
    here = ask(spec, command.build(spec, Path(os.devnull)), "localhost")
    if isinstance(here, str) or (spec.host_names and not here["mpi"]):  # a login node may lack what the library needs
        return
    if misfit := _misfit(spec, here):
        raise LaunchError(misfit)


def _versions(facts: Mapping[str, Any]) -> list[str]:
    packages = [f"{_NAMES[key]} {facts[key] or 'missing'}" for key in ("torchmpi_py", "python", "torch", "mpi4py")]
    return [*packages, facts["mpi"] or "MPI:"]
