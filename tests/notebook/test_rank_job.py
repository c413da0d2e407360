"""The job of a notebook: who may connect to it, where, and what a rank sends."""

import itertools
import pickle
import socket
import subprocess

import pytest

pytest.importorskip("IPython", reason="pip install ipython")

from torchmpi_py.notebook import rank_job, rank_program


@pytest.mark.timeout(200)
def test_strangers_do_not_keep_the_ranks_from_starting(monkeypatch):
    """One says nothing, another one not the key."""
    strangers, start = [], subprocess.Popen

    def start_after_strangers(words, **options):
        host, port, _ = options["env"][rank_job.VARIABLE].split(":")
        strangers.extend(socket.create_connection((host, int(port))) for _ in range(2))
        strangers[1].sendall(b"x" * 200)
        return start(words, **options)

    monkeypatch.setattr(rank_job.subprocess, "Popen", start_after_strangers)
    limit, seconds = rank_job._limit, itertools.chain([1, 1], itertools.repeat(0))  # strangers come first
    monkeypatch.setattr(rank_job, "_limit", lambda connection, given: limit(connection, given and next(seconds)))
    job = rank_job.RankJob(["-n", "2"])
    try:
        assert len(strangers) == 2
        assert set(job.processes) == {0, 1}
    finally:
        job.stop()
        for each in strangers:
            each.close()


@pytest.mark.parametrize(("hosts", "address"), [("here:1", "127.0.0.1"), ("a:1,here:2", "10.0.0.1"), ("", "127.0.0.1")])
def test_the_kernel_listens_where_all_hosts_reach_it(monkeypatch, hosts, address):
    monkeypatch.setattr(rank_job, "_address_towards", {"here": "127.0.0.1", "a": "10.0.0.1"}.__getitem__)
    assert rank_job._address_for(["--hosts", hosts] if hosts else []) == address


def test_a_destructor_may_print_in_the_middle_of_a_send():
    class Connection:
        sent = []

        def send_bytes(self, message):
            if not self.sent:
                link.send("text", "stdout", "of a destructor")
            self.sent.append(pickle.loads(message))

    link = rank_program.KernelLink(Connection())
    link.send("text", "stdout", "first")
    assert [text for *_, text in Connection.sent] == ["first", "of a destructor"]  # which is not in the first


@pytest.mark.timeout(200)
def test_an_interrupt_of_stop_leaves_no_ranks(monkeypatch):
    job = rank_job.RankJob(["-n", "1"])
    monkeypatch.setattr(job, "send", lambda *_: None)  # as if the rank did not end
    launcher, waited = job._launcher, []

    def wait(seconds=None):
        waited.append(seconds)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            job.stop()
    assert len(waited) == 1
    assert launcher.wait(100) != 0
