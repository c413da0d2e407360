"""A process that cleans up where torchmpirun was killed with signal 9 and could not.

torchmpirun starts it before the first rank, and tells it over a pipe what the job has (`leftovers.Remains`), in lines
of which the last one counts. When all is in order torchmpirun kills the guardian. When the pipe breaks before that,
torchmpirun is gone: the kernel has sent SIGTERM to the MPI's starter (`job`), which gets the usual time to end the
ranks, also on other hosts; then the guardian kills what is left here, and removes the job's files and folder.

The guardian leads a session of its own, which no terminal ends, and lacks the job's mark. It runs in a bare Python
(``-I -S``) and imports what cleaning needs only when there is something to clean.
"""

import os
import signal
import sys
import time

GRACE_SECONDS = 5.0
_TAKING_SECONDS = 0.2  # how long the guardian, which may be stopped, may take to empty a full pipe
TYPE_CHECKING = False  # the module `typing` would be half of what this process needs
if TYPE_CHECKING:
    import subprocess

    from torchmpi_py.launch.cleanup import Remains


class Guardian:
    """torchmpirun's end of it; before ``with``, and after it, nothing is guarded."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""

    def __enter__(self) -> "Guardian":
        import subprocess

        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name != "TORCHMPIRUN_JOB_DIR"},  # an outer job's
            start_new_session=True,
        )
        os.set_blocking(self._pipe(), False)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None

    def note(self, remains: "Remains", stop_signals: tuple[int, ...]) -> None:
        """From now on these are what is to be cleared away; what the pipe does not take goes with the next note."""
        import select

        if self._process is None:
            return
        what = {
            "folder": str(remains.folder),
            "starter": remains.starter,
            "files_before": sorted(remains.files_before),
            "shared_memory": sorted(remains.shared_memory),
            "stop_signals": [int(each) for each in stop_signals],
        }
        unsent = self._unsent + repr(what).encode() + b"\n"
        try:
            while unsent and select.select([], [self._pipe()], [], _TAKING_SECONDS)[1]:
                unsent = unsent[os.write(self._pipe(), unsent) :]
        except BrokenPipeError:  # it was killed; the job goes on without
            pass
        lines = unsent.splitlines(keepends=True)
        self._unsent = b"".join(lines if len(lines) < 2 else (lines[0], lines[-1]))  # one that was begun, and the last

    def _pipe(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()


def clean(line: bytes, grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait for the job's end, then clear its remains away."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    import ast
    import shutil
    from pathlib import Path

    from torchmpi_py.launch.cleanup import Remains, is_marked

    what = ast.literal_eval(line.decode())
    remains = Remains(Path(what["folder"]), what["starter"], set(what["files_before"]), set(what["shared_memory"]))
    for signum in [0, *what["stop_signals"][1:]]:  # the first one, or SIGTERM, came from the kernel
        try:
            if signum and is_marked(remains.starter, remains.mark):
                os.kill(remains.starter, signum)
        except ProcessLookupError:  # it has just ended
            pass
        until = time.monotonic() + grace_seconds
        while is_marked(remains.starter, remains.mark) and time.monotonic() < until:
            remains.look()
            time.sleep(0.05)
    remains.clear()
    shutil.rmtree(remains.folder, ignore_errors=True)


def main() -> None:
    """Wait until torchmpirun is gone."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    lines = b""
    while piece := os.read(0, 1 << 16):
        *complete, rest = (lines + piece).split(b"\n")
        lines = b"\n".join([*complete[-1:], rest])
    *complete, _ = lines.split(b"\n")
    if complete:
        clean(complete[-1])


if __name__ == "__main__":
    main()
