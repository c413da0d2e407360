"""The job of a notebook, as the kernel has it: its launcher, and a connection to each rank.

The kernel listens until all ranks have connected: on a Unix socket in a folder of this user's alone, or with hosts that
are named, on the address of the interface that leads there. Both sides prove that they know the key
(``multiprocessing.connection``), before anything else is read. Each connection has a thread for that, so that a silent
one delays no rank, and too many push out the oldest. The launcher is in a process group of its own, which an interrupt
of the kernel does not reach, and in the kernel's session: where the kernel dies, the launcher ends the ranks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import allocation, child_python, variables
from torchmpi_py.launch.options import parse

VARIABLE = variables.NOTEBOOK
_REFUSED = "elastic elastic_restart discover max_restarts groups layouts"
LAUNCHER = -1  # in the place of a rank
_PROGRAM = child_python.command("torchmpi_py.notebook.rank_program")[1:]  # without Python, which torchmpirun adds
_LOOK_SECONDS = 0.2
_ACCEPT_SECONDS = 0.05  # between two looks for ranks that have proved the key
_HELLO_SECONDS = 20  # for a connection to prove the key
_MOST_UNPROVED = 64  # connections that have yet to do so
_END_SECONDS = 5.0  # for ranks that are asked to end
_KILL_SECONDS = 20.0  # for the launcher to end ranks that did not

_Outbox = queue.SimpleQueue["tuple[object, ...] | None"]


class RankProcess(NamedTuple):
    """The process of a rank, and its host."""

    process_id: int
    host: str


class RankJob:
    """Ranks that wait for cells. ``words``: options of torchmpirun. LaunchError if the ranks cannot start.

    ``events``: what comes from the ranks, and from the launcher, as (rank, (kind, ...)). ``busy``: ranks in a cell.
    ``num_called``: how many collectives each rank had called on each communicator when its last cell ended.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.size = 0  # until the first rank says
        self.processes: dict[int, RankProcess] = {}
        self.busy: set[int] = set()
        self.num_called: dict[int, dict[object, int]] = {}
        self.events: queue.SimpleQueue[tuple[int, tuple[Any, ...]]] = queue.SimpleQueue()
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._outgoing: queue.SimpleQueue[tuple[set[int], tuple[object, ...] | None]] = queue.SimpleQueue()
        key = secrets.token_bytes(32)
        with _listening(_address_for(words)) as (listener, where):
            self._launcher = subprocess.Popen(
                child_python.command("torchmpi_py.launch", *words, *_PROGRAM),
                env=os.environ | {VARIABLE: f"{where}:{key.hex()}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=_leave_group,
            )
            threading.Thread(target=self._read_launcher, daemon=True).start()
            threading.Thread(target=self._distribute, daemon=True).start()
            try:
                self._accept_ranks(listener, key)
            except BaseException:
                self.stop()
                raise
        for rank, connection in self._connections.items():
            threading.Thread(target=self._read_rank, args=(rank, connection), daemon=True).start()

    def _accept_ranks(self, listener: socket.socket, key: bytes) -> None:
        listener.settimeout(_ACCEPT_SECONDS)
        unproved: list[socket.socket] = []
        proved: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        while not self.size or len(self.processes) < self.size:
            try:
                unproved.append(listener.accept()[0])
            except TimeoutError:
                if self._launcher.poll() is not None:
                    raise LaunchError(f"the ranks did not start: {self.last_words()}") from None
            else:
                threading.Thread(target=_hear_proof, args=(unproved[-1], key, unproved, proved), daemon=True).start()
            with contextlib.suppress(IndexError, OSError):  # its thread may have taken it out, or it has ended
                if len(unproved) > _MOST_UNPROVED:
                    unproved.pop(0).shutdown(socket.SHUT_RDWR)
            while not proved.empty():
                connection, rank, self.size, *process = proved.get()
                self._connections[rank], self.processes[rank] = connection, RankProcess(*process)
                self._outboxes[rank] = outbox = _Outbox()
                threading.Thread(target=_write_to, args=(connection, outbox), daemon=True).start()

    def _read_rank(self, rank: int, connection: Connection[Any, Any]) -> None:
        """In a thread: what a rank sends, until its end."""
        try:
            with connection, contextlib.suppress(EOFError, OSError):
                while True:
                    self.events.put((rank, connection.recv()))
        finally:  # also where a message cannot be unpickled here
            self.events.put((rank, ("gone",)))

    def _read_launcher(self) -> None:
        """In a thread: what the launcher, MPI and C libraries write."""
        assert self._launcher.stdout is not None
        with self._launcher.stdout as lines:
            for line in lines:
                self.events.put((LAUNCHER, ("line", line.decode(errors="replace"))))
        self.events.put((LAUNCHER, ("over",)))

    def send(self, ranks: set[int], kind: str, *content: object) -> None:
        """Have a message sent to ranks. One that is gone is noticed by its event.

        Threads do it: an interrupt of the kernel neither cuts a message off, nor keeps it from some of the ranks.
        """
        self._outgoing.put((ranks, (kind, *content)))

    def _distribute(self) -> None:
        """In a thread: hand messages to the threads of their ranks, one of which may be slow; the last one is None."""
        message: tuple[object, ...] | None = ()
        while message is not None:
            ranks, message = self._outgoing.get()
            for rank in ranks & self._outboxes.keys():
                self._outboxes[rank].put(message)

    def begin(self, ranks: set[int], kind: str, *content: object) -> None:
        """Send ranks something to do."""
        self.busy |= ranks
        self.send(ranks, kind, *content)

    @property
    def ranks(self) -> set[int]:
        """All ranks."""
        return set(range(self.size))

    @property
    def has_ended(self) -> bool:
        """Whether its launcher has."""
        return self._launcher.poll() is not None

    def last_words(self, heed: Callable[..., None] = lambda *_: None) -> str:
        """What the launcher has said last, once its end is there or near, and otherwise its exit code.

        ``heed`` is called with each other event (rank, kind, ...) that has not been taken.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_KILL_SECONDS)
        text = ""
        with contextlib.suppress(queue.Empty):
            while (event := self.events.get(timeout=_LOOK_SECONDS)) != (LAUNCHER, ("over",)):
                rank, (kind, *content) = event
                if kind == "line":
                    text += content[0]
                else:
                    heed(rank, kind, *content)
        return text.strip() or f"torchmpirun has ended with exit code {self._launcher.poll()}"

    def stop(self) -> None:
        """End the ranks: in order those that are idle, and the others by a signal."""
        self.send(self.ranks, "end")
        self._outgoing.put((self.ranks, None))
        try:
            for seconds, end in (
                (_END_SECONDS * (self.size > 0), self._launcher.terminate),
                (_KILL_SECONDS, self._launcher.kill),
            ):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._launcher.wait(seconds)
                    return
                end()
            self._launcher.wait()
        except KeyboardInterrupt:
            self._launcher.terminate()  # the launcher ends the ranks without us
            raise


@contextlib.contextmanager
def _listening(address: str) -> Iterator[tuple[socket.socket, str]]:
    """A socket for ranks to connect to, and where it is: for ranks of this host a path that no other user can open."""
    if address != variables.LOOPBACK:
        with socket.create_server((address, 0)) as listener:
            yield listener, f"{address}:{listener.getsockname()[1]}"
        return
    with contextlib.ExitStack() as held:
        try:
            path = os.path.join(held.enter_context(tempfile.TemporaryDirectory(prefix="torchmpi_py-")), "kernel")
            listener = held.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(path)
            listener.listen()
        except OSError as error:
            where = f"TMPDIR is {tempfile.gettempdir()}; set it to /tmp, or to another short path"
            raise LaunchError(f"cannot make a socket for the ranks: {error}; {where}") from None
        yield listener, path


def connect(where: str, key: bytes) -> Connection[Any, Any]:
    """The connection of a rank to the kernel that listens at ``where``, on which both sides have proved the key."""
    host, _, port = where.rpartition(":")
    return Client(where if where.startswith("/") else (host, int(port)), authkey=key)


def _hear_proof(accepted: socket.socket, key: bytes, unproved: list[socket.socket], proved: Any) -> None:
    """In a thread: move a connection from ``unproved`` to ``proved``, with what the rank says of itself."""
    connection: Connection[Any, Any] = Connection(os.dup(accepted.fileno()))
    with accepted:
        _limit(accepted, _HELLO_SECONDS)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            hello = connection.recv()
            unproved.remove(accepted)  # ValueError: it was pushed out meanwhile
        except (AuthenticationError, EOFError, OSError, ValueError):  # a stranger, or one that says nothing
            connection.close()
            with contextlib.suppress(ValueError):
                unproved.remove(accepted)
            return
        _limit(accepted, 0)
    proved.put((connection, *hello))


def _write_to(connection: Connection[Any, Any], outbox: _Outbox) -> None:
    """In a thread: send what is in the outbox, until there is None."""
    while (message := outbox.get()) is not None:
        with contextlib.suppress(OSError, TypeError):  # TypeError: it was closed in the middle
            connection.send(message)


def _limit(connection: socket.socket, seconds: int) -> None:
    """How long a read or write of a connection may take; 0: for ever."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _address_for(words: list[str]) -> str:
    """The address to listen on for ranks that these options start. LaunchError for options that make no sense here."""
    try:
        options = parse([*words, *_PROGRAM])
    except SystemExit:
        raise LaunchError(f"{' '.join(words)}: give options of torchmpirun, as -n 4; the error is above") from None
    if options.program != _PROGRAM:
        raise LaunchError(f"{options.program[0]!r} is no option of torchmpirun; the program is the cell")
    if refused := [f"--{name.replace('_', '-')}" for name in _REFUSED.split() if getattr(options, name)]:
        raise LaunchError(f"{', '.join(refused)}: not for notebooks, in which a death ends the ranks; leave it out")
    placed = allocation.place(1, options.hosts, options.hostfile, os.environ)
    addresses = (_address_towards(host.name.rpartition("@")[2]) for host in placed.hosts)
    return next((address for address in addresses if not address.startswith("127.")), variables.LOOPBACK)


def _address_towards(host: str) -> str:
    """This host's address on the interface that leads there. LaunchError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # which sends nothing
        except OSError as error:
            raise LaunchError(f"{host}: {error.strerror}; name a host that this one can reach") from None
        return str(probe.getsockname()[0])


def _leave_group() -> None:
    """In the launcher, before it is executed: heed the death of the kernel, and not the kernel's interrupts."""
    os.setpgid(0, 0)
    for signum in (signal.SIGINT, signal.SIGHUP):  # ignored under nohup
        signal.signal(signum, signal.SIG_DFL)
