"""Several hosts on one machine, with a network between them: ``scripts/hosts`` for people, `Bed` for the tests.

A *bed* is a switch and up to 8 *hosts*. A host has namespaces of its own for the network, processes, mounts, shared
memory of System V and the host name; a private /tmp and /dev/shm; its own identity (boot_id), by which an MPI
recognises processes of one machine; and an sshd with a key that all hosts of the bed share. Everything else, this
checkout and its virtual environments included, is the same on all hosts, as on a cluster with a common file system;
``shared`` is a folder for the files of a test. With ``slurm`` each host has a slurmd, and the first one a slurmctld.

The link of a host carries ``rate`` in each direction; ``delay`` is added to every packet that leaves it, by the kernel
(netem) or else by a process (``relay.py``). Processes of a host die with its first one, so `Bed.kill` is a power cut;
with a link that is down a host lives on, unreachable. All processes of a bed have TORCHMPI_BED in their environment.

Root, iproute2, util-linux and openssh-server are needed (`why_not`). A bed is a folder in /run and what runs for it;
several beds do not see each other.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import bed_files

BEDS = Path("/run/torchmpi-hosts")
NAMES = tuple(f"node{letter}" for letter in "abcdefgh")
RATE, DELAY = "1gbit", ""
ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "sshd": "openssh-server"}
SLURM_TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
START_SECONDS = 100.0
# Of daemons and commands: this Python's programs come first.
PATH = f"{Path(sys.prefix, 'bin')}:{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


class BedError(RuntimeError):
    """A bed that cannot be made or used; the message says why."""


def why_not(slurm: bool = False) -> str:
    """Why there can be no bed here; empty if nothing is known to be in the way."""
    if os.geteuid() != 0:
        return "hosts on one machine need root"
    tools = TOOLS | (SLURM_TOOLS if slurm else {})
    packages = {package for tool, package in tools.items() if shutil.which(tool, path=PATH) is None}
    if packages:
        return f"hosts on one machine need {', '.join(sorted(packages))} (apt-get install)"
    trial = ["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "--ipc", "--mount-proc", "true"]
    made = subprocess.run(trial, capture_output=True, text=True, check=False)
    return made.stderr.strip() and f"namespaces cannot be made here: {made.stderr.strip()}"


class Bed:
    """A bed that is up; ``name`` tells several apart."""

    def __init__(self, name: str = "bed") -> None:
        self.folder = BEDS / name
        try:
            self.state = json.loads((self.folder / "bed.json").read_text())
        except OSError:
            raise BedError(f"there is no bed {name!r}; make one with: scripts/hosts --bed {name} up") from None
        self.name = name
        self.shared = self.folder / "shared"
        self._daemons: list[subprocess.Popen] = []

    @classmethod
    def up(
        cls,
        num_hosts: int = 2,
        *,
        name: str = "bed",
        rate: str = RATE,
        delay: str = DELAY,
        slurm: bool = False,
        shares: Sequence[Path] = (),
    ) -> "Bed":
        """Make a bed. Of folders below /tmp only the ``shares`` and this checkout are there on its hosts."""
        if reason := why_not(slurm):
            raise BedError(reason)
        if not 1 <= num_hosts <= len(NAMES):
            raise BedError(f"{num_hosts} hosts are not possible; give 1 to {len(NAMES)}")
        folder = BEDS / name
        (folder / "shared").mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        hosts = {host: f"10.77.0.{index}" for index, host in enumerate(NAMES[:num_hosts], 1)}
        state = {"hosts": hosts, "pids": {}, "rate": rate, "delay": delay, "slurm": slurm}
        state["shares"] = [str(path) for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), *shares)]
        try:
            with (folder / "bed.json").open("x") as file:
                json.dump(state, file)
        except FileExistsError:
            message = f"bed {name!r} is up already; take it down first: scripts/hosts --bed {name} down"
            raise BedError(message) from None
        bed = cls(name)
        try:
            bed._write_files()
            bed._make_network()
            if slurm:
                bed._start_munge()
            for host in hosts:
                bed._start(host)
            bed._wait_until_ready(list(hosts))
        except BaseException:
            bed.down()
            raise
        return bed

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in order."""
        return list(self.state["hosts"])

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` on a host, in the folder it is called from."""
        if host not in self.state["pids"]:
            raise BedError(f"{host!r} is no running host of bed {self.name!r}; hosts: {', '.join(self.state['pids'])}")
        inside = ["--target", str(self.state["pids"][host]), "--mount", "--uts", "--ipc", "--net", "--pid"]
        return ["nsenter", *inside, "--wd=" + os.getcwd(), "--", *command]

    def run(self, host: str, command: Sequence[str], timeout: float = 120.0, **options: object):
        """Run a command on a host to its end; as subprocess.run, with text in ``stdout`` and ``stderr``."""
        options = {"capture_output": True, "text": True, "check": False, "env": self.environment(), **options}
        return subprocess.run(self.command(host, command), timeout=timeout, **options)  # type: ignore[call-overload]

    def start(self, host: str, command: Sequence[str], **options: object) -> subprocess.Popen:
        """Start a command on a host; as subprocess.Popen."""
        return subprocess.Popen(self.command(host, command), **{"env": self.environment(), "text": True, **options})

    def environment(self) -> dict[str, str]:
        """This process's environment, with this Python's programs first on the PATH."""
        return {**os.environ, "PATH": PATH}

    def shape(self, host: str, rate: str = "", delay: str = "") -> None:
        """Give the link of a host a rate in each direction, and a delay to packets that leave it; "": no limit."""
        port = (self._namespace("switch"), f"to_{host}")
        for namespace, device in (self._namespace(host), "eth0"), port:
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
            if rate:
                kind = ["tbf", "rate", rate, "burst", "256k", "latency", "5ms"]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", *kind)
        for pid in self._processes(f"TORCHMPI_BED_RELAY={host}"):
            _end(pid)
        _run("ip", "-n", port[0], "link", "set", port[1], "master", "bridge", "up")
        if delay:
            self._delay(host, delay, ["parent", "1:1"] if rate else ["root"])

    def _delay(self, host: str, delay: str, parent: list[str]) -> None:
        """By the kernel, or, where it cannot, by a process between the link and the bridge."""
        seconds = _seconds(delay)
        command = ["tc", "-n", self._namespace(host), "qdisc", "add", "dev", "eth0", *parent, "handle", "2:"]
        command += ["netem", "delay", delay, "limit", "20000"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        switch, tap = self._namespace("switch"), f"held_{host}"
        _run("ip", "-n", switch, "link", "set", f"to_{host}", "nomaster")
        line = ["ip", "netns", "exec", switch, sys.executable, str(Path(__file__).parent / "relay.py")]
        with (self.folder / f"relay_{host}").open("w") as errors:
            relay = self._daemon([*line, f"to_{host}", tap, str(seconds)], subprocess.PIPE, errors, relay=host)
        if relay.stdout is None or relay.stdout.readline() != b"ready\n":
            reason = Path(errors.name).read_text().strip().rpartition("\n")[2]
            raise BedError(f"no delay is possible here: this kernel has no netem, and the relay failed with {reason}")
        _run("ip", "-n", switch, "link", "set", tap, "master", "bridge", "up")

    def link(self, host: str, is_up: bool) -> None:
        """Take the link of a host down, or up again."""
        _run("ip", "-n", self._namespace("switch"), "link", "set", f"to_{host}", "up" if is_up else "down")

    def traffic(self, host: str) -> tuple[int, int]:
        """Bytes that the link of a host has received and sent since the bed was made, headers included."""
        (link,) = json.loads(_run("ip", "-n", self._namespace(host), "-json", "-statistics", "link", "show", "eth0"))
        return link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"]

    def kill(self, host: str) -> None:
        """Cut the power of a host: all its processes end at once. Its address does not answer any more."""
        self.link(host, is_up=False)
        _end(self.state["pids"].pop(host))
        self._save()

    def boot(self, host: str) -> None:
        """Start a host again whose power was cut, with empty /tmp and /dev/shm."""
        if host in self.state["pids"]:
            raise BedError(f"{host!r} is running")
        for leftover in ("ready", "sshd.pid"):
            (self.folder / host / leftover).unlink(missing_ok=True)
        self.link(host, is_up=True)
        self._start(host)
        self._wait_until_ready([host])

    def mend(self) -> None:
        """Give all hosts power and a link again."""
        for host in self.hosts:
            if host not in self.state["pids"]:
                self.boot(host)
            self.link(host, is_up=True)

    def processes(self, host: str) -> dict[int, str]:
        """Command lines of all processes of a host by their numbers on this machine, daemons included."""
        inside, found = os.readlink(f"/proc/{self.state['pids'][host]}/ns/pid"), {}
        for pid in _all_processes():
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(f"/proc/{pid}/ns/pid") == inside:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def path(self, host: str, path: str) -> Path:
        """Where this machine sees a path of a host, as "/tmp"."""
        return Path(f"/proc/{self.state['pids'][host]}/root{path}")

    def down(self) -> None:
        """End all processes of the bed and remove the network and the files. What is missing already is passed over."""
        until = time.monotonic() + START_SECONDS
        while (pids := self._processes(f"TORCHMPI_BED={self.name}")) and time.monotonic() < until:
            for pid in pids:
                _end(pid)
            time.sleep(0.02)
        for daemon in self._daemons:
            daemon.communicate()
        for host in (*self.hosts, "switch"):
            for _ in range(50):
                done = subprocess.run(["ip", "netns", "del", self._namespace(host)], capture_output=True, text=True)
                if "busy" not in done.stderr:
                    break
                time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self) -> None:
        (self.folder / "bed.json").write_text(json.dumps(self.state))

    def _daemon(self, line: list[str], out: int | IO[str], errors: IO[str], relay: str = "") -> subprocess.Popen:
        environment = {"PATH": PATH, "HOME": "/root", "TORCHMPI_BED": self.name, "TORCHMPI_BED_RELAY": relay}
        files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
        self._daemons.append(subprocess.Popen(line, **files, start_new_session=True, env=environment))
        return self._daemons[-1]

    def _processes(self, variable: str) -> list[int]:
        """Processes of this bed that have a variable, NAME=value, in their environment."""
        wanted, found = {variable.encode(), f"TORCHMPI_BED={self.name}".encode()}, []
        for pid in _all_processes():
            with contextlib.suppress(OSError):  # it has ended
                if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    found.append(pid)
        return found

    def _namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def _write_files(self) -> None:
        bed, hosts = self.folder, self.state["hosts"]
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(bed / key))
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in hosts.items())]
        (bed / "etc_hosts").write_text("".join(f"{line}\n" for line in lines))
        (bed / "sshd_config").write_text(bed_files.SSHD.format(bed=bed))
        (bed / "ssh_config").write_text(bed_files.SSH.format(bed=bed))
        for host in hosts:
            (bed / host).mkdir()
            text = secrets.token_hex(16)
            (bed / host / "boot_id").write_text("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
        if self.state["slurm"]:
            for folder in ("slurm/state", *(f"slurm/spool.{host}" for host in hosts), "munge"):
                (bed / folder).mkdir(parents=True)
            cores = os.cpu_count() or 1
            nodes = "\n".join(f"NodeName={host} NodeAddr={host} CPUs={cores} State=UNKNOWN" for host in hosts)
            text = bed_files.SLURM.format(bed=bed, controller=self.hosts[0], nodes=nodes)
            (bed / "slurm" / "slurm.conf").write_text(text)
            (bed / "slurm" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n")

    def _make_network(self) -> None:
        switch = self._namespace("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, address in self.state["hosts"].items():
            here = self._namespace(host)
            _run("ip", "netns", "add", here)
            kind = ["type", "veth", "peer", "name", "eth0", "netns", here]
            _run("ip", "-n", switch, "link", "add", f"to_{host}", *kind)
            _run("ip", "-n", switch, "link", "set", f"to_{host}", "master", "bridge", "up")
            _run("ip", "-n", here, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", here, "link", "set", "eth0", "up")
            self.shape(host, self.state["rate"], self.state["delay"])

    def _start_munge(self) -> None:
        """One munged serves all hosts through its socket, as the files are common."""
        folder = self.folder / "munge"
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        with (folder / "out").open("w") as out:
            self._daemon(["munged", "--foreground", "--force", *options], out, out)

    def _start(self, host: str) -> None:
        home = self.folder / host
        shares = {Path(path).resolve() for path in self.state["shares"]}
        below = sorted(path for path in shares if Path("/tmp") in path.parents)
        lines = []
        for path in below:
            target = shlex.quote(str(home / "tmp" / path.relative_to("/tmp")))
            lines.append(f"mkdir -p {target}; mount --rbind {shlex.quote(str(path))} {target}")
        controller = "slurmctld -c" if host == self.hosts[0] else ""
        values = {"bed": self.folder, "name": host, "home": home, "controller": controller, "shares": "\n".join(lines)}
        slurm = bed_files.SLURM_INIT.format(**values) if self.state["slurm"] else ""
        script = bed_files.INIT.format(**values, slurm=slurm)
        (home / "init.sh").write_text(script)
        apart = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        line = ["ip", "netns", "exec", self._namespace(host), *apart, "bash", str(home / "init.sh")]
        with (home / "log").open("w") as log:
            outer = self._daemon(line, log, log)
        self.state["pids"][host] = self._first_process(outer, home)
        self._save()

    def _first_process(self, outer: subprocess.Popen, home: Path) -> int:
        """The first process of the host that ``outer`` makes; the number is that of this machine."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and outer.poll() is None:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "bash":
                return int(children[0])
            time.sleep(0.02)
        raise BedError(f"a host did not start: {(home / 'log').read_text().strip()}")

    def _wait_until_ready(self, hosts: Sequence[str]) -> None:
        until = time.monotonic() + START_SECONDS
        for host in hosts:
            while not (self.folder / host / "ready").exists():
                is_dead = not Path(f"/proc/{self.state['pids'][host]}").exists()
                if is_dead or time.monotonic() > until:
                    raise BedError(f"{host} did not start: {(self.folder / host / 'log').read_text().strip()}")
                time.sleep(0.05)


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _seconds(delay: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", delay)
    if not found:
        raise BedError(f"{delay!r} is no delay; write 1ms, 250us or 0.5s")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH})
    if done.returncode:
        raise BedError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
