"""Files with the measurements of ``autotune``: one per MPI, host, number of ranks on each node, and model of GPU.

``start`` loads the file of this job, and with GPUs also the file with the rows for GPUs. A file that does not
match the job or cannot be read is ignored, with a warning on rank 0, and the built-in defaults stay in use.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import logging
import math
import pathlib
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

import torchmpi_py
from torchmpi_py import trusted_files
from torchmpi_py.collectives.selector import ASSIGNED, Choice, Key, Selector, selector
from torchmpi_py.core import config
from torchmpi_py.core.channels import Place
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.memory import gpus

logger = logging.getLogger("torchmpi_py")

FORMAT = 2
Rows = dict[Key, list[Choice]]


class MachineFacts(NamedTuple):
    """Facts about a job, taken on rank 0. A measurement is valid only for jobs with the same facts."""

    mpi: str
    host: str
    ranks: str
    cpu: str
    gpu: str = ""  # empty for a measurement on CPUs

    def path(self) -> pathlib.Path:
        """Return the path of the file for measurements with these facts."""
        texts = filter(None, (self.mpi, self.host, self.ranks, self.gpu))
        parts = (re.sub(r"[^A-Za-z0-9.+]+", "_", text) for text in texts)
        return config.tuning_directory() / f"selector-{'-'.join(parts)}.json"


def facts(world: Communicator, device: str = "cpu") -> MachineFacts:
    """Return the facts of this job, for measurements on ``device``: "cpu" or "cuda"."""
    vendor, version = MPI.get_vendor()
    mpi = f"{vendor} {'.'.join(map(str, version))}"
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    return MachineFacts(mpi, socket.gethostname(), ranks_per_node(world.direct.places), cpu_model(), gpu)


def ranks_per_node(places: Iterable[Place]) -> str:
    """Return the number of ranks per node as text: "4x2" for 4 on each of 2 nodes, "4x2+1x1" if a third node has 1."""
    of_node = collections.Counter(place.node for place in places)
    nodes_with = collections.Counter(of_node.values())
    return "+".join(f"{ranks}x{nodes}" for ranks, nodes in sorted(nodes_with.items(), reverse=True))


def load_for(world: Communicator) -> None:
    """Load the measurements that match this job, if any, into the selector. Every rank of ``world`` must call it.

    Rows that the program has assigned are not replaced.
    """
    rows, sources = Rows(), list[str]()
    if world.rank == 0:
        for kind in ("cpu",) if gpus.table() is None else ("cpu", "cuda"):
            if (rows_and_source := _find(facts(world, kind))) is not None:
                rows |= rows_and_source[0]
                sources.append(rows_and_source[1])
    rows, sources = world.direct.mpi.bcast((rows, sources))
    if sources:
        assigned = {key: selector[key] for key in selector if any(c.why == ASSIGNED for c in selector[key])}
        install({**rows, **assigned}, "; ".join(sources))


def install(rows: Rows, source: str) -> None:
    """Put ``rows`` into the selector. Existing rows with the same keys are replaced, and all others are kept."""
    selector.load({**{key: selector[key] for key in selector}, **rows}, source)


def _find(expected: MachineFacts) -> tuple[Rows, str] | None:
    """Return the rows in the file for these facts, and their source.

    Return None if the file does not exist or cannot be used. Log a warning if it exists but cannot be used.
    """
    path = expected.path()
    try:
        rows, date = read(path, expected)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        logger.warning("selector: file %s is ignored: %s. To measure again, call mpi.autotune()", path, why)
        return None
    source = f"measured on {date}, {path}"
    logger.info("selector: %s", source)
    return rows, source


def read(path: pathlib.Path, expected: MachineFacts) -> tuple[Rows, str]:
    """Return the rows in a file, and the date of measurement.

    Raise ValueError if the file is damaged or was measured with different facts.
    """
    try:
        # The user has chosen the folder, so its owner is trusted: an administrator may have measured for all users.
        content = trusted_files.read_json(path, owners={path.parent.stat().st_uid})
        there, here = ({"format": content["format"], **content["facts"]}, {"format": FORMAT, **expected._asdict()})
        differing = [f"{name} {there.get(name)!r}, not {v!r}" for name, v in here.items() if there.get(name) != v]
        if not differing:
            return dict(_row(record) for record in content["rows"]), str(content["date"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is damaged, or has a different format ({type(error).__name__}: {error})") from error
    raise ValueError(f"it was measured with {', '.join(differing)}")


def _row(record: Mapping[str, Any]) -> tuple[Key, list[Choice]]:
    """Return the key and the choices of a record in a file. Raise an exception if the record is damaged."""
    key = Key(record["verb"], record["scope"], record["symmetric"], record["device"])
    choices = [Choice(math.inf if most is None else most, flavour, why) for most, flavour, why in record["choices"]]
    Selector()[key] = [(choice.max_bytes, choice.flavour) for choice in choices]  # An assignment checks the choices.
    return key, choices


def write(path: pathlib.Path, measured_with: MachineFacts, rows: Rows) -> str:
    """Write rows to a file, keep the file's rows for other keys, and return the date of measurement.

    Readers never see an incomplete file. Raise OSError if the file cannot be written.
    """
    with contextlib.suppress(OSError, ValueError):
        rows = {**read(path, measured_with)[0], **rows}
    date = dt.datetime.now().isoformat(" ", "minutes")
    no_limit = {math.inf: None}  # JSON cannot represent infinity.
    content = {
        "format": FORMAT,
        "facts": measured_with._asdict(),
        "date": date,
        "package": torchmpi_py.__version__,
        "torch": torch.__version__,
        "rows": [
            {**key._asdict(), "choices": [(no_limit.get(most, most), *others) for most, *others in rows[key]]}
            for key in sorted(rows)
        ],
    }
    config.keep(path, content)
    return date


def cpu_model() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
