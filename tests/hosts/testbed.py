"""Several hosts on one machine, with a network between them: ``scripts/hosts`` for people, `Bed` for the tests.

A *bed* is a switch and up to 8 *hosts*. A host has namespaces of its own for the network, processes, mounts, shared
memory of System V and the host name; a private /tmp and /dev/shm; its own identity (boot_id), by which an MPI
recognises processes of one machine; and an sshd with a key that all hosts of the bed share. Everything else, this
checkout and its virtual environments included, is the same on all hosts, as on a cluster with a common file system;
``shared`` is a folder for the files of a test. With ``slurm`` each host has a slurmd, and the first one a slurmctld.

The link of a host carries ``rate`` in each direction; ``delay`` is added to every packet that leaves it. Processes of a
host die with its first one, so `Bed.kill` is a power cut; with a link that is down a host lives on, unreachable.

Root, iproute2, util-linux and openssh-server are needed (`why_not`). A bed is a folder in /run and what runs for it;
several beds do not see each other.
"""

import argparse
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BEDS = Path("/run/torchmpi-hosts")
NAMES = tuple(f"node{letter}" for letter in "abcdefgh")
RATE, DELAY = "1gbit", ""
ROOT = Path(__file__).resolve().parents[2]
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "sshd": "openssh-server"}
SLURM_TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
START_SECONDS = 30.0
PATH = f"{Path(sys.prefix, 'bin')}:{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"

# The first process of a host: its mounts, its name, its daemons. It waits for ever, and so takes in orphans.
_INIT = """\
set -eu
hostname {name}
ip link set lo up
mkdir -p {home}/tmp
mount -t tmpfs -o mode=1777 tmpfs {home}/tmp
{shares}
mount --rbind {home}/tmp /tmp
mount -t tmpfs -o mode=1777,size=50% tmpfs /dev/shm
mount --bind {home}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {bed}/etc_hosts /etc/hosts
mount --bind {bed}/ssh_config /etc/ssh/ssh_config
/usr/sbin/sshd -f {bed}/sshd_config -E {home}/sshd.log -o PidFile={home}/sshd.pid
{slurm}
touch {home}/ready
while :; do sleep 3600 & wait $! || true; done
"""

_SLURM_INIT = """\
mount -t tmpfs tmpfs /sys/fs/cgroup
mount --bind {bed}/slurm /etc/slurm
{controller}
slurmd -N {name}
"""

_SSHD = """\
Port 22
HostKey {bed}/host_key
AuthorizedKeysFile {bed}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
AcceptEnv *
MaxStartups 200
"""

_SSH = """\
Host *
    IdentityFile {bed}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    BatchMode yes
"""

