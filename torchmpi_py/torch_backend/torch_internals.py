"""What the backend does to torch itself, and every private name of torch that it needs. Tried on torch 2.10 to 2.15.

setup.cfg allows torch from 2.4 on, which has what the rest of the package needs; `check_version` refuses groups on
older ones than 2.10. ``import torch`` runs `prepare`, so nothing heavier than torch is imported here.

- The table of backends holds this one without listing it.
- ``env://`` leads to this package's handler.
- A string such as "cpu:gloo,cuda:torchmpi" makes a group of "torchmpi" alone: torch lets a backend that is written in
  Python take the whole group over, after it has made the other one for nothing.
- In an MPI job of several ranks, one line of log says that their default group is made on another CPU backend, if the
  program has not named that one.
- ``_set_pg_timeout``, which knows gloo and NCCL only, reaches the groups of this backend.
- The work by which a model says, under ``model.join(divide_by_initial_world_size=False)``, that its rank has inputs
  left is made in Python and handed over to C++. C++ asks a ``Work`` that is written in Python only as long as its
  Python object lives; afterwards ``wait()`` is the one of the C++ class, which waits for ever. So the work is kept here
  until the next one. (C++ keeps the objects of the calls that it makes itself.)
- C++ wants a backend of its own in a process group, and asks it for devices and names. It gets a placeholder, which
  raises if a collective reaches it.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers

from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import variables
from torchmpi_py.torch_backend.backend_name import NAME

logger = logging.getLogger("torchmpi_py")

DEFAULT_SECONDS = 30 * 60
"""torch's own deadline of an operation, for all backends but NCCL."""

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")
_UNNAMED = "undefined"
_ON_THE_CPU = {"gloo", "mpi", "ucc"}
_REMEDY = f'call dist.init_process_group("{NAME}") before, or give the library that name'

_last_notice: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by model


