"""Print, as JSON, which torch or MPI is installed here: ``python probes.py torch|mpi``.

The probe runs in a separate process, because a library that fails to load may end the process. This file imports no
other module of the package.
"""

import json
import sys
from typing import Any

MARK = "torchmpi_py.doctor:"  # Precedes the result, because libraries may print other lines.


def ask_torch() -> dict[str, Any]:
    """Return torch's version, the CUDA version of its build, and the GPUs that it can use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    return {"version": torch.__version__, "cuda": torch.version.cuda or "", "gpus": gpus}


def ask_mpi() -> dict[str, Any]:
    """Start MPI. Return facts about it, such as its version and whether it supports calls from threads and ULFM."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    granted = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    try:
        # Call Revoke, because mpi4py has substitutes for the other ULFM functions that an MPI may lack.
        MPI.COMM_SELF.Dup().Revoke()
        has_ulfm = name == "Open MPI"  # MPICH supports only a part of ULFM.
    except (NotImplementedError, AttributeError, MPI.Exception):
        has_ulfm = False
    answer = {
        "name": f"{name} {'.'.join(map(str, version))}",
        "vendor": name,
        "mpi4py": mpi4py.__version__,
        "has_threads": granted == MPI.THREAD_MULTIPLE,
        "has_ulfm": has_ulfm,
    }
    MPI.Finalize()
    return answer


if __name__ == "__main__":
    print(MARK, json.dumps({"torch": ask_torch, "mpi": ask_mpi}[sys.argv[1]]()), flush=True)
