"""The allreduce of DistributedDataParallel's buckets, in memory that all ranks of a node map.

DDP allocates its buckets itself, copies gradients in, has each bucket reduced, and copies the gradients out. (With
``gradient_as_bucket_view=True`` the gradients stay in the bucket.) A bucket lives for many steps. So its memory is
moved at its first allreduce (``symmetric.adopt``), and from then on the ranks reduce buckets where they lie.

All ranks of a group call DDP's allreduces alike. So for buckets the selector is asked as for symmetric tensors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.plan import Operation
from torchmpi_py.collectives.prepare import builder
from torchmpi_py.collectives.registry import BY_NAME
from torchmpi_py.collectives.selector import selector
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.torch_backend.call_queue import Call
from torchmpi_py.torch_backend.torch_internals import BucketCall

_allreduce, _SHARED = builder(verbs.allreduce), BY_NAME["shared"]


def is_bucket(x: Tensor) -> bool:
    """Whether a tensor that DDP's C++ has reduced is a bucket on the host, and not DDP's map of used parameters."""
    is_map = not (x.is_floating_point() or x.is_complex())
    return x.dim() == 1 and x.is_cpu and not x.is_sparse and x.is_contiguous() and not (is_map or x.requires_grad)


def allreduce(comm: Communicator, x: Tensor, op: str, how: BucketCall) -> Call:
    """The allreduce of one bucket."""
    chosen = selector.flavour_for("allreduce", comm, x.device, x.nbytes, symmetric=True, name=None)
    operation = _allreduce(x, op=op, comm=comm, flavour=chosen.name)
    # A bucket moves at its first allreduce or never: a program may have taken addresses of gradients since then.
    storage: Any = x.untyped_storage()
    if operation.plan.flavour is not _SHARED:
        storage.stays_where_it_is = True
    elif how is BucketCall.IN_BACKWARD and not hasattr(storage, "stays_where_it_is"):
        operation = Operation(dataclasses.replace(operation.plan, method="allreduce_adopting"), (x,), x)
    return [operation], [x], ()
