"""The job of a notebook: who may connect to it, where, and what a rank sends."""

import os
import pickle
import queue
import socket
import subprocess
import threading

import pytest
from support import jobs

pytest.importorskip("IPython", reason="pip install ipython")

from torchmpi_py.notebook import rank_job, rank_program


@pytest.mark.slow
@pytest.mark.timeout(200)
@jobs.needs_mpi
def test_strangers_do_not_keep_the_ranks_from_starting_and_an_interrupt_of_stop_leaves_none(monkeypatch):
    """Three say nothing, for which they have 20 s each, and others not the key; of many the oldest are pushed out."""
    strangers, start, waited = [], subprocess.Popen, []

    def start_after_strangers(words, **options):
        host, port, _ = options["env"][rank_job.VARIABLE].split(":")
        strangers.extend(socket.create_connection((host, int(port))) for _ in range(3 + rank_job._MOST_UNPROVED))
        for each in strangers[3:]:
            each.sendall(b"\0\0\0\x10xyz")
        return start(words, **options)

    def wait(seconds=None):
        waited.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_job, "_address_for", lambda _: "127.0.0.2")  # as for ranks of other hosts
    monkeypatch.setattr(rank_job.subprocess, "Popen", start_after_strangers)
    monkeypatch.setattr(rank_job, "_HELLO_SECONDS", 1000)
    job = rank_job.RankJob(["-n", "2"])
    launcher = job._launcher
    try:
        assert set(job.processes) == {0, 1}
        for each in strangers[:3]:
            each.settimeout(30)
            while each.recv(1000):  # the challenge, and the end
                pass
    finally:
        with monkeypatch.context() as patch:
            patch.setattr(job, "send", lambda *_: None)  # as if the ranks did not end
            patch.setattr(launcher, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                job.stop()
        assert len(waited) == 1
        assert launcher.wait(100) != 0
        for each in strangers:
            each.close()


def test_for_ranks_of_this_host_the_kernel_opens_no_port():
    with rank_job._listening("127.0.0.1") as (listener, path):
        assert (listener.family, os.stat(os.path.dirname(path)).st_mode & 0o777) == (socket.AF_UNIX, 0o700)
        key, proved, unproved = b"key", queue.SimpleQueue(), []

        def accept():
            unproved.append(listener.accept()[0])
            rank_job._hear_proof(unproved[0], key, unproved, proved)

        accepting = threading.Thread(target=accept)
        accepting.start()
        with rank_job.connect(path, key) as connection:
            connection.send((1, 2, 3, "here"))
            accepting.join()
        kernels, *said = proved.get()
        kernels.close()
        assert (said, unproved) == ([1, 2, 3, "here"], [])
    assert not os.path.exists(os.path.dirname(path))


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
