"""Fit the cost model to what ``measure.py`` has stored, and print it beside the measurements and the simulator.

    python benchmarks/scale/fit.py benchmarks/scale/hosts_1gbit.json

Fitted are 4 B, where steps alone count, and what is more than the bucket of a link (``tests/hosts/testbed.py``), which
gives its bytes at once: by the sum of the absolute logarithms of predicted / measured. What lies between is shown all
the same, from 64 KiB on.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import Machine
from model import Parameters, costs
from simulator import simulate

from torchmpi_py.bench.results import number, quantile
from torchmpi_py.bench.wire import floor_bytes, parse_link
from torchmpi_py.core.text_tables import table

LEAST_BYTES, SMALL_BYTES, BUCKET_BYTES = 64 << 10, 4, 256 << 10
FLAVOURS = ("mpi", "ring", "hierarchical", "gloo")
SIMULATED = ("ring", "hierarchical")
SHOWN_BYTES = (64 << 10, 1 << 20, 16 << 20)
Row = dict[str, Any]


def load(paths: list[Path]) -> list[Row]:
    """The rows of all files, each with the rate of its links, and whether its ranks outnumbered the cores."""
    rows = []
    for path in paths:
        stored = json.loads(path.read_text())
        rate, cores = parse_link(stored["facts"]["rate"]), stored["facts"]["cores"]
        for row in stored["rows"]:
            rows.append(row | {"rate": rate, "seconds": row["median_seconds"], "crowded": sum(row["hosts"]) > cores})
    return rows


def error(predicted: float, measured: float) -> float:
    """The logarithm of the ratio: 0.18 is 20 % too much, -0.22 is 20 % too little."""
    return math.log(predicted / measured)


def fit(rows: list[Row], flavour: str) -> Parameters:
    """The parameters of a flavour: where each rank has a core, and then, where not, the time of a step alone."""
    chosen = [row for row in rows if row["what"] == flavour and is_fitted(row)]

    def loss(is_crowded: bool, parameters: Parameters) -> float:
        there = [row for row in chosen if row["crowded"] == is_crowded]
        return sum(abs(error(predicted(row, parameters), row["seconds"])) for row in there)

    start, lowest, highest = (
        Parameters(2e-4, 1e-3, 0.93, 2e9),
        Parameters(1e-6, 1e-6, 0.2, 1e8),
        Parameters(1, 1, 1, 1e11),
    )
    found = descend(start, functools.partial(loss, False), lowest, highest)
    return descend(found, functools.partial(loss, True), *[found._replace(crowded=bound) for bound in (1e-6, 1.0)])


def is_over(row: Row) -> bool:
    """Whether more goes over the busiest link than its bucket holds."""
    return floor_bytes(row["verb"], row["num_bytes"], row["hosts"]) > BUCKET_BYTES


def is_fitted(row: Row) -> bool:
    """Whether the bucket hides neither the steps nor the wire."""
    return row["num_bytes"] == SMALL_BYTES or is_over(row)


def predicted(row: Row, parameters: Parameters) -> float:
    """Seconds by the model."""
    ways = costs(row["what"], row["verb"], row["num_bytes"], row["hosts"])
    return parameters.seconds(ways, row["rate"], is_crowded=row["crowded"])


def descend(start: Any, loss: Any, lowest: Any, highest: Any, step: float = 2.0, least_step: float = 1.01) -> Any:
    """The named tuple of positive numbers with the least loss that such a search finds, within bounds."""
    best, least = start, loss(start)
    while step > least_step:
        tries = [
            best._replace(
                **{name: min(max(getattr(best, name) * factor, getattr(lowest, name)), getattr(highest, name))}
            )
            for name in best._fields
            for factor in (step, 1 / step)
        ]
        found = min(tries, key=loss)
        if loss(found) < least:
            best, least = found, loss(found)
        else:
            step = math.sqrt(step)
    return best


@functools.cache
def simulated(flavour: str, verb: str, num_bytes: int, hosts: tuple[int, ...], machine: Machine) -> float:
    """Seconds by the simulator."""
    return simulate(flavour, verb, num_bytes, hosts, machine).seconds


def fit_machines(rows: list[Row], of_ring: Parameters) -> dict[bool, Machine]:
    """The simulator's machine, by whether ranks outnumber cores: the latency that suits ring best, with its gamma."""
    chosen = [row for row in rows if row["what"] == "ring" and row["num_bytes"] <= 1 << 20 and is_fitted(row)]
    latencies = [1e-5 * 1.4**power for power in range(18)]

    def machine(latency: float) -> Machine:
        return Machine(latency_seconds=latency, reduce_bytes_per_second=of_ring.gamma)

    def loss(is_crowded: bool, latency: float) -> float:
        there = [row for row in chosen if row["crowded"] == is_crowded]
        return sum(abs(error(_simulated(row, machine(latency), of_ring.share), row["seconds"])) for row in there)

    return {
        is_crowded: machine(min(latencies, key=functools.partial(loss, is_crowded))) for is_crowded in (False, True)
    }


