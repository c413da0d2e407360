"""The command ``scripts/hosts``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed import DELAY, RATE, Bed, BedError


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
    power = (("kill", "cut the power of a host"), ("boot", "start it again"))
    for name, text in (("cut", "take the link of a host down"), ("mend", "take it up again"), *power):
        commands.add_parser(name, help=text).add_argument("host")
    commands.add_parser("show", help="hosts, addresses, bytes received and sent")
    commands.add_parser("down", help="take everything away")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``scripts/hosts``."""
    options = _parse(argv)
    try:
        if options.command == "up":
            network = {"rate": options.rate, "delay": options.delay}
            Bed.up(options.hosts, name=options.bed, slurm=options.slurm, shares=options.share, **network)
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
    elif options.command in ("kill", "boot"):
        getattr(bed, options.command)(options.host)
    elif options.command == "show":
        for host, address in bed.state["hosts"].items():
            received, sent = bed.traffic(host)
            print(f"{host} {address} received {received} sent {sent}{'' if host in bed.state['pids'] else ' dead'}")
    else:
        bed.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
