"""Starts the jobs that run PyTorch's distributed tests, and puts together what their ranks noted.

The outcome of a case is the worst of its ranks': a failure counts more than a rank that waits for the one that failed.
A case that a job has begun and of which a rank did not tell the end has *died* with that rank. Cases with RPC have a
second chance: its shutdown over TCP got stuck with gloo too, in one of fifty jobs on a busy machine.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytorch_rpc

TORCHMPIRUN = [sys.executable, "-m", "torchmpi_py.launch"]
SUITE = Path(__file__).with_name("pytorch_suite.py")
BAD = ["failed", "died", "timed out"]
WORST_FIRST = [*BAD, "passed", "skipped"]
RPC = {case for cases in pytorch_rpc.CASES.values() for case in cases}
MODULE = "torchmpi_py.torch_backend"
JOB_SECONDS = 900


@dataclasses.dataclass
class Result:
    """How a case ended."""

    case: str
    status: str
    guise: str = ""
    reason: str = ""
    seconds: float = 0.0
    detail: str = ""


def run(backend: str, ranks: int, folder: Path, cases=None, *, module: str = MODULE, seconds: float = 60.0) -> dict:
    """Run cases (default: all) on a number of ranks, in as many jobs as that takes: ``{case: Result}``.

    ``module`` registers the backend (default: ours); a case may take so many ``seconds``.
    """
    results: dict[str, Result] = {}
    retried: set[str] = set()
    wanted = None
    for number in range(1000):
        place = folder / f"job-{number}"
        for name in ("barrier", "test_dir"):  # those that PyTorch makes for a case
            (place / name).mkdir(parents=True)
        plan = {"backend": backend, "module": module, "seconds": seconds, "cases": cases, "done": list(results)}
        code = start(ranks, place, plan | {"folder": str(place)})
        begun, known = read(place, ranks)
        wanted = known or wanted
        again = {case for case, result in begun.items() if case in RPC and result.status in BAD} - retried
        retried |= again
        results.update({case: result for case, result in begun.items() if case not in again})
        if wanted and set(wanted) <= set(results):
            return {case: results[case] for case in wanted}
        if not begun:
            output = (place / "output.txt").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"a job on {ranks} ranks ended with code {code} and ran no case\n{output}")
    raise AssertionError("no end")


def start(ranks, place: Path, plan: dict) -> int:
    """One job, for the cases that have no result yet."""
    launcher = [*TORCHMPIRUN, "-n", str(ranks), "--bind", "none", "--timeout", str(JOB_SECONDS)]
    with open(place / "output.txt", "w") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        command = [*launcher, str(SUITE), json.dumps(plan)]
        return subprocess.run(command, timeout=JOB_SECONDS + 60, check=False, **streams).returncode


def read(place: Path, ranks: int) -> tuple[dict, list]:
    """The results of the cases that a job has begun, and the names of all."""
    ends: dict[str, dict[int, dict]] = {}
    known: list = []
    for rank in range(ranks):
        path = place / f"rank-{rank}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            note = json.loads(line)
            if note["event"] == "cases":
                known = note["cases"]
            else:
                ends.setdefault(note["case"], {})
                if note["event"] == "end":
                    ends[note["case"]].setdefault(rank, note)  # the first: the deadline may strike after the end
    told = [line for line in (place / "output.txt").read_text(errors="replace").splitlines() if "torchmpirun:" in line]
    last = told[-1] if told else "ended without a word"
    return {case: put_together(case, of_ranks, ranks, last) for case, of_ranks in ends.items()}, known


def put_together(case: str, of_ranks: dict, ranks: int, last: str) -> Result:
    """One result of a case from what its ranks told, and, of one that died, from the last words of the launcher."""
    notes = dict(of_ranks)
    for rank in set(range(ranks)) - set(notes):
        notes[rank] = {"status": "died", "reason": last}
    rank, note = min(notes.items(), key=lambda item: (WORST_FIRST.index(item[1]["status"]), item[0]))
    told = {key: value for key, value in note.items() if key in ("status", "guise", "reason", "seconds", "detail")}
    if told["status"] in BAD:
        told["reason"] = f"rank {rank}: {told['reason']}"
    return Result(case, **told)


def counts(results: dict) -> str:
    """``90 passed, 195 skipped``."""
    statuses = [result.status for result in results.values()]
    return ", ".join(f"{statuses.count(status)} {status}" for status in WORST_FIRST if status in statuses)
