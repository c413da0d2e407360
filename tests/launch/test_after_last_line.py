"""What a program may do between its last line and the interpreter's end: under torchmpirun as under plain Python."""

import subprocess
import sys
import zipfile

import pytest
from support import jobs

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("full_collections"), jobs.needs_mpi]

# Each entry is named by what it prints at the end, and uses what the program has defined in __main__.
PROGRAM = """
import atexit, concurrent.futures, logging.handlers, multiprocessing, os, pickle, sys, threading, time, weakref

class Point:
    def __init__(self, place):
        self.place = place
    def __repr__(self):
        return f"Point({self.place})"

class Last:
    def __del__(self):
        os.write(1, f"finalizer of a global: {Point(7)}\\n".encode())

def square(number):
    return Point(number * number)

def report(name, value):
    os.write(1, f"{name}: {value!r}\\n".encode())

def after_the_last_line():
    threading.main_thread().join()
    copies = pickle.loads(pickle.dumps([Point(1), square]))
    report("thread that pickles", copies[1](3))
    report("thread that looks at __main__", sorted(set(vars(sys.modules["__main__"])) & {"Point", "PROOF", "report"}))

def at_the_end():
    report("atexit", pickle.loads(pickle.dumps(Point(4))))
    report("atexit: the module", (sys.modules["__main__"].square is square, os.path.basename(sys.argv[0]), PROOF))

class Shown(logging.Handler):
    def emit(self, record):
        report("logging", pickle.loads(record.args[0]))

if __name__ == "__main__":
    PROOF, last = "proof", Last()
    atexit.register(at_the_end)
    weakref.finalize(square, report, "weakref.finalize", Point(5))
    threading.Thread(target=after_the_last_line).start()
    log = logging.getLogger("end")
    log.addHandler(logging.handlers.MemoryHandler(100, target=Shown()))
    log.warning("%s", pickle.dumps(Point(6)))
    forked = multiprocessing.get_context("fork")
    results, taken = forked.Queue(), os.pipe()
    child = forked.Process(target=lambda: os.write(taken[1], repr([results.get() for _ in range(200)]).encode()))
    child.start()
    def show_taken():
        child.join()
        report("multiprocessing.Queue", len(os.read(taken[0], 1 << 16)))
    atexit.register(show_taken)
    for number in range(200):
        results.put(Point(number))
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(time.sleep, 0.3)
    pool.submit(lambda: report("executor", pickle.loads(pickle.dumps(square(9)))))
    report("__main__", [__spec__ and __spec__.name, __package__, __file__ == os.path.abspath(__file__), __builtins__])
"""

# A collective by an atexit function that is registered after the start, thus runs before the end of MPI.
COLLECTIVES = """
import atexit, pickle, threading
import torch, torchmpi_py as mpi

class Loss:
    pass

mpi.start()

@atexit.register
def mean():
    kinds = mpi.allgather_object(Loss())
    total = mpi.allreduce(torch.tensor([mpi.rank() + 1.0]))
    assert [type(kind) for kind in kinds] == [Loss] * mpi.size()
    if mpi.rank() == 0:
        print("sum", total.item(), flush=True)
"""
KINDS = {"script": ["program/__main__.py"], "module": ["-m", "program"], "folder": ["program"], "zip": ["program.zip"]}


def ended(command, folder):
    done = jobs.run(*command, cwd=folder, stdin=subprocess.DEVNULL)
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_ends_as_under_plain_python(tmp_path, kind):
    """Every line that plain Python prints is printed, and nothing else."""
    main = jobs.write(tmp_path / "program", PROGRAM, "__main__.py")
    (tmp_path / "program" / "__init__.py").write_text("")
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as file:
        file.write(main, "__main__.py")
    plain = ended([sys.executable, *KINDS[kind]], tmp_path)
    assert (plain[0], len(plain[1]), plain[2]) == (0, 10, "")
    assert ended([*jobs.TORCHMPIRUN, "-n", "1", *KINDS[kind]], tmp_path) == plain


def test_collectives_at_exit(tmp_path):
    jobs.write(tmp_path, COLLECTIVES)
    assert ended([*jobs.TORCHMPIRUN, "-n", "2", "program.py"], tmp_path) == (0, ["sum 3.0"], "")
