"""Change torch where the backend requires it. Only this module uses private names of torch.

The module was tested with torch 2.10 to 2.15. setup.cfg allows torch from 2.4 on, which is enough for the other parts
of the package; `check_version` refuses groups with torch before 2.10. ``import torch`` runs `prepare`, so this module
imports nothing heavier than torch.

- torch's table of backends finds this backend by its name, but does not list it.
- The scheme ``env://`` uses this package's handler.
- A string such as "cpu:gloo,cuda:torchmpi" creates a group of "torchmpi" only. A backend written in Python serves all
  devices of a group, so the other backend would never be used.
- If an MPI job of several ranks creates its default group with another CPU backend, and the program did not choose this
  backend, rank 0 logs a warning.
- The function ``_set_pg_timeout`` supports only gloo and NCCL. Its wrapper also sets the timeout of this backend's
  groups.
- Under ``model.join(divide_by_initial_world_size=False)``, a model announces by an allreduce, the join notice, that its
  rank has inputs left. Python creates the ``Work`` of this call and passes it to C++. C++ calls the Python methods of a
  ``Work`` only while the Python object exists. After that, ``wait()`` of the C++ class blocks forever. So this module
  keeps each ``Work`` until the next join notice. (For its own calls, C++ keeps the Python objects.)
- C++ expects a C++ backend in each process group, and reads devices and names from this backend. So each group contains
  a placeholder, which raises an error if a collective reaches it.
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
"""torch's default timeout of an operation, for all backends except NCCL."""

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")
_UNNAMED = "undefined"
_ON_THE_CPU = {"gloo", "mpi", "ucc"}
_REMEDY = f'call dist.init_process_group("{NAME}") first, or select backend "{NAME}" in your library'

_last_notice: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # model: Work


