"""The job of a notebook: who may connect to it."""

import socket
import subprocess

import pytest

from torchmpi_py.notebook import rank_job


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
    monkeypatch.setattr(rank_job, "_HELLO_SECONDS", 1)
    job = rank_job.RankJob(["-n", "2"])
    try:
        assert len(strangers) == 2
        assert set(job.processes) == {0, 1}
    finally:
        job.stop()
        for each in strangers:
            each.close()
