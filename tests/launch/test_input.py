"""What a job takes of its caller's standard streams: as much as plain Python takes."""

import fcntl
import os
import socket
import subprocess
import sys

import pytest
from support import jobs

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_leftovers"), jobs.needs_mpi]

LINES = "".join(f"line {number}\n" for number in range(5000)).encode()  # fits into a pipe
NOTHING, SOME_BYTES, ONE_LINE = "pass", "print(os.read(0, 14))", "print(input())"
ALL = "import zlib; print(zlib.crc32(sys.stdin.buffer.read()))"
A_CHILD = "subprocess.run(['head', '-c', '14'], check=True)"
PROGRAM = "import os, subprocess, sys\nif os.environ.get('RANK', '0') == '0':\n    {read}\n"


def source(kind, tmp_path):
    """A descriptor that LINES can be read from."""
    if kind == "file":
        (tmp_path / "lines").write_bytes(LINES)
        file = os.open(tmp_path / "lines", os.O_RDONLY)
        os.lseek(file, 7, os.SEEK_SET)  # a shell has read the first line
        return file
    if kind == "pipe":
        reading, writing = os.pipe()
    else:
        reading, writing = (each.detach() for each in socket.socketpair())
        os.set_blocking(writing, True)
    os.write(writing, LINES[:40000])
    os.close(writing)
    return reading


def taken(command, kind, tmp_path):
    """What a command prints, what it leaves of its input, and whether its streams are blocking afterwards."""
    stdin, (reading, writing) = source(kind, tmp_path), os.pipe()
    try:
        done = subprocess.run(command, stdin=stdin, stdout=writing, stderr=subprocess.PIPE, timeout=jobs.SECONDS)
        flags = [fcntl.fcntl(each, fcntl.F_GETFL) & os.O_NONBLOCK for each in (stdin, writing)]
        os.close(writing)
        with os.fdopen(reading, "rb") as shown, os.fdopen(stdin, "rb", closefd=False) as left:
            return done.returncode, shown.read(), left.read(), flags
    finally:
        os.close(stdin)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        *(("file", read) for read in (NOTHING, ONE_LINE, A_CHILD)),
        *(("pipe", read) for read in (NOTHING, SOME_BYTES, ALL)),
        *(("socket", read) for read in (ONE_LINE, A_CHILD)),
    ],
)
def test_a_job_takes_what_its_program_reads(tmp_path, program, kind, read):
    path = program(PROGRAM.format(read=read))
    plain = taken([sys.executable, path], kind, tmp_path)
    assert plain[0] == 0
    assert taken([*jobs.TORCHMPIRUN, "-n", "2", path], kind, tmp_path) == plain


def test_a_loop_over_a_list_runs_for_each_line(tmp_path, program):
    (tmp_path / "list").write_text("one\ntwo\n")
    loop = 'while read -r word; do "$0" -m torchmpi_py.launch -n 1 "$1" "$word"; done'
    with open(tmp_path / "list") as words:
        done = jobs.run("sh", "-c", loop, sys.executable, program("import sys; print(sys.argv[1])"), stdin=words)
    assert done.stdout == "one\ntwo\n"


@pytest.mark.skipif(jobs.VENDOR != "mpich", reason="Open MPI's own sockets do not fit there")
def test_a_long_folder_for_temporary_files(tmp_path, program, monkeypatch):
    """The path of a socket has 107 characters at most."""
    folder = tmp_path / "t" / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    path = program(PROGRAM.format(read=ONE_LINE))
    assert taken([*jobs.TORCHMPIRUN, "-n", "1", path], "pipe", tmp_path)[:2] == (0, b"line 0\n")
    folder.rmdir()


def test_the_first_process_that_asks_has_the_input(tmp_path):
    text = """
    import subprocess, sys
    from torchmpi_py.launch import handed_input
    handed_input.offer(sys.argv[1])
    take = "import os, sys; from torchmpi_py.launch import handed_input; handed_input.take(sys.argv[1])"
    take += "; os.write(1, os.read(0, 4) or b'-')"
    takers = [subprocess.Popen([sys.executable, "-c", take, sys.argv[1]], stdin=subprocess.DEVNULL) for _ in range(3)]
    assert not any([taker.wait() for taker in takers])
    """
    done = jobs.python(text, tmp_path, input="word")
    assert (done.stdout.replace("-", ""), len(done.stdout), done.stderr, done.returncode) == ("word", 6, "", 0)
