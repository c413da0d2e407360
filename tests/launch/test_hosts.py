"""Hosts of the command line and of a hostfile; what of them the MPIs are told."""

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import hosts
from torchmpi_py.launch.hosts import Host

pytestmark = pytest.mark.timeout(20)


def test_every_usual_form_in_one_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# a cluster\n\nalpha\nbeta slots=4 # fat\n  gamma:2\ndelta slots = 3 max_slots=8\n"
        "10.0.0.1:2\n[fe80::1]:2\nalpha\nsge.x 3 all.q@sge.x UNDEFINED\n"
    )
    expected = [("alpha", 2), ("beta", 4), ("gamma", 2), ("delta", 3), ("10.0.0.1", 2), ("fe80::1", 2), ("sge.x", 3)]
    assert hosts.read_hostfile(path) == tuple(Host(*each) for each in expected)
    assert hosts.parse_hosts("a:2, b,a.b.c:3") == (Host("a", 2), Host("b", 1), Host("a.b.c", 3))


def test_a_bad_line_is_named_with_its_place(tmp_path):
    path = tmp_path / "hosts"
    for line in ("a b", "a:", "a:x", "a slots=", "a:0", "-a", "a slots=2 color=red", "a 2 all.q", "a;rm"):
        path.write_text(f"good\n{line}\n")
        with pytest.raises(LaunchError, match="hosts:2: '"):
            hosts.read_hostfile(path)


def test_an_empty_and_a_missing_file(tmp_path):
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(LaunchError, match="lists no hosts"):
        hosts.read_hostfile(tmp_path / "empty")
    with pytest.raises(LaunchError, match="No such file"):
        hosts.read_hostfile(tmp_path / "missing")


def test_render():
    texts = {"{name} slots={slots}": "a slots=2\nb slots=1\n", "{name}:{slots}": "a:2\nb:1\n", "{name}": "a\na\nb\n"}
    assert {line: hosts.render([Host("a", 2), Host("b")], line) for line in texts} == texts


def test_an_address_of_ipv6_is_read_again_and_has_no_place_before_a_colon():
    """Open MPI's form has the bare address (seen between two hosts); MPICH's has none."""
    host = hosts.parse_host("[fd00::2]:3", "here")
    assert hosts.parse_hosts(str(host)) == (host,) == (Host("fd00::2", 3),)
    assert hosts.render([host], "{name} slots={slots}") == "fd00::2 slots=3\n"
    with pytest.raises(LaunchError, match=r"IPv6 address \(fd00::2\); list the host by a name"):
        hosts.render([host], "{name}:{slots}")


def test_busiest_host():
    named = (Host("a", 2), Host("b", 4))
    assert [hosts.num_ranks_on_busiest(named, n) for n in (1, 4, 6, 7)] == [1, 4, 4, 7]
    assert hosts.num_ranks_on_busiest((), 5) == 5


def test_gpus_that_cuda_is_told_of():
    numbers = {"0,1,3": 3, "": 0, "-1": 0, "0,-1,2": 1, "GPU-1a,GPU-2b": 2}
    assert {visible: hosts.num_gpus({"CUDA_VISIBLE_DEVICES": visible}) for visible in numbers} == numbers
