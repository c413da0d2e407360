"""Runs PyTorch's distributed tests on every rank of this job; ``pytorch_jobs`` starts it.

Every rank notes in ``F/rank-R.jsonl`` that a case begins and how it ended. After each case the ranks agree whether it
went well on all of them; if it did not, the job ends, as nobody knows what such a case leaves behind, and whoever
started it starts another for the cases that are left; so it does where a case needs processes of its own. A case has a
*deadline*. A rank that has not come to its end by then notes where its threads are and ends the job; so it does soon
after another rank has failed, as it is likely to wait for that one.
"""

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
        if what.get("status") == "failed":
            open(f"{self.folder}/failed-{self.rank}", "w").close()  # let the other ranks know

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
        os._exit(FAILED)


def main() -> None:
    plan = json.loads(sys.argv[1])
    folder = plan["folder"]
    if plan["backend"] != "gloo":
        importlib.import_module(plan["module"])
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    os.environ |= {"WORLD_SIZE": str(comm.size), "TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/again"}
    os.environ["BACKEND"] = plan["backend"]
    from pytorch_cases import Suite

    suite = Suite(plan["backend"], comm, folder)
    suite.try_group()
    cases = plan["cases"] or suite.names()
    notes = Notes(folder, comm.rank)
    notes.write(event="cases", cases=cases)
    run_all(suite, [case for case in cases if case not in plan["done"]], notes, Deadline(notes, plan["seconds"]), comm)


def run_all(suite, cases: list[str], notes: Notes, deadline: Deadline, comm) -> None:
    """Those of ``cases`` that one job can run: a case that needs processes of its own is the only one of its job."""
    deadline.start()
    shared = list(itertools.takewhile(lambda case: case not in suite.rpc_classes, cases))
    for case in shared or cases[:1]:
        deadline.begin(case)
        notes.write(event="begin", case=case)
        begun = time.monotonic()
        outcome = suite.run(case)
        seconds = round(time.monotonic() - begun, 3)
        notes.write(event="end", case=case, seconds=seconds, **vars(outcome))
        if "failed" in comm.allgather(outcome.status):
            sys.stdout.flush()
            os._exit(FAILED)
    deadline.at = float("inf")


if __name__ == "__main__":
    main()
