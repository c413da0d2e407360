"""Hosts that come and go: a script names those that are there, and the job starts again when they change.

The script (``--discover``) is a shell command that prints one host per line, in any form of a hostfile. A thread runs
it every few seconds. A script that fails, or does not answer, changes nothing, and one line says so. The job starts
again if a host of its ranks is gone or has too few slots, or if there is room for more ranks, up to the MAX of
``--elastic-restart``: the attempt is ended as by SIGTERM, so that the program saves.

What ends an attempt must be true. So an answer counts only when the script has given it twice in a row (a file may be
half written), and a host that is new to the job gets ranks only if it can be reached (its sshd may be still to come).

The next attempt takes the hosts of the former one first, in their order: rank 0 stays where it was while its host is
there, and so does a folder of checkpoints that hosts do not share.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import replace

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import host_check, host_facts
from torchmpi_py.launch.hosts import Host, merge, parse_host
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.signals import Signals
from torchmpi_py.launch.terminal import say

_INTERVAL_SECONDS = 5.0
_ANSWER_SECONDS = 30
_WAIT_SECONDS = 600.0  # for hosts, in a job without --timeout


def ask(script: str) -> tuple[Host, ...]:
    """The hosts that the script prints. LaunchError if it fails, does not end, or prints something else."""
    # A file, because a process that the script leaves behind would keep a pipe open. Its group is killed.
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        words = ["timeout", "-s", "KILL", str(_ANSWER_SECONDS), "sh", "-c", script]
        null = subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=null, stdout=out, stderr=null, start_new_session=True)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its number, and its group's, remain taken
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        out.seek(0)
        lines = [line.partition("#")[0].strip() for line in out]
    if code:
        why = f"exit code {code}" if code > 0 else f"no end after {_ANSWER_SECONDS} s"
        raise LaunchError(f"--discover {script!r}: {why}; try it by hand: it has to print hosts, and to end with 0")
    return merge(parse_host(line, f"--discover {script!r}") for line in lines if line)


def chosen(spec: JobSpec, found: tuple[Host, ...]) -> JobSpec:
    """The job on the hosts ``found``: on its present ones first, and on no more slots than it may have ranks."""
    names, room, hosts = [host.name for host in spec.hosts], spec.elastic_restart[1], []
    for host in sorted(found, key=lambda host: names.index(host.name) if host.name in names else len(names)):
        if room:
            hosts.append(Host(host.name, min(host.num_slots, room)))
            room -= hosts[-1].num_slots
    return replace(spec, hosts=tuple(hosts), num_ranks=spec.elastic_restart[1] - room, system="", notes=())


def first(spec: JobSpec, *, waits: bool) -> JobSpec:
    """The job on the hosts that its script, if it has one, names now.

    LaunchError if the script fails, or names too few hosts for a job that does not wait for them.
    """
    if not spec.discover:
        return spec
    spec, least = chosen(spec, ask(spec.discover)), spec.elastic_restart[0]
    if spec.num_ranks < least and not waits:
        raise LaunchError(f"{_shortage(spec)}; name more, for only a job waits for hosts")
    return spec


def _shortage(now: JobSpec) -> str:
    least = now.elastic_restart[0]
    return f"for {least} rank{'s' * (least != 1)} (--elastic-restart) {now.discover!r} names {now.num_ranks} slots"


class Discovery:
    """The job on the hosts of its present attempt. Within ``with`` its script is asked; without one nothing changes."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self._found = spec, spec.hosts
        self._has_begun = self._has_failed = False
        self._said, self._unfit = "", set[str]()
        self._last: tuple[Host, ...] | None = None  # answer; None: the script failed
        self._ended, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> Discovery:
        if self.spec.discover:
            threading.Thread(target=self._follow, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._ask()

    def _ask(self, *, at_once: bool = False) -> None:
        """Ask the script. An answer counts when it comes twice in a row, or ``at_once`` unless it is empty."""
        with self._lock:  # an older answer does not replace a newer one
            last, self._last = self._last, None
            try:
                self._last = ask(self.spec.discover)
                if self._last == last or (at_once and self._last):
                    self._found = self._answering(self._last)
                self._has_failed = False
            except (LaunchError, OSError) as error:
                if not self._has_failed:
                    say(f"{error}; until then its last answer holds")
                self._has_failed = True

    def _answering(self, found: tuple[Host, ...]) -> tuple[Host, ...]:
        """The hosts without those, new to the job, that cannot run it. None is asked if none would get ranks."""
        present, now = {host.name for host in self.spec.hosts}, chosen(self.spec, found)
        if present.issuperset(host.name for host in now.hosts):
            return found
        new = replace(now, hosts=tuple(host for host in found if host.name not in present))
        problems = host_check.check(new, host_facts.WITHOUT_DOCTOR).problems
        unfit = {line.partition(": ")[0]: line for line in problems}
        for name in unfit.keys() - self._unfit:
            say(f"left out until it can be reached and is fit: {unfit[name]}")
        self._unfit |= unfit.keys()
        return tuple(host for host in found if host.name not in unfit)

    def _change_to(self, now: JobSpec) -> str:
        ranks = f"({now.num_ranks} rank{'s' * (now.num_ranks != 1)}, were {self.spec.num_ranks})"
        return f"hosts are now {','.join(map(str, now.hosts)) or 'none'} {ranks}"

    def news(self) -> str:
        """Why the attempt is to end and another one to start; empty if it is to go on."""
        if not self.spec.discover:
            return ""
        found = self._found  # the other thread may replace it
        now, slots = chosen(self.spec, found), {host.name: host.num_slots for host in found}
        is_lost = any(slots.get(host.name, 0) < host.num_slots for host in self.spec.hosts)
        if now.num_ranks <= self.spec.num_ranks and not is_lost:
            return ""
        self._said = self._change_to(now)
        return f"{self._said}: saving, and starting again"

    def wait(self, begin: float, signals: Signals) -> bool:
        """Before an attempt: wait for enough hosts, or a signal; False if there are too few for too long."""
        if not self.spec.discover:
            return True
        limit = _WAIT_SECONDS if self.spec.timeout is None else begin + self.spec.timeout - time.monotonic()
        if limit <= 0:
            say(f"the limit of {self.spec.timeout:g} s has passed (--timeout): there is no other attempt")
            return False
        if self._has_begun:  # before that the answer is that of `first`
            asking = threading.Thread(target=self._ask, kwargs={"at_once": True}, daemon=True)
            asking.start()
            signals.wait(_WAIT_SECONDS, lambda: not asking.is_alive())
        self._has_begun, least = True, self.spec.elastic_restart[0]
        if (now := chosen(self.spec, self._found)).num_ranks < least and not signals.ending:
            say(f"waiting for hosts, at most {limit:.0f} s: {_shortage(now)}")
            signals.wait(limit, lambda: chosen(self.spec, self._found).num_ranks >= least)
            now = chosen(self.spec, self._found)
        if now.num_ranks < least and not signals.ending:
            say(f"not enough hosts after {limit:.0f} s: {_shortage(now)}; start the job again when they are there")
            return False
        if now.hosts != self.spec.hosts and (text := self._change_to(now)) != self._said:
            say(text)
        self.spec = now
        signals.pass_on()  # what came for the ranks meanwhile would kill those to come, before they have a handler
        return True
