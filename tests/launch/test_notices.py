"""What errors leave out: notices that repeat what was said, frames of the package, the same traceback of more ranks."""

import os

import pytest
from hypothesis import given, strategies
from support import jobs

import torchmpi_py
from torchmpi_py.core import config
from torchmpi_py.launch import notices

PACKAGE = os.path.dirname(torchmpi_py.__file__)
RULE = "-" * 74 + "\n"
ABORT = f"{RULE}MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 1\n\nNOTE: more\n{RULE}"
EXITED = f"{RULE}prterun has exited due to process rank 1 with PID 0 on node vm calling\n{RULE}"
OTHER = f"{RULE}A daemon has failed to start.\n{RULE}"
LINES = ["a line\n", "no end of a line", "---\n", "-", RULE, "\n", ABORT, EXITED, OTHER]
BAD_ROOT = """
import torch, torchmpi_py as mpi
def main():
    mpi.start()
    mpi.barrier()
    mpi.broadcast(torch.ones(3), root=7)
main()
"""


def shown(pieces, is_explained=True):
    found = notices.NoticeFilter(lambda: is_explained)
    return b"".join([*(found.feed(piece.encode()) for piece in pieces), found.overdue(at_end=True)]).decode()


@given(strategies.lists(strategies.integers(0, 600), max_size=6))
def test_notices_of_an_abort_are_left_out_however_they_come(cuts):
    text = f"before\n{ABORT}{EXITED}between\n{OTHER}[####  ] 3/4"
    cuts = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(pieces) == f"before\nbetween\n{OTHER}[####  ] 3/4"


@given(strategies.lists(strategies.sampled_from(LINES)))
def test_all_else_is_shown_whole(pieces):
    assert shown(pieces, is_explained=False) == "".join(pieces)
    pieces = [piece for piece in pieces if piece not in (ABORT, EXITED)]
    assert shown(pieces) == "".join(pieces)


@jobs.needs_mpi
def test_what_may_begin_a_notice_is_shown_at_the_end(tmp_path):
    program = jobs.write(tmp_path, "import sys; print('---', end='', file=sys.stderr)")
    assert jobs.torchmpirun("-n", 1, program).stderr == "---"


def test_a_line_passes_at_once_and_a_rule_after_a_while(monkeypatch):
    found = notices.NoticeFilter(lambda: True)
    assert found.feed(b"[##   ] 2/5\r") == b"[##   ] 2/5\r"
    assert found.feed(b"\n----") == b"\n"
    monkeypatch.setattr(notices, "_HOLD_SECONDS", 60.0)
    assert found.overdue() == b""
    monkeypatch.setattr(notices, "_HOLD_SECONDS", 0.0)
    assert found.overdue() == b"----"
    assert found.feed(b"more\n") == b"more\n"


def test_a_notice_without_an_end_is_shown_and_a_rule_not_held_while_more_comes():
    begin = f"{RULE}MPI_ABORT was invoked on rank 1\n"
    assert shown([begin, "x" * 5000]) == begin + "x" * 5000
    found = notices.NoticeFilter(lambda: True)
    found.feed(RULE.encode())
    assert jobs.until(lambda: found.feed(b"a line\n") or found.overdue(), 5).startswith(RULE.encode())


def raised(function, *arguments):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*arguments)
    return caught.value


def test_frames_of_the_package_are_left_out_where_it_refuses_what_it_is_given(monkeypatch):
    error = raised(config.from_environment, {"TORCHMPI_FUSE_BYTES": "x"})
    text = notices.traceback_text(error)
    assert PACKAGE not in text
    assert f'File "{__file__}"' in text
    assert "ValueError: TORCHMPI_FUSE_BYTES='x'" in text
    monkeypatch.setenv("TORCHMPI_ERRORS", "full")
    assert PACKAGE in notices.traceback_text(error)


def test_frames_are_kept_where_the_package_may_be_wrong():
    error = raised(config.known_names().__contains__, [])  # no frame of it: nothing is left out
    assert __file__ in notices.traceback_text(error)
    error = raised(config.profile_directory, 3)
    assert isinstance(error, AttributeError)
    assert PACKAGE in notices.traceback_text(error)


def test_frames_of_a_cause_are_left_out_by_its_own_kind():
    def raise_from():
        raise RuntimeError("mine") from raised(config.from_environment, {"TORCHMPI_FUSE_BYTES": "x"})

    text = notices.traceback_text(raised(raise_from))
    assert PACKAGE not in text
    assert "ValueError: TORCHMPI_FUSE_BYTES" in text
    assert text.count(f'File "{__file__}"') == 3


def test_what_another_rank_says_is_said_once(tmp_path):
    def others(error, rank, folder=tmp_path):
        with notices.said_once(str(folder), error, rank) as other:
            return other

    assert [others("error", 1), others("error", 0), others("another", 0)] == [None, 1, None]
    assert others("error", 0, tmp_path / "no folder") is None
    with pytest.raises(OSError, match="full"), notices.said_once(str(tmp_path), "third", 1):
        raise OSError("full")
    assert others("third", 0) is None  # a rank could not say it


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_full", [False, True])
def test_the_same_error_of_all_ranks_is_shown_once(program, no_leftovers, is_full):
    job = jobs.torchmpirun("-n", 3, program(BAD_ROOT), env={"TORCHMPI_ERRORS": "full"} if is_full else {})
    assert job.returncode == 1
    num_tracebacks = job.stderr.count("Traceback (most recent call last)")
    message = "ValueError: broadcast: root=7 is not a rank of this communicator; ranks are 0 to 2"
    assert job.stderr.count(message) == num_tracebacks
    assert ("torchmpi_py/collectives" in job.stderr) is is_full
    if not is_full:
        assert num_tracebacks == 1
        assert job.stderr.count("] ValueError: the same error as on rank") <= 2
        assert "MPI_ABORT" not in job.stderr.replace("MPI_Abort", "")
        assert "has exited due to" not in job.stderr
