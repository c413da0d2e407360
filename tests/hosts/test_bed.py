"""The bed itself: what is asked for is there, and nothing stays behind."""

import os

import pytest
import testbed
from testbed import Bed, BedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(testbed.why_not()), reason=testbed.why_not()),
]
NAME = f"tests-own-{os.getpid()}"


def traces(name=NAME):
    """What is there of a bed: namespaces, processes, files."""
    namespaces = [each for each in os.listdir("/run/netns") if each.startswith(f"{name}-")]
    processes = []
    for pid in testbed._all_processes():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                processes += [pid] * (f"TORCHMPI_BED={name}".encode() in file.read().split(b"\0"))
        except OSError:
            continue
    return namespaces, processes, (testbed.BEDS / name).exists()


NOTHING = ([], [], False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "1gbitt"}, 'illegal value for "rate"'),
        ({"delay": "1 parsec"}, "'1 parsec' is no delay; write 1ms"),
        ({"num_hosts": 9}, "9 hosts are not possible; give 1 to 8"),
    ],
)
def test_a_bed_that_cannot_be_made_leaves_nothing(options, message):
    with pytest.raises(BedError, match=message):
        Bed.up(name=NAME, **options)
    assert traces() == NOTHING


def test_hosts_are_apart_and_boot_again(bed):
    """Names, files in /tmp and /dev/shm, processes and the network are a host's own; a power cut empties a host."""
    hosts = bed.hosts[:2]
    for host in hosts:
        assert bed.run(host, ["hostname"]).stdout.strip() == host
        bed.run(host, ["sh", "-c", f"echo {host} | tee /tmp/mine /dev/shm/mine"])
    for host in hosts:
        assert bed.run(host, ["cat", "/tmp/mine", "/dev/shm/mine"]).stdout.split() == [host, host]
        assert bed.path(host, "/tmp/mine").read_text().strip() == host
        assert not any("mine" in line for line in bed.processes(host).values())
    first, second = hosts
    asked = "cat /tmp/mine || echo nothing; cat /proc/sys/kernel/random/boot_id"
    ask = ["ssh", "-o", "ConnectTimeout=10", second, asked]
    before = bed.run(first, ask).stdout.split()
    assert before[0] == second
    bed.link(second, is_up=False)
    assert bed.run(first, ask).returncode == 255
    bed.link(second, is_up=True)
    bed.kill(second)
    assert bed.run(first, ask).returncode == 255
    with pytest.raises(BedError, match=f"'{second}' is no running host"):
        bed.run(second, ["true"])
    bed.boot(second)
    assert bed.run(first, ask).stdout.split() == ["nothing", before[1]]