_SLURM = """\
ClusterName=bed
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={bed}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
StateSaveLocation={bed}/slurm/state
SlurmdSpoolDir={bed}/slurm/spool.%n
SlurmctldPidFile={bed}/slurm/ctld.pid
SlurmdPidFile={bed}/slurm/d.%n.pid
SlurmctldLogFile={bed}/slurm/ctld.log
SlurmdLogFile={bed}/slurm/d.%n.log
JobRequeue=1
KillWait=10
InactiveLimit=0
MinJobAge=300
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


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
        if (folder / "bed.json").exists():
            raise BedError(f"bed {name!r} is up already; take it down first: scripts/hosts --bed {name} down")
        (folder / "shared").mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        hosts = {host: f"10.77.0.{index}" for index, host in enumerate(NAMES[:num_hosts], 1)}
        state = {"hosts": hosts, "pids": {}, "rate": rate, "delay": delay, "slurm": slurm, "munge": 0}
        (folder / "bed.json").write_text(json.dumps(state))
        bed = cls(name)
        try:
            bed._write_files()
            bed._make_network()
            if slurm:
                bed._start_munge()
            for host in hosts:
                bed._start(host, [ROOT, Path(sys.prefix), Path(sys.base_prefix), *shares])
            bed._wait_until_ready()
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
        for namespace, device, held in (
            (self._namespace(host), "eth0", delay),
            (self._namespace("switch"), f"to_{host}", ""),
        ):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
            parent = ["root"]
            if rate:
                kind = ["tbf", "rate", rate, "burst", "256k", "latency", "5ms"]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, "handle", "1:", *kind)
                parent = ["parent", "1:1"]
            if held:
                kind = ["netem", "delay", held, "limit", "20000"]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *parent, "handle", "2:", *kind)

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
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.state["pids"].pop(host), signal.SIGKILL)
        self._save()

    def down(self) -> None:
        """End all processes of the bed and remove the network and the files. What is missing already is passed over."""
        for pid in [*self.state["pids"].values(), self.state["munge"]]:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for host in (*self.hosts, "switch"):
            for _ in range(50):
                done = subprocess.run(["ip", "netns", "del", self._namespace(host)], capture_output=True, text=True)
                if "busy" not in done.stderr:
                    break
                time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(self) -> None:
        (self.folder / "bed.json").write_text(json.dumps(self.state))

    def _namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def _write_files(self) -> None:
        bed, hosts = self.folder, self.state["hosts"]
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(bed / key))
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in hosts.items())]
        (bed / "etc_hosts").write_text("".join(f"{line}\n" for line in lines))
        (bed / "sshd_config").write_text(_SSHD.format(bed=bed))
        (bed / "ssh_config").write_text(_SSH.format(bed=bed))
        for host in hosts:
            (bed / host).mkdir()
            text = secrets.token_hex(16)
            (bed / host / "boot_id").write_text("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
        if self.state["slurm"]:
            for folder in ("slurm/state", *(f"slurm/spool.{host}" for host in hosts), "munge"):
                (bed / folder).mkdir(parents=True)
            cores = os.cpu_count() or 1
            nodes = "\n".join(f"NodeName={host} NodeAddr={host} CPUs={cores} State=UNKNOWN" for host in hosts)
            text = _SLURM.format(bed=bed, controller=self.hosts[0], nodes=nodes)
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
            daemon = subprocess.Popen(
                ["munged", "--foreground", "--force", *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={"PATH": PATH},
            )
        self.state["munge"] = daemon.pid
        self._save()

    def _start(self, host: str, shares: Sequence[Path]) -> None:
        home = self.folder / host
        below = sorted({path.resolve() for path in shares if Path("/tmp") in path.resolve().parents})
        lines = []
        for path in below:
            target = shlex.quote(str(home / "tmp" / path.relative_to("/tmp")))
            lines.append(f"mkdir -p {target}; mount --rbind {shlex.quote(str(path))} {target}")
        controller = "slurmctld -c" if host == self.hosts[0] else ""
        slurm = _SLURM_INIT.format(bed=self.folder, name=host, controller=controller) if self.state["slurm"] else ""
        script = _INIT.format(name=host, home=home, bed=self.folder, shares="\n".join(lines), slurm=slurm)
        (home / "init.sh").write_text(script)
        apart = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (home / "log").open("w") as log:
            outer = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(host), *apart, "bash", str(home / "init.sh")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": PATH, "HOME": "/root"},
            )
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

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        for host in self.hosts:
            while not (self.folder / host / "ready").exists():
                is_dead = not Path(f"/proc/{self.state['pids'][host]}").exists()
                if is_dead or time.monotonic() > until:
                    raise BedError(f"{host} did not start: {(self.folder / host / 'log').read_text().strip()}")
                time.sleep(0.05)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH})
    if done.returncode:
        raise BedError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/hosts", description="Several hosts on one machine (root only).")
    parser.add_argument("--bed", default=os.environ.get("TORCHMPI_HOSTS", "bed"), help="tells several apart")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="make the hosts nodea, nodeb, ...")
    up.add_argument("--hosts", type=int, default=2, metavar="N")
    up.add_argument("--rate", default=RATE, help=f"of each link, as tc takes it; '' for no limit; default {RATE}")
    up.add_argument("--delay", default=DELAY, help="of packets that leave a host, as tc takes it: 1ms")
    up.add_argument("--slurm", action="store_true", help="slurmctld on the first host, slurmd on all")
    up.add_argument("--share", type=Path, action="append", default=[], help="a folder below /tmp for all hosts")
    run = commands.add_parser("run", help="run a command on a host")
    run.add_argument("host")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="command")
    shape = commands.add_parser("shape", help="give links another rate and delay")
    shape.add_argument("--rate", default="")
    shape.add_argument("--delay", default="")
    for name, text in (("cut", "take the link of a host down"), ("mend", "take it up again"), ("kill", "power cut")):
        commands.add_parser(name, help=text).add_argument("host")
    commands.add_parser("show", help="hosts, addresses, bytes received and sent")
    commands.add_parser("down", help="take everything away")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``scripts/hosts``."""
    options = _parse(argv)
    try:
        if options.command == "up":
            Bed.up(
                options.hosts,
                name=options.bed,
                rate=options.rate,
                delay=options.delay,
                slurm=options.slurm,
                shares=options.share,
            )
            return 0
        return _command(Bed(options.bed), options)
    except BedError as error:
        print(f"scripts/hosts: {error}", file=sys.stderr)
        return 2


def _command(bed: Bed, options: argparse.Namespace) -> int:
    if options.command == "run":
        command = bed.command(options.host, options.words)
        os.execvpe(command[0], command, bed.environment())
    elif options.command == "shape":
        for host in bed.hosts:
            bed.shape(host, options.rate, options.delay)
    elif options.command in ("cut", "mend"):
        bed.link(options.host, is_up=options.command == "mend")
    elif options.command == "kill":
        bed.kill(options.host)
    elif options.command == "show":
        for host, address in bed.state["hosts"].items():
            received, sent = bed.traffic(host)
            print(f"{host} {address} received {received} sent {sent}{'' if host in bed.state['pids'] else ' dead'}")
    else:
        bed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