def _simulated(row: Row, machine: Machine, share: float) -> float:
    linked = dataclasses.replace(machine, link_bytes_per_second=share * row["rate"])
    return simulated(row["what"], row["verb"], row["num_bytes"], tuple(row["hosts"]), linked)


def shape(hosts: Sequence[int]) -> str:
    """As "2 x 1": hosts x ranks."""
    return f"{len(hosts)} x {hosts[0]}"


def print_fit(rows: list[Row], parameters: dict[str, Parameters], machines: dict[bool, Machine]) -> None:
    """Parameters, errors, and a table of measured and predicted times."""
    cells = [
        [name, *map(number, (one.alpha * 1e6, one.crowded * 1e6, one.share, one.gamma / 1e9))]
        for name, one in parameters.items()
    ]
    print(table(["flavour", "alpha us", "crowded us", "beta / link", "gamma GB/s"], cells))
    latencies = [number(machines[is_crowded].latency_seconds * 1e6) for is_crowded in (False, True)]
    print(f"\nThe simulator's latency: {latencies[0]} us, crowded {latencies[1]} us\n")
    errors, lines = collections.defaultdict(list), []
    for row in rows:
        if row["what"] not in FLAVOURS or row["num_bytes"] < LEAST_BYTES:
            continue
        by_model = predicted(row, parameters[row["what"]]) / row["seconds"]
        by_simulator = None
        if row["what"] in SIMULATED:
            by_simulator = _simulated(row, machines[row["crowded"]], parameters["ring"].share) / row["seconds"]
        kind = "ranks > cores" if row["crowded"] else "a core a rank"
        kinds = {"64 KiB": True, "64 KiB, over the bucket": is_over(row), "1 MiB": row["num_bytes"] >= 1 << 20}
        for sizes in (name for name, belongs in kinds.items() if belongs):
            errors[row["what"], kind, sizes].append((by_model, by_simulator))
        if row["num_bytes"] in SHOWN_BYTES:
            lines.append(_line(row, by_model, by_simulator))
    header = [
        "flavour",
        "bed",
        "sizes from",
        "model: median error %",
        "within 20 %",
        "simulator: median error %",
        "within 20 % ",
    ]
    print(table(header, [[*map(str, key), *_summary(errors[key])] for key in sorted(errors)]))
    header = [
        "Mbit/s",
        "hosts x ranks",
        "verb",
        "flavour",
        "KiB",
        "measured ms",
        "model / measured",
        "simulator / measured",
    ]
    print(f"\n{table(header, sorted(lines, key=lambda line: (int(line[0]), line[1:4], int(line[4]))))}")


def _summary(ratios: list[tuple[float, float | None]]) -> list[str]:
    cells = []
    for column in zip(*ratios, strict=True):
        known = [abs(ratio - 1) for ratio in column if ratio is not None]
        within = f"{sum(one <= 0.2 for one in known)} of {len(known)}"
        cells += [number(100 * quantile(known, 0.5)), within] if known else ["-", "-"]
    return cells


def _line(row: Row, by_model: float, by_simulator: float | None) -> list[str]:
    cells = [f"{row['rate'] * 8 / 1e6:g}", shape(row["hosts"]), row["verb"], row["what"], str(row["num_bytes"] >> 10)]
    return [*cells, number(row["seconds"] * 1e3), number(by_model), number(by_simulator)]


def print_predictions(parameters: dict[str, Parameters], rate: float, sizes: list[int]) -> None:
    """Allreduce on more ranks than were measured."""
    lines = []
    for hosts in ([1] * 16, [8] * 2, [1] * 128, [8] * 16, [1] * 1024, [8] * 128):
        for num_bytes in sizes:
            floor = floor_bytes("allreduce", num_bytes, hosts) / rate
            cells = [str(sum(hosts)), shape(hosts), str(num_bytes >> 10), number(floor * 1e3)]
            for flavour in FLAVOURS:
                seconds = parameters[flavour].seconds(costs(flavour, "allreduce", num_bytes, hosts), rate)
                cells.append(number(seconds * 1e3))
            lines.append(cells)
    print(table(["ranks", "hosts x ranks", "KiB", "floor ms", *(f"{name} ms" for name in FLAVOURS)], lines))


def main() -> None:
    """Fit and print; the parameters are stored too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--store", type=Path, help="store the parameters and the machine as JSON")
    options = parser.parse_args()
    rows = load(options.files)
    parameters = {flavour: fit(rows, flavour) for flavour in FLAVOURS}
    machines = fit_machines(rows, parameters["ring"])
    print_fit(rows, parameters, machines)
    rate = max(row["rate"] for row in rows)
    print()
    print_predictions(parameters, rate, [64 << 10, 1 << 20, 16 << 20, 64 << 20])
    if options.store:
        fitted = {name: one._asdict() for name, one in parameters.items()}
        machine = dataclasses.replace(machines[False], link_bytes_per_second=parameters["ring"].share * rate)
        options.store.write_text(json.dumps({"flavours": fitted, "machine": dataclasses.asdict(machine)}, indent=1))


if __name__ == "__main__":
    main()
