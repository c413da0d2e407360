"""PyTorch's own distributed tests, which ship in its wheel, as cases that the ranks of a running job can carry out.

The cases are the methods of ``DistributedTest``. PyTorch spawns the ranks of each case; here they are the ranks of the
job. Each case has a process group of its own, whatever else is done by all ranks in the same order, and the barrier of
the cases, which PyTorch makes of files, is one of MPI.

Most cases have a condition on the *name* of the backend: "only gloo supports timeouts", "only MPI supports all_to_all".
It says what the backends of the wheel can do, and lets no backend through that it does not know. So the module is
imported once under each *guise*, a name that its constant BACKEND has: the backend's own, then "gloo", then "mpi".
A case is carried out under the first guise that lets it through. The name is all that changes: ``really`` has every
group, whatever name a case asks for, made of the backend under test, and looks at what was made.

Another condition asks for eight ranks, of all backends but "mpi". It is asked when a case is called, of an environment
variable; that says "mpi" where there are three ranks, which are enough for each of these cases.
"""

import contextlib
import dataclasses
import datetime as dt
import importlib.util
import os
import sys
import traceback
import unittest

import pytorch_rpc
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal import common_distributed, common_utils

SUITE = "torch.testing._internal.distributed.distributed_test"
SKIPS = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


@dataclasses.dataclass
class Outcome:
    """How a case ended on this rank."""

    status: str  # "passed", "failed" or "skipped"
    guise: str
    reason: str = ""
    detail: str = ""


def really(backend: str) -> None:
    """Make every group of ``backend``."""
    make = distributed_c10d._new_process_group_helper

    def make_really(group_size, group_rank, ranks, name, *arguments, **keywords):
        group, store = make(group_size, group_rank, ranks, backend, *arguments, **keywords)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            assert dist.get_backend(group) == backend, dist.get_backend(group)
            assert type(group) is not dist.ProcessGroup, "this group is carried by a backend of torch's own"
        return group, store

    distributed_c10d._new_process_group_helper = make_really


class Suite:
    """The cases, for a backend. ``comm`` is a communicator of the suite's own."""

    def __init__(self, backend: str, comm, folder: str):
        self.backend, self.comm, self.folder = backend, comm, folder
        self.groups = 0
        features = common_distributed.DistTestCases.backend_feature
        guises = ["gloo"]
        if backend != "gloo":
            guises = [backend, "gloo", "mpi"]
            for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
                features[feature].add(backend)
            really(backend)
        self.classes = {guise: self.imported(guise) for guise in guises}
        self.rpc_classes = pytorch_rpc.classes(comm.size)
        os.environ["BACKEND"] = "mpi" if backend != "gloo" and comm.size >= 3 else backend

    def imported(self, guise: str) -> type:
        """The class of the cases, in the module imported under a guise."""
        os.environ["BACKEND"] = guise
        name = f"distributed_test_as_{guise}"
        found = importlib.util.spec_from_file_location(name, importlib.util.find_spec(SUITE).origin)
        module = sys.modules[name] = importlib.util.module_from_spec(found)  # objects of it are pickled by its name
        found.loader.exec_module(module)

        class Cases(module.TestDistBackend, module.DistributedTest._DistTestBase):
            timeouts = module.CUSTOM_PG_TIMEOUT
            _barrier = staticmethod(lambda **_: self.comm.Barrier())

        return Cases

    def names(self) -> list[str]:
        """All cases: those of ``DistributedTest``, then those with RPC. ``monitored_barrier`` is for gloo alone."""
        names = [name for name in dir(next(iter(self.classes.values()))) if name.startswith("test_")]
        return [*sorted(name for name in names if "monitored_barrier" not in name), *self.rpc_classes]

    def try_group(self) -> None:
        """Without a group there is no need to try the cases."""
        self.start_group(60)
        dist.destroy_process_group()

    def run(self, name: str) -> Outcome:
        """Carry out a case under the first guise that lets it through."""
        if name in self.rpc_classes:
            return self.attempt("gloo", self.rpc_classes[name], name)
        skipped = []
        for guise, cases in self.classes.items():
            outcome = self.attempt(guise, cases, name)
            if outcome.status != "skipped":
                return outcome
            skipped.append(outcome)
        telling = [outcome for outcome in skipped if outcome.guise not in outcome.reason.split()] or skipped[:1]
        return dataclasses.replace(telling[0], reason="; ".join(dict.fromkeys(outcome.reason for outcome in telling)))

    def attempt(self, guise: str, cases: type, name: str) -> Outcome:
        method = getattr(cases, name)
        if getattr(method, "__unittest_skip__", False):
            return Outcome("skipped", guise, method.__unittest_skip_why__)
        case = cases(name)
        case.rank, case.file_name = self.comm.rank, os.path.join(self.folder, f"case-{name}-{guise}")
        try:
            with restored_environment():
                if name not in self.rpc_classes:
                    self.start_group(case.timeouts.get(name, 60))
                common_utils.set_rng_seed()
                skipped = outcome_of_call(getattr(case, name))
                self.comm.Barrier()
                if dist.is_initialized():
                    dist.destroy_process_group()
        except Exception as error:
            return Outcome("failed", guise, told(error), traceback.format_exc())
        return Outcome("skipped", guise, skipped) if skipped else Outcome("passed", guise)

    def start_group(self, seconds: int) -> None:
        """The default group. The ranks meet in a file: a store on TCP looks up names, which may take seconds."""
        self.groups += 1
        where = f"file://{self.folder}/group-{self.groups}"
        timeout = dt.timedelta(seconds=seconds)
        dist.init_process_group(self.backend, where, timeout, self.comm.size, self.comm.rank)


def outcome_of_call(call) -> str:
    """Why a case is skipped, or nothing: some conditions end the process that PyTorch has spawned, with a code."""
    try:
        call()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        if end.code not in SKIPS:
            raise RuntimeError(f"the case ends its process with code {end.code!r}") from None
        return SKIPS[end.code]
    return ""


@contextlib.contextmanager
def restored_environment():
    """What a case changes in the environment is for its own process, upstream."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist.set_debug_level_from_env()


def told(error: BaseException) -> str:
    """The last line of a traceback, and where in the case it was."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.endswith("distributed_test.py")]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]} (line {lines[-1] if lines else '?'} of the suite)"
