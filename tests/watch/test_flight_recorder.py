"""Dumps: what is written is read again, in the order of the calls, and nothing but plain data is."""

import pathlib
import pickle

import pytest
import torch

from torchmpi_py.bench import UsageError, timeline_calls
from torchmpi_py.core import status_board
from torchmpi_py.watch import flight_recorder


@pytest.mark.mpi
def test_a_dump_has_all_operations_in_order(mpi, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHMPI_DUMP_DIR", str(tmp_path))
    mpi.allreduce(torch.ones(3), flavour="mpi")
    mpi.split(0).free()
    mpi.barrier()
    written, _, folder = flight_recorder.dump(status_board.current).partition(": ")
    assert written == "the last operations of each rank"
    path = pathlib.Path(folder) / f"flight_recorder_{mpi.rank()}"
    compared = [entry["profiling_name"] for entry in pickle.loads(path.read_bytes())["entries"]]
    assert compared[-2:] == ["gloo:all_reduce", "gloo:barrier"]
    entries = flight_recorder.read(path)["entries"]
    calls = ["allreduce mpi torch.float32 sum, 12 bytes", "split", "free", "barrier"]
    assert [entry["what"] for entry in entries[-4:]] == calls
    latest = status_board.current.records(status_board.current.index)[0]
    assert entries[-1]["site"] == latest.site  # the file alone where the board has no room for more texts


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"rank": 0}), pickle.dumps(pathlib.Path("x"))])
def test_a_file_that_is_no_dump(tmp_path, content):
    (tmp_path / "flight_recorder_0").write_bytes(content)
    with pytest.raises(UsageError, match="cannot read a dump in"):
        timeline_calls.load(tmp_path)


def test_a_folder_without_dumps(tmp_path):
    (tmp_path / "rank-0.json").touch()
    with pytest.raises(UsageError, match="has no dumps"):
        timeline_calls.load(tmp_path)
