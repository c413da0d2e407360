"""Dump the calls of each rank of the node in the format of PyTorch's flight recorder.

A dump is a folder with one pickle per rank: ``flight_recorder_0`` and so on. Two programs can read a dump::

    python -m torch.distributed.flight_recorder.fr_trace FOLDER
    python -m torchmpi_py.bench timeline FOLDER

PyTorch's analyzer compares ``entries``: the operations that all ranks of a communicator call. Entries have PyTorch's
names, and the name of a backend that the analyzer knows. Sizes are in bytes because the board holds no shapes. A size
is 0 if it may differ between ranks. Ranks are world ranks. ``other_entries`` contains the operations that the analyzer
cannot compare, such as messages. Each entry also has ``what`` and ``site``: the call and its place in the program, as
reports show them.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import tempfile
from typing import Any

from torchmpi_py import trusted_files
from torchmpi_py.core import config, status_board
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.core.sequences import ranks_from_text
from torchmpi_py.core.status_board import Board, ReadableBoard, Record

PREFIX = "flight_recorder_"
VERSION = "2.10"
_MOST_BYTES = 1 << 28
_NAMES = {row.name: row.torch_name for row in COLLECTIVES.values() if row.torch_name} | {
    "barrier": "barrier",
    "mpi.stop()": "barrier",
}
_BACKEND = "gloo:"


def dump(board: Board) -> str:
    """Write the dumps of this board's ranks to a new folder, and return a line with the folder's path or the error.

    Only the user who runs the job can read the folder, because a dump contains paths and function names of the program.
    """
    try:
        parent = config.dump_directory()
        os.makedirs(parent, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="torchmpi_py-hang-", dir=parent))
        for index in board.indices:
            path = folder / f"{PREFIX}{board.get(status_board.WORLD_RANK, index)}"
            path.write_bytes(pickle.dumps(of_rank(board, index)))
        return f"the last operations of each rank: {folder}"
    except Exception as error:
        return f"cannot write the last operations of each rank ({error}); set {config.DUMP_DIR} to another folder"


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that accepts only numbers, texts, lists and dicts, because other objects could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a file contains {module}.{name}, and dumps do not; use a folder with dumps only")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Return the dump in a rank's file, with all operations in ``entries``.

    Raise an error if the file cannot be read or is not a dump.
    """
    content = trusted_files.read(path, _MOST_BYTES, owners=None)
    return whole(_PlainUnpickler(io.BytesIO(content)).load())


def whole(content: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's dump with all of its operations in ``entries``, the oldest first. Changes ``content``."""
    entries = content["entries"] + content.pop("other_entries", [])
    return {**content, "entries": sorted(entries, key=lambda entry: entry["op_id"])}


def of_rank(board: ReadableBoard, index: int) -> dict[str, Any]:
    """Return the dump of one rank, with the oldest operation first."""
    groups: dict[str, dict[str, str]] = {}
    entries = [_entry(board, index, record, groups) for record in reversed(board.records(index))]
    compared = [entry for entry in entries if entry["profiling_name"].startswith(_BACKEND)]
    others = [entry for entry in entries if not entry["profiling_name"].startswith(_BACKEND)]
    if entries and entries[0]["op_id"] == 1:
        # The analyzer drops each entry whose record_id is smaller than the first record_id of any rank. If the board
        # still has every operation, numbering the compared entries from 1 on every rank prevents this.
        for number, entry in enumerate(compared, 1):
            entry["record_id"] = number
    return {
        "version": VERSION,
        "rank": board.get(status_board.WORLD_RANK, index),
        "process": board.get(status_board.PROCESS, index),
        "pg_config": groups,
        "pg_status": {},
        "entries": compared,
        "other_entries": others,
    }


def _entry(board: ReadableBoard, index: int, record: Record, groups: dict[str, dict[str, str]]) -> dict[str, Any]:
    name, desc, ranks = _group(board, index, record)
    groups.setdefault(name, {"name": name, "desc": desc, "ranks": str(ranks)})
    verb = record.text.split(" ", 1)[0]
    is_known = record.sequence_number > 0 and verb in _NAMES and bool(ranks)
    num_bytes = 0 if "any-size" in record.text else record.num_bytes
    output_bytes = {"allgather": num_bytes * len(ranks), "reduce_scatter": num_bytes // max(1, len(ranks))}
    dtype_match = re.search(r"torch\.(\w+)", record.text)
    dtypes = [dtype_match[1] if dtype_match else "uint8"]
    file, line, where = _place(record.site)
    duration = record.ended - record.begun if record.ended > 0 and record.begun else None
    return {
        "record_id": record.number,
        "pg_id": int(name.split(".")[0]) if name else 0,
        "process_group": [name, desc],
        "collective_seq_id": record.sequence_number,
        "p2p_seq_id": 0 if record.sequence_number else record.number,
        "op_id": record.number,
        "profiling_name": f"{_BACKEND}{_NAMES[verb]}" if is_known else f"mpi:{verb}",
        "time_created_ns": record.launched,
        "time_discovered_started_ns": record.begun or None,
        "time_discovered_completed_ns": abs(record.ended) or None,
        "duration_ms": None if duration is None else duration / 1e6,
        "input_sizes": [[num_bytes]],
        "input_dtypes": dtypes,
        "output_sizes": [[output_bytes.get(verb, num_bytes)]],
        "output_dtypes": dtypes,
        "state": "completed" if record.ended else "started" if record.begun else "scheduled",
        "has_failed": record.ended < 0,
        "is_p2p": not record.sequence_number,
        "retired": bool(record.ended),
        "timeout_ms": 0,
        "frames": [{"name": where, "filename": file, "line": line}],
        "what": record.what,
        "site": record.site,
    }


def _group(board: ReadableBoard, index: int, record: Record) -> tuple[str, str, list[int]]:
    """Return (name, description, ranks) of an operation's communicator. The name is the same on all ranks."""
    if record.slot < 0:
        return "0", "unknown communicator", [board.get(status_board.WORLD_RANK, index)]
    group, generation = board.group(index, record.slot), record.fingerprint >> status_board.GENERATION_SHIFT
    if record.sequence_number and generation < group.generation & status_board.NUM_GENERATIONS - 1:
        return str(generation), "a communicator that was freed", []
    ranks = ranks_from_text(group.ranks)
    return f"{group.generation}.{min(ranks, default=0)}", group.key, ranks


def _place(site: str) -> tuple[str, int, str]:
    """Return (file, line, function) of a call site."""
    match = re.fullmatch(r"(.*):(\d+) in (.*)", site)
    return (match[1], int(match[2]), match[3]) if match else (site, 0, "")
