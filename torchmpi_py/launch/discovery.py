"""Restart a job when hosts join or leave, according to a script that lists the available hosts.

The script (``--discover``) is a shell command that prints one host per line, in any form that a hostfile may have. A
thread runs the script every few seconds. If the script fails or does not end in time, torchmpirun prints one line, and
the job continues. The job restarts in two cases. Either a host of its ranks is gone or has too few slots, or there are
slots for more ranks, up to the MAX of ``--elastic-restart``. The attempt is ended as if by SIGTERM, so that the program
can save its state.

A wrong list of hosts would end a good attempt. So a list counts only if the script has printed it twice in a row: the
script may, for example, read a file that is being written. A host that is new to the job gets ranks only if it can be
reached, because its sshd may not run yet.

The next attempt uses the hosts of the last attempt first, in the same order. So rank 0 stays on its host while this
host is available, and finds its checkpoint folder even if the hosts share no file system.
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
_WAIT_SECONDS = 600.0  # limit for the wait for enough hosts, in a job without --timeout


def ask(script: str) -> tuple[Host, ...]:
    """Return the hosts that the script prints.

    Raise LaunchError if the script fails, does not end in time, or prints a line that is not a host.
    """
    # Read the output from a file, because a process that the script leaves behind would keep a pipe open. Kill such
    # processes with the script's process group.
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        words = ["timeout", "-s", "KILL", str(_ANSWER_SECONDS), "sh", "-c", script]
        null = subprocess.DEVNULL
        process = subprocess.Popen(words, stdin=null, stdout=out, stderr=null, start_new_session=True)
        # Wait without reaping the process, so that the IDs of the process and its group are not reused before the kill.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        out.seek(0)
        lines = [line.partition("#")[0].strip() for line in out]
    if code:
        why = f"exit code {code}" if code > 0 else f"the script ran for more than {_ANSWER_SECONDS} s"
        raise LaunchError(f"--discover {script!r}: {why}; run it in a shell: it must print hosts and exit with code 0")
    return merge(parse_host(line, f"--discover {script!r}") for line in lines if line)


def chosen(spec: JobSpec, present_hosts: tuple[Host, ...]) -> JobSpec:
    """Return the job with as many of these hosts as it can use: its current hosts first, and at most MAX slots."""
    names, num_free, hosts = [host.name for host in spec.hosts], spec.elastic_restart[1], []
    for host in sorted(present_hosts, key=lambda host: names.index(host.name) if host.name in names else len(names)):
        if num_free:
            hosts.append(Host(host.name, min(host.num_slots, num_free)))
            num_free -= hosts[-1].num_slots
    return replace(spec, hosts=tuple(hosts), num_ranks=spec.elastic_restart[1] - num_free, system="", notes=())


def first(spec: JobSpec, *, waits: bool) -> JobSpec:
    """Return the job with the hosts that its script lists; without a script, return the job unchanged.

    Raise LaunchError if the script fails, or if it lists too few hosts and ``waits`` is False. ``waits`` means that the
    caller waits for more hosts.
    """
    if not spec.discover:
        return spec
    spec, least = chosen(spec, ask(spec.discover)), spec.elastic_restart[0]
    if spec.num_ranks < least and not waits:
        raise LaunchError(f"--discover: {_shortage(spec)}; make the script list more hosts, or lower the minimum")
    return spec


def _shortage(now: JobSpec) -> str:
    least, count = now.elastic_restart[0], now.num_ranks
    return f"{now.discover!r} lists {count} slot{'s' * (count != 1)}, but --elastic-restart needs at least {least}"


class Discovery:
    """The job with the hosts of its current attempt.

    If the job has a script, a thread runs the script repeatedly within the ``with`` block.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self._found = spec, spec.hosts
        self._has_begun = self._has_failed = False
        self._said, self._unfit = "", set[str]()
        self._last: tuple[Host, ...] | None = None  # the last list of hosts; None if the script failed
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
        """Run the script, and accept its list of hosts if the last run printed the same list.

        With ``at_once``, accept the list even if the last run printed another one, unless the list is empty.
        """
        with self._lock:  # One thread runs the script at a time, so that an older list does not replace a newer one.
            last, self._last = self._last, None
            try:
                self._last = ask(self.spec.discover)
                if self._last == last or (at_once and self._last):
                    self._found = self._answering(self._last)
                self._has_failed = False
            except (LaunchError, OSError) as error:
                if not self._has_failed:
                    say(f"{error}; using the last list of hosts until the script works again")
                self._has_failed = True

    def _answering(self, present_hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        """Return the hosts, except new hosts that cannot be reached or cannot run the job.

        If no new host would get ranks, return all hosts without a check.
        """
        present, now = {host.name for host in self.spec.hosts}, chosen(self.spec, present_hosts)
        if present.issuperset(host.name for host in now.hosts):
            return present_hosts
        new = replace(now, hosts=tuple(host for host in present_hosts if host.name not in present))
        problems = host_check.check(new, host_facts.WITHOUT_DOCTOR).problems
        unfit = {line.partition(": ")[0]: line for line in problems}
        for name in unfit.keys() - self._unfit:
            say(f"a new host gets no ranks until it can be reached and can run the job: {unfit[name]}")
        self._unfit |= unfit.keys()
        return tuple(host for host in present_hosts if host.name not in unfit)

    def _change_to(self, now: JobSpec) -> str:
        ranks = f"({now.num_ranks} rank{'s' * (now.num_ranks != 1)}, previously {self.spec.num_ranks})"
        return f"hosts are now {','.join(map(str, now.hosts)) or 'none'} {ranks}"

    def news(self) -> str:
        """Return the reason why the job must be restarted on other hosts; empty if the attempt should continue."""
        if not self.spec.discover:
            return ""
        present_hosts = self._found  # Read the attribute once, because the other thread may replace it.
        now, slots = chosen(self.spec, present_hosts), {host.name: host.num_slots for host in present_hosts}
        is_lost = any(slots.get(host.name, 0) < host.num_slots for host in self.spec.hosts)
        if now.num_ranks <= self.spec.num_ranks and not is_lost:
            return ""
        self._said = self._change_to(now)
        return f"{self._said}; letting the ranks save, then restarting"

    def wait(self, begin: float, signals: Signals) -> bool:
        """Before an attempt, wait for enough hosts or a signal; return False if the time limit passes first.

        ``begin`` is the monotonic time at which the first attempt started.
        """
        if not self.spec.discover:
            return True
        limit = _WAIT_SECONDS if self.spec.timeout is None else begin + self.spec.timeout - time.monotonic()
        if limit <= 0:
            say(f"the time limit of {self.spec.timeout:g} s has passed (--timeout): not starting another attempt")
            return False
        if self._has_begun:  # The first attempt uses the hosts from `first`.
            asking = threading.Thread(target=self._ask, kwargs={"at_once": True}, daemon=True)
            asking.start()
            signals.wait(_WAIT_SECONDS, lambda: not asking.is_alive())
        self._has_begun, least = True, self.spec.elastic_restart[0]
        if (now := chosen(self.spec, self._found)).num_ranks < least and not signals.ending:
            say(f"waiting up to {limit:.0f} s for more hosts: {_shortage(now)}")
            signals.wait(limit, lambda: chosen(self.spec, self._found).num_ranks >= least)
            now = chosen(self.spec, self._found)
        if now.num_ranks < least and not signals.ending:
            say(f"not enough hosts after {limit:.0f} s: {_shortage(now)}; start the job again with more hosts")
            return False
        if now.hosts != self.spec.hosts and (text := self._change_to(now)) != self._said:
            say(text)
        self.spec = now
        signals.pass_on()  # Drop pending signals: they would kill the new ranks, which have no handlers yet.
        return True
