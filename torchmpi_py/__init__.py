"""MPI for today's PyTorch: ``import torchmpi_py as mpi``, ``mpi.start()``, ``torchmpirun -n 4 train.py``.

Names are loaded when they are first used, so that the launcher starts without importing torch. In a rank the import
sets torchrun's variables (``launch.variables``).
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from torchmpi_py import (
        engine as engine,
        nn as nn,
        optim as optim,
        paramserver as paramserver,
        sweeps as sweeps,
    )
    from torchmpi_py.collectives.autotune import (
        autotune as autotune,
    )
    from torchmpi_py.collectives.check import (
        check_with_allreduce as check_with_allreduce,
    )
    from torchmpi_py.collectives.registry import (
        availability as availability,
    )
    from torchmpi_py.collectives.selector import (
        selector as selector,
    )
    from torchmpi_py.collectives.verbs import (
        allgather as allgather,
        allgather_async as allgather_async,
        allgather_object as allgather_object,
        allgather_object_async as allgather_object_async,
        allreduce as allreduce,
        allreduce_async as allreduce_async,
        alltoall as alltoall,
        alltoall_async as alltoall_async,
        broadcast as broadcast,
        broadcast_async as broadcast_async,
        broadcast_object as broadcast_object,
        broadcast_object_async as broadcast_object_async,
        gather as gather,
        gather_async as gather_async,
        recv as recv,
        recv_async as recv_async,
        reduce as reduce,
        reduce_async as reduce_async,
        reduce_scatter as reduce_scatter,
        reduce_scatter_async as reduce_scatter_async,
        scatter as scatter,
        scatter_async as scatter_async,
        send as send,
        send_async as send_async,
        sendreceive as sendreceive,
        sendreceive_async as sendreceive_async,
    )
    from torchmpi_py.core.communicators import (
        Communicator as Communicator,
        at as at,
        communicator as communicator,
        communicator_names as communicator_names,
        push_communicator as push_communicator,
        set_collective_span as set_collective_span,
        set_communicator as set_communicator,
        split as split,
    )
    from torchmpi_py.core.config import (
        Tuning as Tuning,
    )
    from torchmpi_py.core.handles import (
        Handle as Handle,
        wait_all as wait_all,
    )
    from torchmpi_py.engine.loaders import (
        shard as shard,
    )
    from torchmpi_py.errors import (
        CheckpointError as CheckpointError,
        CollectiveTimeout as CollectiveTimeout,
        CommunicatorError as CommunicatorError,
        FlavourError as FlavourError,
        LaunchError as LaunchError,
        NotStarted as NotStarted,
        ParameterServerError as ParameterServerError,
        RankDied as RankDied,
        RanksDisagree as RanksDisagree,
        TorchMPIError as TorchMPIError,
        Unavailable as Unavailable,
        Unimplemented as Unimplemented,
    )
    from torchmpi_py.memory.symmetric import (
        symmetric_empty as symmetric_empty,
    )
    from torchmpi_py.optim.joining import (
        join as join,
    )
    from torchmpi_py.runtime.chief import (
        is_chief as is_chief,
        summary_writer as summary_writer,
    )
    from torchmpi_py.runtime.process import (
        barrier as barrier,
        device as device,
        host_name as host_name,
        is_started as is_started,
        local_rank as local_rank,
        local_size as local_size,
        num_nodes as num_nodes,
        rank as rank,
        session as session,
        size as size,
        start as start,
        stop as stop,
    )
    from torchmpi_py.runtime.survivors import (
        catch_up as catch_up,
        elastic as elastic,
    )
    from torchmpi_py.sweeps.early_stopping import (
        experiment_folder as experiment_folder,
        report as report,
    )
    from torchmpi_py.sweeps.experiments import (
        experiments as experiments,
    )

__version__ = "0.1.0"

_VERBS = (
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_object",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendreceive",
)
_HOMES = {
    "collectives.autotune": ["autotune"],
    "collectives.check": ["check_with_allreduce"],
    "collectives.registry": ["availability"],
    "collectives.selector": ["selector"],
    "collectives.verbs": [
        *(f"{verb}{form}" for verb in _VERBS for form in ("", "_async")),
    ],
    "core.communicators": [
        "Communicator",
        "at",
        "communicator",
        "communicator_names",
        "push_communicator",
        "set_collective_span",
        "set_communicator",
        "split",
    ],
    "core.config": ["Tuning"],
    "core.handles": ["Handle", "wait_all"],
    "engine.loaders": ["shard"],
    "errors": [
        "CheckpointError",
        "CollectiveTimeout",
        "CommunicatorError",
        "FlavourError",
        "LaunchError",
        "NotStarted",
        "ParameterServerError",
        "RankDied",
        "RanksDisagree",
        "TorchMPIError",
        "Unavailable",
        "Unimplemented",
    ],
    "memory.symmetric": ["symmetric_empty"],
    "optim.joining": ["join"],
    "runtime.chief": ["is_chief", "summary_writer"],
    "runtime.process": [
        "barrier",
        "device",
        "host_name",
        "is_started",
        "local_rank",
        "local_size",
        "num_nodes",
        "rank",
        "session",
        "size",
        "start",
        "stop",
    ],
    "runtime.survivors": ["catch_up", "elastic"],
    "sweeps.early_stopping": ["experiment_folder", "report"],
    "sweeps.experiments": ["experiments"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("engine", "nn", "optim", "paramserver", "sweeps")

_OTHER_NAMES = {  # of Horovod, torch.distributed and MPI: what each is called here
    "shutdown": "stop()",
    "finalize": "stop()",
    "is_initialized": "is_started()",
    "get_rank": "rank()",
    "get_world_size": "size()",
    "world_size": "size()",
    "cross_size": "num_nodes()",
    "all_reduce": "allreduce()",
    "allreduce_": 'allreduce(x, op="avg"), which works in place; without op= it sums',
    "allreduce_async_": 'allreduce_async(x, op="avg"), which works in place; without op= it sums',
    "all_gather": "allgather()",
    "all_to_all": "alltoall()",
    "reducescatter": "reduce_scatter(), which sums by default",
    "reducescatter_async": "reduce_scatter_async(), which sums by default",
    "broadcast_": "broadcast(), which works in place",
    "broadcast_async_": "broadcast_async(), which works in place",
    "broadcast_parameters": "nn.synchronize_parameters()",
    "broadcast_optimizer_state": "optim.broadcast_optimizer_state()",
    "DistributedOptimizer": "optim.DistributedOptimizer",
    "SyncBatchNorm": "nn.SyncBatchNorm",
    "Compression": "optim.compression",
    "HorovodInternalError": "TorchMPIError",
    "ProcessSet": "split()",
    "add_process_set": "split()",
    "new_group": "split()",
    "isend": "send_async()",
    "irecv": "recv_async()",
}
_REMEDIES = {  # for other names of Horovod; "sparse_" is for all names that begin so
    "init": "call mpi.start(). mpi.allreduce sums, and overwrites its tensor, where Horovod averages a copy: see "
    "docs/from_horovod.md",
    "cross_rank": "os.environ['GROUP_RANK'] is the number of the node",
    "Average": 'write op="avg"; mpi.allreduce without op= sums',
    "Sum": 'write op="sum", the default',
    "Min": 'write op="min"',
    "Max": 'write op="max"',
    "Product": 'write op="prod"',
    "Adasum": 'there is none; average, op="avg", and warm up: mpi.optim.large_batch',
    "synchronize": "handle.wait() returns the result",
    "poll": "handle.done() asks",
    "grouped_allreduce": 'call the verb for each: mpi.wait_all([mpi.allreduce_async(x, op="avg") for x in tensors]); '
    "without op= it sums, in place",
    "grouped_allgather": "call the verb for each: mpi.wait_all([mpi.allgather_async(x) for x in tensors])",
    "grouped_reducescatter": 'call the verb for each: mpi.wait_all([mpi.reduce_scatter_async(x, op="avg") for x in '
    "tensors]); without op= it sums",
    "sparse_": "mpi.allgather the indices and the values; mpi.optim.DistributedOptimizer does it for gradients",
    "global_process_set": "leave it away, or write comm=mpi.communicator(0)",
    "remove_process_set": "call free() of what mpi.split gave, or leave it to mpi.stop",
    **dict.fromkeys(
        ("start_timeline", "stop_timeline"),
        "torchmpirun --timeline FILE shows the last operations of all ranks, --profile DIRECTORY traces all",
    ),
    "is_homogeneous": "compare mpi.local_size() over the ranks: mpi.allgather(mpi.local_size())",
    "run": "start the program with torchmpirun -n 4 program.py, or use %load_ext torchmpi_py.notebook and %%torchmpi",
    **dict.fromkeys(
        ("mpi_", "gloo_", "nccl_", "ddl_", "ccl_", "cuda_", "rocm_"),
        "nothing has to be built in; print(mpi.availability()) says what can run here",
    ),
}
_THIS = sys.modules[__name__]

__all__ = sorted([*_HOME_OF, *_MODULES])


def _attempt(what: str, module: str, function: str) -> None:
    """Run a step of ``import torch``. torch cannot be imported where a step fails, so an error is a warning here."""
    try:
        getattr(importlib.import_module(f"{__name__}.{module}"), function)()
    except Exception as error:
        import logging

        logging.getLogger(__name__).warning(
            "torchmpi_py: %s: %r; look at the launcher's variables (env | sort)", what, error
        )


def _register_backend() -> None:
    """Register the torch.distributed backend, at the end of ``import torch``: its entry point in ``torch.backends``."""
    _attempt("the backend torchmpi is not registered", "torch_backend.registration", "register")


_attempt("torchrun's variables are not set", "launch.variables", "set_variables")


def _is_meant(name: str, key: str) -> bool:
    return name.startswith(key) if key.endswith("_") else name.rstrip("_").removesuffix("_async") == key


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        if name in _OTHER_NAMES:
            remedy = f"; it is called {_OTHER_NAMES[name]} here"
        else:
            remedy = next((f"; {text}" for key, text in _REMEDIES.items() if _is_meant(name, key)), "")
        # With name and obj the interpreter adds the most similar name, if there is one.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}", name=name, obj=_THIS)
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            how = "torch is not installed: pip install torch (without a GPU, PyTorch's line for a CPU build)"
            raise ModuleNotFoundError(how, name=error.name) from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
