"""``torch.distributed`` over this package: ``import torchmpi_py.torch_backend``, ``init_process_group("torchmpi")``.

Importing it registers the backend, for tensors on the CPU and on CUDA devices, and lets ``env://``, torch's default
way to start, meet over MPI where no MASTER_ADDR is set (``meeting.py``). A process group is a communicator of the
package, and its collectives are the package's verbs (``process_group.py``).
"""

from torchmpi_py.torch_backend import creation, joining, meeting
from torchmpi_py.torch_backend.gradients import average
from torchmpi_py.torch_backend.monitoring import monitored_barrier
from torchmpi_py.torch_backend.process_group import NAME, ProcessGroup

__all__ = ["NAME", "ProcessGroup", "average", "monitored_barrier"]

creation.register()
joining.register()
meeting.register()