def prepare(handler_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change torch's tables and functions. ``handler_of`` makes the handler of ``env://`` from the former one."""
    backend: Any = distributed.Backend
    backend._plugins = _Plugins(backend._plugins)
    _rendezvous_handlers["env"] = handler_of(_rendezvous_handlers["env"])
    _wrap_making()
    _wrap_set_timeout()


class _Plugins(dict[str, Any]):
    """torch's table of backends, in which this one is found, but not listed.

    Where any is listed, torch gives a group such as "cpu:gloo" no default backend, and warns when it is destroyed.
    """

    def __init__(self, former: dict[str, Any]) -> None:
        super().__init__(former)
        self._ours = self.pop(NAME.upper())

    def __contains__(self, name: object) -> bool:
        return name == NAME.upper() or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name != NAME.upper():
            raise KeyError(name)
        return self._ours


def _wrap_making() -> None:
    """Have torch make a group of this backend where it is named, and log where the default group is another's."""
    former = distributed_c10d._new_process_group_helper

    @functools.wraps(former)
    def make(group_size: int, group_rank: int, ranks: list[int], backend: str, *others: Any, **options: Any) -> Any:
        names = _names(backend)
        if not ranks:
            _warn_if_elsewhere(backend, names)
        return former(group_size, group_rank, ranks, _chosen(backend, names), *others, **options)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def _wrap_set_timeout() -> None:
    """Let torch's function set the timeout of this backend's groups too."""
    former = distributed_c10d._set_pg_timeout

    @functools.wraps(former)
    def set_timeout(timeout: dt.timedelta, group: Any = None) -> None:
        used: Any = group or distributed.group.WORLD
        if is_group(used):
            used.set_timeout(timeout)
        else:
            former(timeout, group)

    distributed_c10d._set_pg_timeout = set_timeout


def is_group(group: Any) -> bool:
    """Whether ``group`` is a process group of this backend."""
    return isinstance(group, distributed.ProcessGroup) and group.name() == NAME


def group_of_hook(hook: str, given: Any) -> Any:
    """The process group for a hook of DDP; None: the default one. RuntimeError or TypeError if it is none of ours."""
    group = distributed.group.WORLD if given is None else given
    if group is None:
        raise RuntimeError(f"{hook}: there is no default process group (any more); call init_process_group first")
    if not is_group(group):
        raise TypeError(f"{hook}: {group!r} is not a process group of backend torchmpi; give the one of the module")
    return group


def check_bucket(hook: str, x: Tensor) -> Tensor:
    """The gradients of a bucket of DDP; TypeError if they are sparse."""
    if x.is_sparse:
        raise TypeError(
            f"{hook}: a bucket has sparse gradients. Build the layer with sparse=False, or register no hook with DDP: "
            "without one sparse gradients stay sparse"
        )
    return x


def _names(backend: str) -> set[str]:
    """The backends that torch would make a group of, given a name, device strings, or nothing."""
    if backend == _UNNAMED:
        backend = str(distributed_c10d.BackendConfig(distributed.Backend(backend)))
    return {part.rpartition(":")[2] for part in backend.lower().split(",")}


def _chosen(backend: str, names: set[str]) -> str:
    """The backend that torch makes: this one where others are named too; without a name, torch's own choice."""
    if NAME in names:
        if len(names) > 1 and _logs():
            rest = " and ".join(sorted(names - {NAME}))
            logger.warning(
                '"%s": %s serves all devices of a group, and %s is not used; give "%s", or make a group of the other '
                'by dist.new_group(backend="%s")',
                backend, NAME, rest, NAME, min(names - {NAME}),
            )  # fmt: skip
        return NAME
    return next(iter(names)) if backend == _UNNAMED and _is_job() and len(names) == 1 else backend


def _warn_if_elsewhere(backend: str, names: set[str]) -> None:
    """One line on rank 0 of an MPI job, if its default group is made on a CPU backend that the program did not name."""
    if not names <= _ON_THE_CPU or not _is_job() or not _logs():
        return
    library = library_of(program())
    if backend == _UNNAMED or library:
        why = f"{library} asks for it" if library else "no backend was named"
        logger.warning(
            'the default group of torch.distributed is made on "%s", and not on MPI: %s. For MPI, %s',
            "/".join(sorted(names)), why, _REMEDY,
        )  # fmt: skip


def _is_job() -> bool:
    """Whether this is a rank among several that an MPI has started, and torchrun has not."""
    return (variables.size_in(os.environ) or 1) > 1 and not variables.is_under_torchrun(os.environ)


def _logs() -> bool:
    return not variables.rank_in(os.environ)


def program() -> FrameType:
    """The innermost frame outside of torch and of this backend: the place in the program that makes a call."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def keeps_bucket() -> bool | None:
    """How C++ calls the caller of this function, if that may be for a bucket of DDP; None if Python does.

    True: in a backward pass, for a bucket that is kept. False: in place of one, on a rank without inputs, for zeros. A
    thread of C++, of which there are some for deeply nested backward passes, has no frame above that.
    """
    frame = sys._getframe(1).f_back
    return True if frame is None else _AROUND_BUCKETS.get(frame.f_code)


_in_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
_in_join = getattr(torch.nn.parallel.DistributedDataParallel, "_match_all_reduce_for_bwd_pass", None)
_AROUND_BUCKETS = {getattr(_in_backward, "__code__", None): True, getattr(_in_join, "__code__", None): False}


def library_of(frame: FrameType) -> str:
    """The name of the installed package that a frame belongs to; empty for the user's own program."""
    parts = frame.f_code.co_filename.split(os.sep)
    found = next((place for place, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    return "" if found is None else parts[found + 1].removesuffix(".py")


def keep_join_notices() -> None:
    """Keep the last work by which each model said that its rank has inputs left. For the first process group."""
    from torch.distributed.algorithms.join import Join, Joinable

    former = Join.notify_join_context

    def notify(joinable: Joinable) -> Any:
        _last_notice[joinable] = work = former(joinable)
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]


def check_version() -> None:
    """TorchMPIError on a torch whose placeholder would not raise if a collective reached it."""
    from torch._C._distributed_c10d import FakeProcessGroup

    if not hasattr(FakeProcessGroup, "Options"):
        raise TorchMPIError(
            f'init_process_group("{NAME}") needs torch 2.10 or later, and this is torch {torch.__version__}: '
            "run pip install --upgrade torch; mpi.start() and all that follows it work with this one"
        )


def add_placeholder(group: Any, rank: int, size: int) -> None:
    """Give ``group`` the placeholder for a C++ backend, for all devices."""
    from torch._C._distributed_c10d import FakeProcessGroup

    factory: Any = FakeProcessGroup
    options = factory.Options()
    options.error_on_collective = True
    kind = distributed.ProcessGroup.BackendType.CUSTOM
    backend = factory._create_internal(rank, size, options)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)


def work_of(future: torch.futures.Future[Any]) -> Any:
    """A Work of C++ for a call whose results are those of ``future``."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    return _create_work_from_future(future)


def raise_on_wait(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Let ``future.wait()`` and ``future.value()`` raise ``error`` in Python, whatever value the future has."""

    def unwrap(_: object) -> None:
        raise error

    future._set_unwrap_func(unwrap)
