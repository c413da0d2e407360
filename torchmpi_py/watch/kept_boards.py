"""Keep status boards after the job: the records of each rank's operations, for ``torchmpirun --timeline``.

TORCHMPI_TIMELINE is set to a folder that torchmpirun creates for a job. The boards of the job's nodes
(``core/status_board.py``) are files in this folder. So the boards remain, however the ranks end.

Each board has a JSON file with facts that are not on the board: the host, and the clock's offset from the clock of rank
0's host (``tracing.read_clock``). The ranks read the offset in ``mpi.start()``, and again in ``mpi.stop()`` if they
call it. A host that does not share the folder's file system leaves no files. A later session of the same job replaces
the files of the earlier session.
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
    """Return the path of the board of the node whose lowest rank is ``rank``, or "" if boards are not kept.

    Remove the JSON file that an earlier session has written for this board.
    """
    if not (folder := config.timeline_directory()):
        return ""
    path = pathlib.Path(folder, f"node-{rank}.board")
    with contextlib.suppress(OSError):  # The folder may not exist on this host.
        path.with_suffix(".json").unlink(missing_ok=True)
    return str(path)


def describe(world: Communicator, start_ns: int = 0) -> int:
    """Compare the hosts' clocks, write the JSON files of the boards, and return rank 0's time at the start.

    All ranks must call this function when a session begins, and again before the session ends. In the second call pass
    the result of the first call as ``start_ns``. Return 0 if boards are not kept.
    """
    if not (folder := config.timeline_directory()):
        return 0
    nodes = world.background.places.nodes.tolist()
    reading = tracing.read_clock(world.background.mpi, nodes)
    begin_ns: int = start_ns or world.background.mpi.bcast(reading.at_ns)
    if world.rank == nodes[world.rank] and os.path.isdir(folder):  # The host may not have the folder.
        path, clock = pathlib.Path(folder, f"node-{world.rank}.json"), []
        with contextlib.suppress(OSError):  # The disk may be full.
            if start_ns:
                clock = json.loads(path.read_text())["clock"]
            about = {"start_ns": begin_ns, "num_ranks": world.size, "host": socket.gethostname()}
            about["restart"] = int(os.environ.get("TORCHMPIRUN_RESTART", "0"))
            config.keep(path, about | {"versions": versions(), "clock": [*clock, reading._asdict()]})
    return begin_ns


def versions() -> str:
    """Return the versions of this package, of torch and of the MPI library as one line."""
    vendor, numbers = MPI.get_vendor()
    return f"torchmpi_py {torchmpi_py.__version__}, torch {torch.__version__}, {vendor} {'.'.join(map(str, numbers))}"


class KeptRank(NamedTuple):
    """The record of one rank: its whole flight recorder dump, with times on the clock of rank 0's host."""

    dump: dict[str, Any]
    host: str
    versions: str
    has_left: bool  # whether ``mpi.stop()`` has completed
    restart: int  # number of restarts of the job before this session


def load(folder: pathlib.Path) -> tuple[int, list[KeptRank]]:
    """Return the number of ranks of the last session, and each rank whose board is in ``folder``.

    Raise OSError or ValueError if a file cannot be read. Return 0 and an empty list if the folder has no boards.
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
    # Each rank reads two clocks to find its epoch. The system may interrupt a rank between the two readings. So use the
    # epoch of the node's first rank for all ranks of the node, which keeps their times comparable.
    shift_ns = board.get(EPOCH, 0) - board.get(EPOCH, index)
    for entry in dump["entries"]:
        for name in _TIMES:
            if entry[name]:
                entry[name] = _by_rank_0(entry[name] + shift_ns, about["clock"])
    has_left = board.get(HAS_LEFT, index) == STOPPED
    return KeptRank(dump, about["host"], about["versions"], has_left, about["restart"])


def _by_rank_0(time_ns: int, clock: list[Mapping[str, int]]) -> int:
    """Convert a host's time to the clock of rank 0's host, with linear interpolation between the two readings."""
    first, last = clock[0], clock[-1]
    passed_ns = last["at_ns"] - first["at_ns"]
    drift = (last["offset_ns"] - first["offset_ns"]) / passed_ns if passed_ns else 0.0
    return time_ns - first["offset_ns"] - round(drift * (time_ns - first["at_ns"]))
