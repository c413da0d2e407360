"""What collectives take on beds of 2 to 4 hosts (``scripts/hosts``; root only), for ``fit.py``.

    python benchmarks/scale/measure.py --out benchmarks/scale/hosts_1gbit.json --rate 1gbit

One run of ``bench compare`` for each shape of the bed and each verb: all flavours take turns in it.
"""

import argparse
import datetime as dt
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "hosts"))
from testbed import Bed  # noqa: E402

SHAPES = {"2x1": [1, 1], "3x1": [1, 1, 1], "4x1": [1, 1, 1, 1], "2x2": [2, 2]}
FLAVOURS = {
    "allreduce": "mpi,ring,hierarchical,gloo",
    "broadcast": "mpi,ring,hierarchical",
    "reduce": "mpi,ring,hierarchical",
    "allgather": "mpi,ring,hierarchical",
    "reduce_scatter": "mpi,ring,hierarchical",
    "alltoall": "mpi,ring",
}


def measured(bed: Bed, ranks: list[int], verb: str, sizes: str, seconds: float, rate: str) -> list[dict]:
    """The rows of one run of ``bench compare``, with the shape and the verb in each."""
    hosts = ",".join(f"{host}:{number}" for host, number in zip(bed.hosts, ranks, strict=False))
    file = bed.shared / "report.json"
    file.unlink(missing_ok=True)
    command = ["torchmpirun", "--hosts", hosts, "--timeout", "400", "-m", "torchmpi_py.bench", "compare"]
    command += ["--verb", verb, "--flavours", FLAVOURS[verb], "--sizes", sizes, "--seconds", str(seconds)]
    command += ["--buffers", "warm", "--link", rate, "--json", str(file)]
    done = bed.run(bed.hosts[0], command, timeout=500)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    rows = json.loads(file.read_text())["rows"]
    kept = ("what", "num_bytes", "median_seconds", "time_to_floor")
    return [{"hosts": ranks, "verb": verb} | {key: row[key] for key in kept} for row in rows]


def store(path: Path, facts: dict, rows: list[dict]) -> None:
    """A row a line."""
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{{"facts": {json.dumps(facts)}, "rows": [\n{lines}\n]}}\n')


def main() -> None:
    """Make the bed, measure, store after each run, take the bed down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bed", default="scale")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--sizes", default="4,4K,64K,256K,1M,4M,16M")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--verbs", type=lambda text: text.split(","), default=list(FLAVOURS))
    options = parser.parse_args()
    bed = Bed.up(max(len(SHAPES[name]) for name in options.shapes), name=options.bed, rate=options.rate)
    try:
        facts = {
            "rate": options.rate,
            "cores": os.cpu_count(),
            "date": dt.date.today().isoformat(),
            "python": sys.version.split()[0],
        }
        rows = []
        for name in options.shapes:
            for verb in options.verbs:
                rows += measured(bed, SHAPES[name], verb, options.sizes, options.seconds, options.rate)
                store(options.out, facts, rows)
                print(name, verb, len(rows), flush=True)
    finally:
        bed.down()


if __name__ == "__main__":
    main()
