"""Fit the cost model to what ``measure.py`` has stored, and print it beside the measurements and the simulator.

    python benchmarks/scale/fit.py benchmarks/scale/hosts_*.json

Sizes from 64 KiB on are fitted, by the median of the absolute logarithm of predicted / measured.
"""

import argparse
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from engine import Machine
from model import Parameters, costs
from simulator import simulate

from torchmpi_py.bench.results import number, quantile, table
from torchmpi_py.bench.wire import floor_bytes, parse_link

LEAST_BYTES = 64 << 10
FLAVOURS = ("mpi", "ring", "hierarchical", "gloo")
SIMULATED = ("ring", "hierarchical")
SHOWN_BYTES = (64 << 10, 1 << 20, 16 << 20)
Row = dict[str, Any]


def load(paths: list[Path]) -> list[Row]:
    """The rows of all files, each with the rate of its links."""
    rows = []
    for path in paths:
        stored = json.loads(path.read_text())
        rate = parse_link(stored["facts"]["rate"])
        rows += [row | {"rate": rate, "seconds": row["median_seconds"]} for row in stored["rows"]]
    return rows


def error(predicted: float, measured: float) -> float:
    """The logarithm of the ratio: 0.18 is 20 % too much, -0.22 is 20 % too little."""
    return math.log(predicted / measured)


def fit(rows: list[Row], flavour: str) -> Parameters:
    """The parameters of a flavour: a search that changes one at a time, in smaller and smaller steps."""
    chosen = [row for row in rows if row["what"] == flavour and row["num_bytes"] >= LEAST_BYTES]
    ways = [(costs(flavour, row["verb"], row["num_bytes"], row["hosts"]), row) for row in chosen]

    def loss(parameters: Parameters) -> float:
        return sum(abs(error(parameters.seconds(way, row["rate"]), row["seconds"])) for way, row in ways)

    return descend(Parameters(2e-4, 0.93, 2e9), loss, Parameters(1e-6, 0.2, 1e8), Parameters(1e-1, 1.0, 1e11))


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


def fit_machine(rows: list[Row], parameters: dict[str, Parameters]) -> Machine:
    """The machine of the simulator: the latency that suits ring best, with ring's beta and gamma."""
    chosen = [row for row in rows if row["what"] == "ring" and LEAST_BYTES <= row["num_bytes"] <= 1 << 20]
    of_ring = parameters["ring"]

    def machine(latency: float) -> Machine:
        return Machine(latency_seconds=latency, memory_bytes_per_second=of_ring.gamma)

    def loss(latency: float) -> float:
        return sum(abs(error(_simulated(row, machine(latency), of_ring.share), row["seconds"])) for row in chosen)

    latencies = [1e-5 * 1.4**power for power in range(18)]
    return machine(min(latencies, key=loss))


def _simulated(row: Row, machine: Machine, share: float) -> float:
    linked = dataclasses.replace(machine, link_bytes_per_second=share * row["rate"])
    return simulated(row["what"], row["verb"], row["num_bytes"], tuple(row["hosts"]), linked)


def shape(hosts: list[int]) -> str:
    """As "2 x 1": hosts x ranks."""
    return f"{len(hosts)} x {hosts[0]}"


def print_fit(rows: list[Row], parameters: dict[str, Parameters], machine: Machine) -> None:
    """Parameters, errors, and a table of measured and predicted times."""
    cells, lines = [], []
    for flavour in FLAVOURS:
        chosen = [row for row in rows if row["what"] == flavour and row["num_bytes"] >= LEAST_BYTES]
        predicted = [_predicted(row, parameters[flavour]) for row in chosen]
        by_model = [abs(model / row["seconds"] - 1) for model, row in zip(predicted, chosen, strict=True)]
        cells.append([flavour, number(parameters[flavour].alpha * 1e6), number(parameters[flavour].share)])
        cells[-1] += [number(parameters[flavour].gamma / 1e9), *_summary(by_model)]
        by_simulator = []
        for row, model in zip(chosen, predicted, strict=True):
            other = _simulated(row, machine, parameters["ring"].share) if flavour in SIMULATED else None
            by_simulator += [] if other is None else [abs(other / row["seconds"] - 1)]
            if row["num_bytes"] in SHOWN_BYTES:
                lines.append(_line(row, model, other))
        cells[-1] += _summary(by_simulator) if by_simulator else ["-", "-"]
    header = ["flavour", "alpha us", "beta / link", "gamma GB/s", "median error %", "within 20 %"]
    print(table([*header, "simulator: median error %", "within 20 %"], cells))
    print(f"\nThe simulator's machine: {machine}\n")
    header = ["link Mbit/s", "hosts x ranks", "verb", "flavour", "KiB", "measured ms", "model ms", "model/measured"]
    print(table([*header, "simulator ms", "simulator/measured"], sorted(lines, key=lambda line: line[:4])))


def _summary(errors: list[float]) -> list[str]:
    within = sum(one <= 0.2 for one in errors)
    return [number(100 * quantile(errors, 0.5)), f"{within} of {len(errors)}"]


def _predicted(row: Row, parameters: Parameters) -> float:
    return parameters.seconds(costs(row["what"], row["verb"], row["num_bytes"], row["hosts"]), row["rate"])


def _line(row: Row, model: float, simulated_seconds: float | None) -> list[str]:
    measured = row["seconds"]
    cells = [f"{row['rate'] * 8 / 1e6:g}", shape(row["hosts"]), row["verb"], row["what"], str(row["num_bytes"] >> 10)]
    cells += [number(measured * 1e3), number(model * 1e3), number(model / measured)]
    other = simulated_seconds
    return [*cells, number(other and other * 1e3), number(other and other / measured)]


def print_predictions(parameters: dict[str, Parameters], machine: Machine, rate: float, sizes: list[int]) -> None:
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
    machine = fit_machine(rows, parameters)
    print_fit(rows, parameters, machine)
    rate = max(row["rate"] for row in rows)
    print()
    print_predictions(parameters, machine, rate, [64 << 10, 1 << 20, 16 << 20, 64 << 20])
    if options.store:
        fitted = {name: one._asdict() for name, one in parameters.items()}
        machine = dataclasses.replace(machine, link_bytes_per_second=parameters["ring"].share * rate)
        options.store.write_text(json.dumps({"flavours": fitted, "machine": dataclasses.asdict(machine)}, indent=1))


if __name__ == "__main__":
    main()
