"""The flight recorder's dump: what each rank of the node has called, in the format of PyTorch's flight recorder.

A dump is a folder with a pickle of each rank, ``flight_recorder_0`` and so on. Two programs read it::

    python -m torch.distributed.flight_recorder.fr_trace FOLDER
    python -m torchmpi_py.bench timeline FOLDER

PyTorch's analyzer compares ``entries``: operations that all ranks of a communicator call, under PyTorch's names and
with the name of a backend that it knows. Sizes are in bytes, for the board has no shapes; 0 where they may differ.
Ranks are those of the world. The operations that the analyzer does not know are in ``other_entries``. Each entry also
has ``what`` and ``site``: the call, and its place in the program, as reports show them.
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
from torchmpi_py.core.status_board import PROCESS, WORLD_RANK, Board, ReadableBoard, Record

PREFIX = "flight_recorder_"
VERSION = "2.10"
_MOST_BYTES = 1 << 28
_NAMES = {row.name: row.torch_name for row in COLLECTIVES.values() if row.torch_name} | {
    "barrier": "barrier",
    "mpi.stop()": "barrier",
}
_BACKEND = "gloo:"


def dump(board: Board) -> str:
    """Write the dumps of the ranks that can be seen to a new folder; return a line that names the folder, or an error.

    Only its owner can enter the folder: a dump has paths and lines of the program.
    """
    try:
        parent = config.dump_directory()
        os.makedirs(parent, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="torchmpi_py-hang-", dir=parent))
        for index in board.indices:
            path = folder / f"{PREFIX}{board.get(WORLD_RANK, index)}"
            path.write_bytes(pickle.dumps(of_rank(board, index)))
        return f"the last operations of each rank: {folder}"
    except Exception as error:
        return f"the last operations of each rank are not written: {error}"


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, texts, lists and dicts alone: a dump may come from another machine."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a dump has no {module}.{name}")


def read(path: pathlib.Path) -> dict[str, Any]:
    """The dump of a rank in a file, ``whole``. Raises OSError, or another error where the file is no dump."""
    content = trusted_files.read(path, _MOST_BYTES, owners=None)
    return whole(_PlainUnpickler(io.BytesIO(content)).load())


def whole(content: dict[str, Any]) -> dict[str, Any]:
    """The dump of a rank with all of its operations in ``entries``, the oldest first."""
    entries = content["entries"] + content.pop("other_entries", [])
    return {**content, "entries": sorted(entries, key=lambda entry: entry["op_id"])}


def of_rank(board: ReadableBoard, index: int) -> dict[str, Any]:
    """The dump of one rank, the oldest operation first."""
    groups: dict[str, dict[str, str]] = {}
    entries = [_entry(board, index, record, groups) for record in reversed(board.records(index))]
    compared = [entry for entry in entries if entry["profiling_name"].startswith(_BACKEND)]
    others = [entry for entry in entries if not entry["profiling_name"].startswith(_BACKEND)]
    if entries and entries[0]["op_id"] == 1:
        # The analyzer drops what is older than the first entry of any rank, by record_id. Ranks whose boards still have
        # every operation count alike from 1, so that nothing is dropped.
        for number, entry in enumerate(compared, 1):
            entry["record_id"] = number
    return {
        "version": VERSION,
        "rank": board.get(WORLD_RANK, index),
        "process": board.get(PROCESS, index),
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
    given = {"allgather": num_bytes * len(ranks), "reduce_scatter": num_bytes // max(1, len(ranks))}
    found = re.search(r"torch\.(\w+)", record.text)
    dtypes = [found[1] if found else "uint8"]
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
        "output_sizes": [[given.get(verb, num_bytes)]],
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
    """(name, description, ranks) of the communicator and thread: the name is the same on all of its ranks."""
    if record.slot < 0:
        return "0", "without a row", [board.get(WORLD_RANK, index)]
    group, generation = board.group(index, record.slot), record.fingerprint >> status_board.GENERATION_SHIFT
    if record.sequence_number and generation < group.generation & status_board.NUM_GENERATIONS - 1:
        return str(generation), "a communicator that was freed", []
    ranks = ranks_from_text(group.ranks)
    return f"{group.generation}.{min(ranks, default=0)}", group.key, ranks


def _place(site: str) -> tuple[str, int, str]:
    """(file, line, function) of a call site."""
    found = re.fullmatch(r"(.*):(\d+) in (.*)", site)
    return (found[1], int(found[2]), found[3]) if found else (site, 0, "")
