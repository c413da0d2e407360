# The public names and their modules. ``__init__.py`` reads this file when a name is first used.

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

__version__: str
__all__: list[str]
