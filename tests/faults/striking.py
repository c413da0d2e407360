"""What the programs of trials have in common: the plan, as JSON, and the fault in it, which one rank injects.

``fault`` says on which ``rank``, ``what``, ``where``, and ``at`` which step, which the program counts in ``step``; or
``after`` how many seconds from the first line of the program on, wherever the rank is then.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

plan = json.loads(sys.argv[1])
fault = plan["fault"]
me = next(
    (int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK") if name in os.environ), 0
)
folder = Path(os.environ["FAULTS_JOB"])
is_victim = fault.get("rank") == me
step = -1


def meet():
    """Wait for all ranks to have imported what they need, on a machine where that takes longer than the deadline."""
    (folder / f"came-{me}").touch()
    while plan.get("meets") and len(list(folder.glob("came-*"))) < plan["ranks"]:
        time.sleep(0.01)


def hold():
    """Tell which files in /dev/shm this rank has mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    names = {line[5] for line in lines if len(line) == 6 and line[5].startswith("/dev/shm/")}
    (folder / f"held-{me}").write_text("\n".join(sorted(name for name in names if not name.endswith("(deleted)"))))


def strike():
    """The fault."""
    global is_victim
    is_victim = False  # once
    path = folder / f"fault-{me}"
    part = path.with_name(f"part-{path.name}")  # whoever waits for the mark looks for fault-*
    part.write_text(str(os.getpid()))
    part.rename(path)
    what = fault["what"]
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    elif what in ("exception", "MemoryError"):
        raise {"exception": RuntimeError, "MemoryError": MemoryError}[what]("the fault of this trial")
    else:
        {"sys.exit": sys.exit, "os._exit": os._exit}[what](3 if what == "sys.exit" else 5)


def strike_at(where):
    """If the fault is to be there, and now."""
    if is_victim and fault["where"] == where and step >= fault.get("at", -1):
        strike()


def before(owner, name, where, *, skip=0, after=False):
    """Let a function of the package pass a point of injection, at its call number ``skip`` of the operation."""
    real, calls = getattr(owner, name), {}

    @functools.wraps(real)
    def patched(*args, **kwargs):
        calls[step] = calls.get(step, -1) + 1
        now = calls[step] >= skip
        if now and not after:
            strike_at(where)
        result = real(*args, **kwargs)
        if now and after:
            strike_at(where)
        return result

    setattr(owner, name, patched)


def strike_later(seconds):
    """Strike from another thread."""
    threading.Thread(target=lambda: (time.sleep(seconds), strike()), daemon=True).start()


if is_victim and "after" in fault:
    strike_later(fault["after"])
