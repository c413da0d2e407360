"""What a rank costs on one host, for 2 to 64 ranks: start-up, memory, descriptors, and the time of a small call.

    python benchmarks/scale/one_host.py --ranks 2,4,8,16,32,64 --json benchmarks/scale/one_host.json

Each number of ranks is a job under ``torchmpirun``, in which this file is the program of every rank.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

BEGIN, FILE = "SCALE_BEGIN", "SCALE_FILE"
NUM_CALLS, NUM_WARM = 2000, 4  # over all ranks; of each
FREE_BYTES_A_RANK = 256 << 20


def rank() -> None:
    """One rank of a job: rank 0 writes what was measured."""
    at_main = time.time()
    import torch

    import torchmpi_py as mpi

    mpi.start()
    torch.set_num_threads(1)
    mpi.barrier()
    started = time.time()
    x = torch.ones(1)
    seconds = {"allreduce 4 B": _median(mpi, lambda: mpi.allreduce(x.fill_(1))), "barrier": _median(mpi, mpi.barrier)}
    here = {"main_seconds": at_main - float(os.environ[BEGIN]), "started_seconds": started - float(os.environ[BEGIN])}
    here |= {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    every = mpi.allgather_object(here | _memory())
    if mpi.rank() == 0:
        worst = {key: max(one[key] for one in every) for key in here}
        memory = {key: sum(one[key] for one in every) / len(every) for key in _memory()}
        Path(os.environ[FILE]).write_text(json.dumps({"ranks": mpi.size()} | worst | memory | {"seconds": seconds}))
    mpi.stop()


def _median(mpi, call) -> float:
    times = []
    for _ in range(NUM_WARM):
        call()
    for _ in range(max(20, NUM_CALLS // mpi.size())):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def _memory() -> dict[str, int]:
    """Bytes: resident, and the share that would come free if this process ended alone (proportional)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {
        "resident_bytes": int(lines["Rss"].split()[0]) << 10,
        "proportional_bytes": int(lines["Pss"].split()[0]) << 10,
        "private_bytes": (int(lines["Private_Clean"].split()[0]) + int(lines["Private_Dirty"].split()[0])) << 10,
    }


def free_bytes() -> int:
    """Memory that is available now."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def main() -> None:
    """Run the jobs one after the other; a number of ranks that would not fit the memory is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    file, results = options.json.with_suffix(".part"), []
    for number in map(int, options.ranks.split(",")):
        if free_bytes() < number * FREE_BYTES_A_RANK:
            print(f"{number} ranks are left out: {free_bytes() >> 20} MiB are free", flush=True)
            continue
        environment = {**os.environ, BEGIN: str(time.time()), FILE: str(file)}
        launcher = Path(sys.executable).with_name("torchmpirun")
        begin = time.time()
        subprocess.run([launcher, "-n", str(number), "--timeout", "500", __file__], env=environment, check=True)
        results.append(json.loads(file.read_text()) | {"job_seconds": time.time() - begin})
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(results[-1], flush=True)
    file.unlink(missing_ok=True)


if __name__ == "__main__":
    rank() if FILE in os.environ else main()
