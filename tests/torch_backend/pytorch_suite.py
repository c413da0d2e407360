"""Runs PyTorch's distributed tests on every rank of this job; ``pytorch_jobs`` starts it.

    torchmpirun -n 3 tests/torch_backend/pytorch_suite.py --backend torchmpi --folder F

Every rank notes in ``F/rank-R.jsonl`` that a case begins and how it ended. After each case the ranks agree whether it
went well on all of them; if it did not, the job ends, as nobody knows what such a case leaves behind, and whoever
started it starts another for the cases that are left; so it does where a case needs processes of its own. A case has a
*deadline*. A rank that has not come to its end by then notes where its threads are and ends the job; so it does soon
after another rank has failed, as it is likely to wait for that one.
"""

import argparse
import faulthandler
import importlib
import itertools
import json
import os
import sys
import threading
import time
import traceback

FAILED = 1  # the exit code of a job that ends early
AFTER_FAILURE_SECONDS = 5.0  # what is left to the other ranks
WATCH_SECONDS = 0.2


class Notes:
    """What this rank has to tell, one line of JSON for each event."""

    def __init__(self, folder: str, rank: int):
        self.folder, self.rank = folder, rank
        self.file = open(f"{folder}/rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115 (open until the process ends)

    def write(self, **what) -> None:
        self.file.write(json.dumps(what) + "\n")

    def tell_failure(self) -> None:
        """Let the other ranks know that this one has failed."""
        with open(f"{self.folder}/failed-{self.rank}", "w"):
            pass

    def others_failed(self) -> bool:
        return any(name.startswith("failed-") for name in os.listdir(self.folder))


class Deadline(threading.Thread):
    """Ends the job if a case takes too long."""

    def __init__(self, notes: Notes, seconds: float):
        super().__init__(daemon=True, name="deadline")
        self.notes, self.seconds = notes, seconds
        self.case, self.at = "", float("inf")
        self.main = threading.main_thread().ident

    def begin(self, case: str) -> None:
        self.case, self.at = case, time.monotonic() + self.seconds

    def run(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            if self.notes.others_failed():
                self.at = min(self.at, time.monotonic() + AFTER_FAILURE_SECONDS)
            if time.monotonic() > self.at:
                self.end()

    def end(self) -> None:
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in stack]
        inside = [place for place in places if place.startswith("distributed_test.py")]
        reason = f"waits in {places[-1]}, {inside[-1] if inside else 'outside the suite'}"
        self.notes.write(event="end", case=self.case, status="timed out", reason=reason, detail="\n".join(places))
        with open(f"{self.notes.folder}/stacks-{self.notes.rank}.txt", "a") as file:
            file.write(f"{self.case}\n")
            faulthandler.dump_traceback(file)
        os._exit(FAILED)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="torchmpi")
    parser.add_argument("--module", default="torchmpi_py.torch_backend", help="what registers it (unless it is gloo)")
    parser.add_argument("--folder", required=True, help="of this job alone")
    parser.add_argument("--cases", help="a file with the names of the cases to run, one in a line (default: all)")
    parser.add_argument("--but", help="a file with those not to run")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each case")
    return parser.parse_args()


def lines_of(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()


def main() -> None:
    arguments = parsed()
    if arguments.backend != "gloo":
        importlib.import_module(arguments.module)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    os.environ.update(
        WORLD_SIZE=str(comm.size),
        TEMP_DIR=arguments.folder,
        INIT_METHOD=f"file://{arguments.folder}/again",
        BACKEND=arguments.backend,
    )
    from pytorch_cases import Suite

    suite = Suite(arguments.backend, comm, arguments.folder)
    suite.try_group()
    cases = lines_of(arguments.cases) if arguments.cases else suite.names()
    but = set(lines_of(arguments.but)) if arguments.but else set()
    notes = Notes(arguments.folder, comm.rank)
    notes.write(event="cases", cases=cases)
    run_all(suite, [case for case in cases if case not in but], notes, Deadline(notes, arguments.seconds), comm)


def run_all(suite, cases: list[str], notes: Notes, deadline: Deadline, comm) -> None:
    deadline.start()
    for case in apart(cases, suite.rpc_classes):
        deadline.begin(case)
        notes.write(event="begin", case=case)
        begun = time.monotonic()
        outcome = suite.run(case)
        seconds = round(time.monotonic() - begun, 3)
        notes.write(event="end", case=case, seconds=seconds, **vars(outcome))
        if outcome.status == "failed":
            notes.tell_failure()
        if "failed" in comm.allgather(outcome.status):
            sys.stdout.flush()
            os._exit(FAILED)
    deadline.at = float("inf")


def apart(cases: list[str], alone) -> list[str]:
    """The first cases: a case that needs processes of its own is the only one of its job."""
    if cases and cases[0] in alone:
        return cases[:1]
    return list(itertools.takewhile(lambda case: case not in alone, cases))


if __name__ == "__main__":
    main()
