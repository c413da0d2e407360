#!/usr/bin/env python
"""Python frames, files and objects of ours that one call passes: ``torchmpirun -n 2 scripts/dev/frames.py [--list]``.

Each call is warmed up first, so what is counted is what every later call pays. Rank 0 prints one line a call: frames in
the calling thread, frames in other threads until the call is complete, distinct files, and the classes of which the
call makes objects. Frames of torch and mpi4py do not count. x is a tensor of 4 bytes.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

WARM_UP = 20


class Recorder:
    """What the package's functions do while a block runs, in this thread and in those begun after ``install``."""

    def __init__(self) -> None:
        self.is_on = False
        self.main = threading.get_ident()
        self.frames: list[tuple[bool, str, str]] = []  # (in the calling thread, module, function)
        self.made: dict[int, str] = {}  # the class of each object made
        self._kept: list[object] = []  # or an id would come twice
        self._last: str | None = None

    def install(self) -> None:
        """Threads that begin from now on are recorded too."""
        threading.setprofile(self._profile)

    def record(self, call: Callable[[], object], last: str | None = None) -> None:
        """Run ``call``, and keep its ``frames`` and the objects ``made``, until a function called ``last`` returns."""
        self.start(last)
        try:
            call()
        finally:
            self.stop()

    def start(self, last: str | None = None) -> None:
        """Record from here on, in this thread too."""
        self.frames, self.made, self._kept, self._last = [], {}, [], last
        self.is_on = True
        sys.setprofile(self._profile)

    def stop(self) -> None:
        """Record no more."""
        sys.setprofile(None)
        self.is_on = False

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not module.startswith("torchmpi_py."):
            return
        if event == "return":
            self.is_on = name != self._last
            return
        self.frames.append((threading.get_ident() == self.main, module.removeprefix("torchmpi_py."), name))
        if name == "__init__":
            made = frame.f_locals[frame.f_code.co_varnames[0]]
            self.made.setdefault(id(made), type(made).__name__)
            self._kept.append(made)


class Steps:
    """Samples for an engine; what the package does from the ``WARM_UP``th to the next one is recorded."""

    def __init__(self, recorder: Recorder, sample: object) -> None:
        self.recorder = recorder
        self.sample = sample

    def __iter__(self) -> Iterator[object]:
        for _ in range(WARM_UP):
            yield self.sample
        self.recorder.start()
        yield self.sample
        self.recorder.stop()


class Case(NamedTuple):
    """A call to record, until a function called ``last`` returns; ``complete`` ends what it began, unrecorded."""

    what: str
    call: Callable[[], object]
    complete: Callable[[], object] = lambda: None
    last: str | None = None


def cases(recorder: Recorder) -> Iterator[Case]:
    """The calls, in the order of the table; the last one is recorded by itself."""
    import torch
    from torch import distributed as dist

    import torchmpi_py as mpi

    x = torch.ones(1)
    yield Case("mpi.allreduce(x)", lambda: mpi.allreduce(x))

    handles: list[mpi.Handle[torch.Tensor]] = []
    yield Case("mpi.allreduce_async(x)", lambda: handles.append(mpi.allreduce_async(x)), lambda: handles.pop().wait())

    network = torch.nn.Linear(8, 1, bias=False)
    backward = mpi.nn.register_async_backward(network)
    inputs = torch.full((2, 8), 1.0 + mpi.rank())
    losses = [network(inputs).sum()]

    def synchronize() -> None:
        backward.synchronize()
        losses[0] = network(inputs).sum()

    yield Case("loss.backward(), up to launch", lambda: losses[0].backward(), synchronize, "launch")
    backward.remove()

    dist.init_process_group("torchmpi", rank=mpi.rank(), world_size=mpi.size(), store=dist.HashStore())
    yield Case("dist.all_reduce(x)", lambda: dist.all_reduce(x))
    yield Case("dist.all_reduce(x, async_op=True).wait()", lambda: dist.all_reduce(x, async_op=True).wait())
    dist.destroy_process_group()

    engine = mpi.engine.AllReduceSGDEngine()
    engine.hooks.on_end_epoch = lambda state: None
    run = {"network": torch.nn.Linear(8, 1), "criterion": torch.nn.functional.mse_loss, "lr": 0.1}
    steps = Steps(recorder, (inputs, torch.zeros(2, 1)))
    yield Case("a step of AllReduceSGDEngine", lambda: engine.train(iterator=steps, **run))


def main() -> None:
    """Count, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the frames of each call in order")
    options = parser.parse_args()
    recorder = Recorder()
    recorder.install()

    import torchmpi_py as mpi

    with mpi.session():
        rows = []
        for what, call, complete, last in cases(recorder):
            for _ in range(WARM_UP):
                call()
                complete()
            if not what.startswith("a step"):
                recorder.record(call, last)
                complete()
            here = [frame for frame in recorder.frames if frame[0]]
            files = {module for _, module, _ in recorder.frames}
            rows.append((what, len(here), len(recorder.frames) - len(here), len(files), list(recorder.made.values())))
            if options.list and mpi.rank() == 0:
                print(what)
                for is_here, module, name in recorder.frames:
                    print(f"    {'' if is_here else 'other thread: '}{module}: {name}")
        if mpi.rank() == 0:
            print(f"{'call':41} {'frames':>7} {'elsewhere':>9} {'files':>6}  objects")
            for what, here, elsewhere, files, made in rows:
                print(f"{what:41} {here:7} {elsewhere:9} {files:6}  {len(made)} {' '.join(made)}")


if __name__ == "__main__":
    main()
