"""What is started in a folder whose files are called like modules of Python: none of them runs in a child of ours."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import jobs

from torchmpi_py.launch import child_python

NAMES = (
    *("argparse", "base64", "contextlib", "importlib", "json", "numpy", "pathlib", "platform", "runpy", "socket"),
    *("subprocess", "threading", "torch", "torchmpi_py", "typing", "zlib"),
)
# The program has a module beside it, which it sees as under plain Python.
PROGRAM = """
import beside, json, sys, torchmpi_py as mpi
mpi.start()
assert mpi.allreduce(1) == mpi.size()
print("right", beside.VALUE, json.dumps(sys.argv[1:]), flush=True)
"""
# A kernel has the folder on its path, and first what it imports itself.
NOTEBOOK = """
import queue, sys
from torchmpi_py.notebook.rank_job import RankJob
job = RankJob(["-n", "2"])
try:
    job.begin(job.ranks, "run", 1, "import own\\nprint(own.VALUE, end='')")
    shown = [job.events.get(timeout=60) for _ in range(4)]
finally:
    job.stop()
assert sorted(text for _, (kind, *_, text) in shown if kind == "text") == ["7", "7"], shown
print("right")
"""
AGENT = """\
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
JOB = ["-n", "2", "../programs/program.py", "word"]
AWAY = ["--hosts", "localhost,other", "--launch-agent"]
STARTS = {  # what is started, its exit code, and what it prints
    "--version": (["--version"], 0, "Python"),
    "--check": (["--check"], 0, "this host can run a job"),
    "--check of hosts": (["--check", *AWAY, "../agent"], 0, "2 hosts answer"),
    "--timeline": (["--timeline", "../timeline.html", *JOB], 0, 'right 5 ["word"]'),
    "--groups": (["--groups", "2", *JOB], 0, 'right 5 ["word"]'),
    "hosts that do not come up": ([*AWAY, "/bin/false", *JOB], None, "other: no answer"),
    "doctor": (child_python.command("torchmpi_py.doctor")[1:], 0, "the sum over two ranks is right"),
    "notebook": (["../programs/notebook.py"], 0, "right"),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@jobs.needs_mpi
@pytest.mark.parametrize("what", STARTS)
def test_no_file_of_the_current_folder_runs(tmp_path, what):
    words, code, text = STARTS[what]
    if what == "notebook":
        pytest.importorskip("IPython", reason="pip install ipython")
    for name in NAMES:
        ran = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')"
        jobs.write(tmp_path / "hostile", f"{ran}\nimport sys; sys.exit(3)", f"{name}.py")
    jobs.write(tmp_path / "hostile", "VALUE = 7", "own.py")
    jobs.write(tmp_path / "programs", PROGRAM)
    jobs.write(tmp_path / "programs", "VALUE = 5", "beside.py")
    jobs.write(tmp_path / "programs", NOTEBOOK, "notebook.py")
    jobs.script(tmp_path, AGENT, "agent")
    starter = sys.executable if words[0].endswith(".py") else Path(sys.executable).with_name("torchmpirun")
    done = jobs.run(starter, *words, cwd=tmp_path / "hostile", stdin=subprocess.DEVNULL, seconds=300)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text() + done.stdout + done.stderr
    assert text in done.stdout + done.stderr
    assert (done.returncode == code) if code is not None else done.returncode
    assert what != "--timeline" or (tmp_path / "timeline.html").exists()