def prepare(handler_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change torch's tables and functions. ``handler_of`` returns the replacement of torch's handler of ``env://``."""
    backend: Any = distributed.Backend
    backend._plugins = _Plugins(backend._plugins)
    _rendezvous_handlers["env"] = handler_of(_rendezvous_handlers["env"])
    _wrap_making()
    _wrap_set_timeout()


class _Plugins(dict[str, Any]):
    """torch's table of backends, in which a lookup finds this backend, but a listing does not show it.

    If the table listed a backend, torch would give a group such as "cpu:gloo" no default backend, and would warn when
    the group is destroyed.
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
    """Make torch use only this backend for a group whose backend string contains its name.

    Also make rank 0 log a warning if a library or torch selects a CPU backend for the default group.
    """
    former = distributed_c10d._new_process_group_helper

    @functools.wraps(former)
    def make(group_size: int, group_rank: int, ranks: list[int], backend: str, *others: Any, **options: Any) -> Any:
        names = _names(backend)
        if not ranks:
            _warn_if_elsewhere(backend, names)
        return former(group_size, group_rank, ranks, _chosen(backend, names), *others, **options)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def _wrap_set_timeout() -> None:
    """Make torch's ``_set_pg_timeout`` set the timeout of this backend's groups too."""
    former = distributed_c10d._set_pg_timeout

    @functools.wraps(former)
    def set_timeout(timeout: dt.timedelta, group: Any = None) -> None:
        target: Any = group or distributed.group.WORLD
        if is_group(target):
            target.set_timeout(timeout)
        else:
            former(timeout, group)

    distributed_c10d._set_pg_timeout = set_timeout


def is_group(group: Any) -> bool:
    """Return whether ``group`` is a process group of this backend."""
    return isinstance(group, distributed.ProcessGroup) and group.name() == NAME


def group_of_hook(hook: str, state: Any) -> Any:
    """Return the process group that a DDP hook uses: ``state``, or the default group if ``state`` is None.

    Raise RuntimeError if there is no default group, and TypeError if the group has another backend.
    """
    group = distributed.group.WORLD if state is None else state
    if group is None:
        raise RuntimeError(f"{hook}: there is no default process group; call init_process_group first")
    if not is_group(group):
        raise TypeError(f"{hook}: {group!r} is not a process group of backend torchmpi; use one for the module")
    return group


def check_bucket(hook: str, x: Tensor) -> Tensor:
    """Return the gradients of a DDP bucket; raise TypeError if they are sparse."""
    if x.is_sparse:
        raise TypeError(
            f"{hook}: expected dense gradients, found sparse gradients; create the layer with sparse=False, or do not "
            "register a hook, because DDP itself can reduce sparse gradients"
        )
    return x


def _names(backend: str) -> set[str]:
    """Return the names of the backends that torch would create for ``backend``.

    ``backend`` is a name such as "gloo", a string such as "cpu:gloo,cuda:nccl", or "undefined" for torch's default.
    """
    if backend == _UNNAMED:
        backend = str(distributed_c10d.BackendConfig(distributed.Backend(backend)))
    return {part.rpartition(":")[2] for part in backend.lower().split(",")}


def _chosen(backend: str, names: set[str]) -> str:
    """Return the backend string to pass to torch: this backend's name if ``names`` contains it, else ``backend``.

    In an MPI job, replace "undefined" by torch's default, if that is a single backend.
    """
    if NAME in names:
        if len(names) > 1 and _logs():
            rest = " and ".join(sorted(names - {NAME}))
            logger.warning(
                '"%s": %s serves all devices of a group, so %s is not used; pass "%s" only, or create a separate group '
                'with dist.new_group(backend="%s")',
                backend, NAME, rest, NAME, min(names - {NAME}),
            )  # fmt: skip
        return NAME
    return next(iter(names)) if backend == _UNNAMED and _is_job() and len(names) == 1 else backend


def _warn_if_elsewhere(backend: str, names: set[str]) -> None:
    """Log a warning on rank 0 of an MPI job if its default group uses a CPU backend that the program did not choose."""
    if not names <= _ON_THE_CPU or not _is_job() or not _logs():
        return
    library = library_of(program())
    if backend == _UNNAMED or library:
        why = f"{library} requested it" if library else "the program passed no backend"
        logger.warning(
            'the default group of torch.distributed uses "%s" instead of MPI: %s. For MPI, %s',
            "/".join(sorted(names)), why, _REMEDY,
        )  # fmt: skip


def _is_job() -> bool:
    """Return whether MPI, and not torchrun, has started this process as one of several ranks."""
    return (variables.size_in(os.environ) or 1) > 1 and not variables.is_under_torchrun(os.environ)


def _logs() -> bool:
    return not variables.rank_in(os.environ)


def program() -> FrameType:
    """Return the innermost frame outside torch and this backend: the place in the program that makes the call."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def keeps_bucket() -> bool | None:
    """Return whether DDP keeps the bucket that C++ reduces by the current call, or None if Python makes the call.

    True: C++ reduces a bucket in a backward pass, and keeps the bucket. False: C++ reduces zeros in place of a bucket,
    on a rank without inputs. Deeply nested backward passes run in C++ threads, where the caller is the outermost frame.
    """
    frame = sys._getframe(1).f_back
    return True if frame is None else _AROUND_BUCKETS.get(frame.f_code)


_in_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
_in_join = getattr(torch.nn.parallel.DistributedDataParallel, "_match_all_reduce_for_bwd_pass", None)
_AROUND_BUCKETS = {getattr(_in_backward, "__code__", None): True, getattr(_in_join, "__code__", None): False}


def library_of(frame: FrameType) -> str:
    """Return the name of the installed package to which a frame belongs; "" for the user's own program."""
    parts = frame.f_code.co_filename.split(os.sep)
    place = next((place for place, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    return "" if place is None else parts[place + 1].removesuffix(".py")


def keep_join_notices() -> None:
    """Make torch keep the ``Work`` of each model's last join notice (see the docstring of this module)."""
    from torch.distributed.algorithms.join import Join, Joinable

    former = Join.notify_join_context

    def notify(joinable: Joinable) -> Any:
        _last_notice[joinable] = work = former(joinable)
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]


def check_version() -> None:
    """Raise TorchMPIError if torch is so old that its placeholder would not raise an error in a collective."""
    from torch._C._distributed_c10d import FakeProcessGroup

    if not hasattr(FakeProcessGroup, "Options"):
        raise TorchMPIError(
            f'init_process_group("{NAME}") needs torch 2.10 or later, found torch {torch.__version__}: run '
            "pip install --upgrade torch. mpi.start() and the functions of torchmpi_py work with this version too"
        )


def add_placeholder(group: Any, rank: int, size: int) -> None:
    """Add the placeholder for a C++ backend to ``group``, for all devices."""
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
    """Return a C++ Work whose results are the value of ``future``."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    return _create_work_from_future(future)


def raise_on_wait(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Make ``future.wait()`` and ``future.value()`` raise ``error`` in Python, whatever value the future has."""

    def unwrap(_: object) -> None:
        raise error

    future._set_unwrap_func(unwrap)
