"""Boards that outlast their job: what each rank has done, for the page of ``torchmpirun --timeline``.

TORCHMPI_TIMELINE names a folder that torchmpirun makes for a job. The boards of its nodes (``core/status_board.py``)
are files there, which stay as the ranks have left them, however these end. Beside each board is a file with what the
board does not tell: the host, and how far its clock is from that of rank 0's host (``tracing.read_clock``), at the
start and, if the ranks have come to it, at ``stop``. A host on which there is no such folder, for its file system is
another one, leaves nothing. A later session of the same job takes the place of the former one.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

import torchmpi_py
from torchmpi_py import trusted_files
from torchmpi_py.core import config
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.core.status_board import EPOCH, HAS_LEFT, PART_BYTES, STOPPED, ReadableBoard
from torchmpi_py.watch import flight_recorder, tracing

_TIMES = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")


def replaced(rank: int) -> str:
    """The file for the board of the node whose lowest rank is ``rank``; "" where no board is to be kept.

    What a former session has written about the board that lies there no longer counts.
    """
    if not (folder := config.timeline_directory()):
        return ""
    path = pathlib.Path(folder, f"node-{rank}.board")
    with contextlib.suppress(OSError):  # no such folder on this host
        path.with_suffix(".json").unlink(missing_ok=True)
    return str(path)


def describe(world: Communicator, start_ns: int = 0) -> int:
    """Compare the hosts' clocks, write down what the boards do not tell, and return rank 0's time.

    Collective over all ranks; called when a session begins, and before it ends, with the time that was returned then
    (``start_ns``).
    """
    if not (folder := config.timeline_directory()):
        return 0
    nodes = world.background.places.nodes.tolist()
    reading = tracing.read_clock(world.background.mpi, nodes)
    begin_ns: int = start_ns or world.background.mpi.bcast(reading.at_ns)
    if world.rank == nodes[world.rank] and os.path.isdir(folder):  # not on a host with another file system
        path, clock = pathlib.Path(folder, f"node-{world.rank}.json"), []
        with contextlib.suppress(OSError):  # a full disk
            if start_ns:
                clock = json.loads(path.read_text())["clock"]
            about = {"start_ns": begin_ns, "num_ranks": world.size, "host": socket.gethostname()}
            about["restart"] = int(os.environ.get("TORCHMPIRUN_RESTART", "0"))
            config.keep(path, about | {"versions": versions(), "clock": [*clock, reading._asdict()]})
    return begin_ns


def versions() -> str:
    """The versions of this package, of torch and of the MPI."""
    vendor, numbers = MPI.get_vendor()
    return f"torchmpi_py {torchmpi_py.__version__}, torch {torch.__version__}, {vendor} {'.'.join(map(str, numbers))}"


class KeptRank(NamedTuple):
    """What a rank has left: its whole dump, as of the flight recorder, with times by the clock of rank 0's host."""

    dump: dict[str, Any]
    host: str
    versions: str
    has_left: bool  # by ``mpi.stop()``
    restart: int  # of the job, whose session it was; 0: the first start


def load(folder: pathlib.Path) -> tuple[int, list[KeptRank]]:
    """(the number of ranks of the job, those that have left a board in ``folder``), of the last session.

    OSError or ValueError where a file cannot be read; 0 ranks where the folder has none.
    """
    nodes = [
        (trusted_files.read_json(path, owners=None), path.with_suffix(".board")) for path in folder.glob("node-*.json")
    ]
    last = max((about["start_ns"] for about, _ in nodes), default=0)
    newest = [(about, path) for about, path in nodes if about["start_ns"] == last and path.exists()]
    ranks = [rank for about, path in newest for rank in _of_node(about, path)]
    return max((about["num_ranks"] for about, _ in newest), default=0), sorted(ranks, key=lambda r: r.dump["rank"])


def _of_node(about: Mapping[str, Any], path: pathlib.Path) -> Iterator[KeptRank]:
    descriptor = trusted_files.open_file(path, os.O_RDONLY, owners=None)
    with open(descriptor, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        board = ReadableBoard(mapping, {index: index * PART_BYTES for index in range(len(mapping) // PART_BYTES)}, 0)
        try:
            for index in board.indices:
                yield _of_rank(board, index, about)
        finally:
            board.words.release()


def _of_rank(board: ReadableBoard, index: int, about: Mapping[str, Any]) -> KeptRank:
    dump = flight_recorder.whole(flight_recorder.of_rank(board, index))
    # A rank's times count from a reading of two clocks, which the system may have interrupted; those of the node's
    # first rank are taken for all of its ranks.
    shift_ns = board.get(EPOCH, 0) - board.get(EPOCH, index)
    for entry in dump["entries"]:
        for name in _TIMES:
            if entry[name]:
                entry[name] = _by_rank_0(entry[name] + shift_ns, about["clock"])
    has_left = board.get(HAS_LEFT, index) == STOPPED
    return KeptRank(dump, about["host"], about["versions"], has_left, about["restart"])


def _by_rank_0(time_ns: int, clock: list[Mapping[str, int]]) -> int:
    """A time of a host by the clock of rank 0's; the offset is interpolated linearly between the readings."""
    first, last = clock[0], clock[-1]
    passed_ns = last["at_ns"] - first["at_ns"]
    drift = (last["offset_ns"] - first["offset_ns"]) / passed_ns if passed_ns else 0.0
    return time_ns - first["offset_ns"] - round(drift * (time_ns - first["at_ns"]))
