"""What a call costs above MPI itself. Run: torchmpirun -n 2 benchmarks/calls.py.

Raw mpi4py and this package take turns in one run; figures are medians over the turns, in microseconds, on rank 0.
"""

import statistics
import time

import numpy as np
import torch

import torchmpi_py as mpi

TURNS = 40


def microseconds(function, calls):
    """Mean time of a call, over ``calls`` in a row."""
    mpi.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls * 1e6


def interleaved(functions, calls):
    """Median per function, which take turns."""
    times = {name: [] for name in functions}
    for _ in range(TURNS):
        for name, function in functions.items():
            times[name].append(microseconds(function, calls))
    return {name: statistics.median(values) for name, values in times.items()}


def one_float(comm):
    """Allreduce of one element, three ways."""
    from mpi4py import MPI

    tensor, array = torch.zeros(1), np.zeros(1, dtype=np.float32)
    return interleaved(
        {
            "comm.Allreduce(IN_PLACE, numpy)": lambda: comm.Allreduce(MPI.IN_PLACE, array),
            "comm.Allreduce(IN_PLACE, tensor.numpy())": lambda: comm.Allreduce(MPI.IN_PLACE, tensor.numpy()),
            "mpi.allreduce(tensor)": lambda: mpi.allreduce(tensor),
        },
        calls=2000,
    )


def launches(num_bytes, way):
    """(launch, launch to result) of allreduce_async, with small operations posted to MPI or not."""
    mpi.stop()
    limit = {"MPI_Iallreduce": 1 << 26, "thread": 0}[way]
    mpi.start(tuning=mpi.Tuning(native_async_bytes=limit, wire_bytes=1 << 28))
    x = torch.zeros(num_bytes // 4)
    launch, total = [], []
    for _ in range(300 if num_bytes < 1 << 20 else 60):
        mpi.barrier()
        begin = time.perf_counter()
        handle = mpi.allreduce_async(x)
        launch.append(time.perf_counter() - begin)
        handle.wait()
        total.append(time.perf_counter() - begin)
    return statistics.median(launch) * 1e6, statistics.median(total) * 1e6


def main():
    """Print both tables in Markdown."""
    mpi.start()
    torch.set_num_threads(1)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    vendor, version = MPI.get_vendor()
    report = [f"{mpi.size()} ranks, {vendor} {'.'.join(map(str, version))}, torch {torch.__version__}", ""]
    report += ["| allreduce of one float32 | us |", "| --- | --- |"]
    report += [f"| `{name}` | {value:.2f} |" for name, value in one_float(comm).items()]
    comm.Free()
    report += ["", "| allreduce_async, bytes | way | launch, us | launch to result, us |", "| --- | --- | --- | --- |"]
    for num_bytes in (4, 1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 22):
        for way in ("MPI_Iallreduce", "thread"):
            launch, total = launches(num_bytes, way)
            report.append(f"| {num_bytes} | {way} | {launch:.1f} | {total:.1f} |")
    if mpi.rank() == 0:
        print("\n".join(report))


main()
