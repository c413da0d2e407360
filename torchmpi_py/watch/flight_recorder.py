"""The flight recorder's dump: what each rank of the node has called, in the format of PyTorch's.

A dump is a folder. For each rank it has two files of nearly the same content: ``rank-0.json``, which ``python -m
torchmpi_py.bench hang`` reads, and a pickle, ``flight_recorder_0``, in the form in which PyTorch's analyzer takes it::

    python -m torch.distributed.flight_recorder.fr_trace FOLDER

It compares operations that all ranks of a communicator call: the pickles have those alone, under PyTorch's names and
with the name of a backend that it knows. Sizes are in bytes, for shapes are not noted; 0 where they may differ. The
ranks are those of the world. The files in JSON have all operations, and what is said of them here: ``what``, ``site``.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import tempfile
from typing import Any

from torchmpi_py.core import config
from torchmpi_py.core.sequences import ranks_from_text
from torchmpi_py.core.status_board import GENERATION_SHIFT, NUM_GENERATIONS, PROCESS, WORLD_RANK, Board, Record

PREFIX = "flight_recorder_"
VERSION = "2.10"
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast_object": "broadcast",
    "allgather_object": "all_gather",
    "mpi.stop()": "barrier",
}
_BACKEND = "gloo:"
_KNOWN = {"broadcast", "reduce", "reduce_scatter", "gather", "scatter", "barrier", *_NAMES}


def dump(used: Board) -> str:
    """Write those of the ranks that can be seen into a new folder; where it is, or why there is none.

    Only its owner can enter the folder: a dump has paths and lines of the program.
    """
    try:
        parent = config.dump_directory()
        os.makedirs(parent, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="torchmpi_py-hang-", dir=parent))
        for index in used.indices:
            content = of_rank(used, index)
            rank = used.get(WORLD_RANK, index)
            (folder / f"rank-{rank}.json").write_text(json.dumps(content, indent=1))
            content["entries"] = _for_the_analyzer(content["entries"])
            (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(content))
        return f"the last operations of each rank: {folder}"
    except Exception as error:
        return f"the last operations of each rank are not written: {error}"


def of_rank(used: Board, index: int) -> dict[str, Any]:
    """What one rank has called, the oldest first."""
    groups: dict[str, dict[str, str]] = {}
    entries = [_entry(used, index, record, groups) for record in reversed(used.records(index))]
    return {
        "version": VERSION,
        "rank": used.get(WORLD_RANK, index),
        "process": used.get(PROCESS, index),
        "pg_config": groups,
        "pg_status": {},
        "entries": entries,
    }


def _for_the_analyzer(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that it can compare. It takes first ones for the same: they count from 1, if all are still there."""
    compared = [entry for entry in entries if entry["profiling_name"].startswith(_BACKEND)]
    if not entries or entries[0]["record_id"] > 1:
        return compared
    return [{**entry, "record_id": number} for number, entry in enumerate(compared, 1)]


def _entry(used: Board, index: int, record: Record, groups: dict[str, dict[str, str]]) -> dict[str, Any]:
    name, desc, ranks = _group(used, index, record)
    groups.setdefault(name, {"name": name, "desc": desc, "ranks": str(ranks)})
    verb = record.text.split(" ", 1)[0]
    is_known = record.sequence_number > 0 and verb in _KNOWN and bool(ranks)
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
        "profiling_name": f"{_BACKEND}{_NAMES.get(verb, verb)}" if is_known else f"mpi:{verb}",
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


def _group(used: Board, index: int, record: Record) -> tuple[str, str, list[int]]:
    """(name, in words, ranks) of the communicator and thread: the name is the same on all of its ranks."""
    if record.slot < 0:
        return "0", "without a row", [used.get(WORLD_RANK, index)]
    group, generation = used.group(index, record.slot), record.fingerprint >> GENERATION_SHIFT
    # A larger one is the slot's too: long sequences count on into the next generation.
    if record.sequence_number and generation < group.generation & NUM_GENERATIONS - 1:
        return str(generation), "a communicator that was freed", []
    ranks = ranks_from_text(group.ranks)
    return f"{group.generation}.{min(ranks, default=0)}", group.key, ranks


def _place(site: str) -> tuple[str, int, str]:
    """(file, line, function) of a place in the program."""
    found = re.fullmatch(r"(.*):(\d+) in (.*)", site)
    return (found[1], int(found[2]), found[3]) if found else (site, 0, "")
