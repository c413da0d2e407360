"""The trial that decides whether MPI may be handed GPU memory, on memory of the host; and what comes of its ends."""

import dataclasses
import json
import os
import types

import pytest
import torch

from torchmpi_py.collectives import mpi_buffers
from torchmpi_py.collectives.flavours import cuda_trial, gpu_probe, mpi as mpi_flavour, mpi_steps
from torchmpi_py.collectives.flavours.gpu_probe import GpuFacts, Verdict
from torchmpi_py.collectives.flavours.mpi import Mpi
from torchmpi_py.core import config
from torchmpi_py.memory import devices

pytestmark = pytest.mark.timeout(240)

FACTS = GpuFacts("Some MPI 1.0", "libmpi.so of 1", "UCX_TLS=all", "2.13", "a host/1", "A GPU")


def mpi_with_a_fault(off_from=1 << 30, error=None):
    """What the trial uses of MPI; from a number of bytes on sums are off in the last element."""
    from mpi4py import MPI

    def reduce_local(given, summed):
        MPI.SUM.Reduce_local(given, summed)
        if summed[0].nbytes >= off_from:
            summed[0][-1] = 1

    def sendrecv(*arguments):
        if error is not None:
            raise error
        MPI.COMM_SELF.Sendrecv(*arguments)

    comm = types.SimpleNamespace(Sendrecv=sendrecv, Allreduce=lambda x, y, op: MPI.COMM_SELF.Allreduce(x, y, MPI.SUM))
    total = types.SimpleNamespace(Reduce_local=reduce_local)
    return types.SimpleNamespace(FLOAT=MPI.FLOAT, memory=MPI.memory, COMM_SELF=comm, SUM=total)


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        ({}, "right"),
        ({"off_from": 4}, "wrong Reduce_local of 64 bytes"),
        ({"off_from": 68}, "wrong Reduce_local of 1048576 bytes"),
        ({"error": RuntimeError("MPI_ERR:\n bad buffer")}, "failed Sendrecv of 64 bytes: MPI_ERR: bad buffer"),
    ],
)
def test_reports_of_a_trial(fault, end):
    *tried, last = cuda_trial.reports(mpi_with_a_fault(**fault), "cpu")
    expected = [f"trying {name} of {size} bytes" for size in (64, 1048576) for name in cuda_trial.TRIALS]
    assert last == end
    assert tried == expected[: len(tried)]
    assert end != "right" or tried == expected


MARK = cuda_trial.MARK
TRYING = f"noise {MARK} trying Sendrecv of 64 bytes\n"


@pytest.mark.parametrize(
    ("output", "status", "is_final", "words"),
    [
        (f"{MARK} right", 3, True, ""),
        (f"{TRYING}{MARK} wrong Sendrecv", 0, True, "not CUDA-aware: a trial gave wrong values in Sendrecv; use"),
        (f"{MARK} failed Sendrecv: no", 0, True, "a trial failed in Sendrecv: no;"),
        (TRYING, -11, True, "crashed with signal 11 (Segmentation fault) on GPU memory, in Sendrecv of 64 bytes"),
        (TRYING, None, True, "did not end within 6 s on GPU memory, in Sendrecv of 64 bytes"),
        ("", -6, False, "not known whether this MPI is CUDA-aware: a trial crashed with signal 6 (Aborted) before"),
        ("hello", 0, False, "ended with exit code 0 before it used GPU memory: hello"),
        ("Traceback\nRuntimeError: busy\n", 1, False, "exit code 1 before it used GPU memory: RuntimeError: busy"),
        ("", 2, False, "ended with exit code 2 before it used GPU memory: no output"),
    ],
)
def test_how_a_trial_ends_is_the_verdict(output, status, is_final, words):
    verdict = gpu_probe.judge(output, status, 6)
    assert verdict.is_final == is_final
    assert words in verdict.why_not
    assert bool(words) == bool(verdict.why_not)


@pytest.mark.parametrize(
    ("command", "is_final", "words"),
    [
        (["sh", "-c", f"echo '{TRYING}'; echo bad >&2; kill -SEGV $$"], True, "signal 11 (Segmentation fault) on GPU"),
        (["sh", "-c", f"echo '{TRYING}'; exec sleep 600"], True, "did not end within 2 s on GPU memory"),
        (["/nowhere/python"], False, "cannot start a trial: [Errno 2]"),
    ],
)
def test_children(command, is_final, words):
    verdict = gpu_probe.run_trial(command, 2 if "sleep" in command[-1] else 60)
    assert verdict.is_final == is_final
    assert words in verdict.why_not


def test_a_child_is_no_rank():
    job = ["OMPI_COMM_WORLD_RANK", "OMPI_MCA_ess", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_num_procs", "PMIX_RANK", "PMI_FD"]
    job += ["PRTE_LAUNCHED", "HYDI_CONTROL_FD", "MPI_LOCALRANKID", "SLURM_PROCID", "TORCHMPI_STARTED_PID"]
    users = ["OMPI_MCA_pml", "OMPI_ALLOW_RUN_AS_ROOT", "PMIX_MCA_gds", "MPI4PY_LIBMPI", "CUDA_VISIBLE_DEVICES"]
    users += ["TORCHMPIRUN_JOB_DIR", "PATH"]
    assert gpu_probe.singleton_environment(dict.fromkeys(job + users, "1")) == dict.fromkeys(users, "1")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.mark.parametrize("why", ["", "it crashed"])
def test_a_verdict_comes_back_from_its_file(folder, why):
    assert gpu_probe.read(FACTS) is None
    gpu_probe.write(FACTS, Verdict(why))
    gpu_probe.write(FACTS, Verdict(why))
    (path,) = folder.iterdir()
    assert path == FACTS.path()
    assert path.name.startswith("cuda_aware-a_host_1-")
    assert gpu_probe.read(FACTS) == Verdict(f"{why}; delete {path} to repeat the trial" if why else "")
    assert gpu_probe.read(FACTS._replace(gpu="Another GPU")) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: json.dumps(content | {"format": 0}),
        lambda content: json.dumps(content | {"facts": content["facts"] | {"torch": "2.4"}}),
        lambda content: json.dumps(content | {"why_not": None}),
        lambda _: "{",
        lambda _: b"\xff\xfe".decode(errors="surrogateescape"),
    ],
)
def test_a_file_that_does_not_fit_is_ignored(folder, change):
    gpu_probe.write(FACTS, Verdict(""))
    FACTS.path().write_text(change(json.loads(FACTS.path().read_text())), errors="surrogateescape")
    assert gpu_probe.read(FACTS) is None


def test_without_a_directory_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("TORCHMPI_TUNING_DIR", os.devnull)
    assert gpu_probe.read(FACTS) is None
    with pytest.raises(OSError, match="null"):
        gpu_probe.write(FACTS, Verdict(""))


def test_before_the_probe_gpu_tensors_are_refused():
    assert "call mpi.start(with_cuda=True) first" in Mpi().missing("cuda")
    assert Mpi().missing("cpu") == ""


@pytest.fixture
def probe(mpi, monkeypatch):
    """Make the probe as if there were GPUs, with a trial of one's own on this rank; the reason afterwards."""
    monkeypatch.setattr(gpu_probe, "why_no_gpu_memory", "not yet")
    monkeypatch.setattr(gpu_probe, "_facts", lambda: FACTS)
    monkeypatch.setattr(gpu_probe, "_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def run(command):
        monkeypatch.setattr(gpu_probe, "command", lambda device: command)
        gpu_probe.why_no_gpu_memory = gpu_probe.probe(mpi.communicator(0))
        told = mpi.allgather_object(gpu_probe.why_no_gpu_memory)
        assert len(set(told)) == 1
        assert Mpi().missing("cuda") == told[0]
        return told[0]

    return run


@pytest.mark.slow
@pytest.mark.mpi
def test_a_job_asks_the_file_before_a_child(mpi, probe, folder):
    folder = mpi.broadcast_object(str(folder))
    os.environ["TORCHMPI_TUNING_DIR"] = folder  # the fixture takes it back
    assert probe(gpu_probe.command("cpu")) == ""
    assert probe(["false"]) == ""
    mpi.barrier()
    if mpi.rank() == 0:
        assert json.loads(FACTS.path().read_text())["facts"]["gpu"] == "A GPU"
        FACTS.path().unlink()
    mpi.barrier()
    assert "exit code 1" in probe(["false"])
    assert "known whether" in probe(["false"])
    assert not FACTS.path().exists()  # what came to no trial is tried again
    mpi.barrier()  # the next one writes it
    assert "crashed with signal 11" in probe(["sh", "-c", f"echo '{TRYING}'; kill -SEGV $$"])
    assert "delete" in probe(gpu_probe.command("cpu"))


@pytest.mark.mpi
def test_one_rank_without_a_gpu_is_enough_for_a_no(mpi, probe, monkeypatch):
    monkeypatch.setattr(gpu_probe, "_no_gpu", lambda: "no CUDA device" if mpi.rank() == mpi.size() - 1 else "")
    assert "no CUDA device (on " in probe(["echo", f"{MARK} right"])


class OnGpu(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda = True


class Recorded:
    """A communicator that notes its calls, and makes them."""

    def __init__(self, comm, log):
        self.comm, self.log = comm, log
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name):
        def call(*arguments):
            self.log.append(name)
            return getattr(self.comm, name)(*arguments)

        return call


@pytest.fixture
def log(monkeypatch):
    """What happens, in order: "settle" for the wait for the GPU."""
    happened = []
    monkeypatch.setattr(mpi_buffers, "synchronize_stream", lambda x: happened.append("settle"))
    return happened


@pytest.fixture
def channel(mpi, log):
    return types.SimpleNamespace(mpi=Recorded(mpi.communicator(0).direct.mpi, log))


@pytest.mark.mpi
def test_every_call_of_mpi_on_gpu_tensors_comes_after_a_wait(mpi, channel, log):
    x, y = (torch.arange(2.0 * mpi.size()).as_subclass(OnGpu) for _ in range(2))
    flavour = Mpi()
    flavour.allreduce(channel, x, y, "sum")
    flavour.broadcast(channel, x, 0)
    flavour.reduce(channel, x, y, "avg", 0)
    flavour.alltoall(channel, x, y)
    flavour.reduce_scatter(channel, x, y[:2], "sum")
    flavour.scatter(channel, x, y[:2], 0)
    flavour.sendreceive(channel, x, y, mpi.rank(), mpi.rank())
    calls = ["Allreduce", "Bcast", "Reduce", "Alltoall", "Reduce_scatter_block", "Scatter", "Iprobe"]
    steps = [step for n, step in enumerate(log) if step != "Iprobe" or n == log.index(step)]  # it polls
    assert steps == [*(step for call in calls for step in ("settle", call)), "Irecv", "Isend"]


@pytest.mark.mpi
def test_a_conversion_comes_before_the_wait(mpi, channel, log, monkeypatch):
    monkeypatch.setattr(config, "current", dataclasses.replace(config.current, wire_bytes=16, native_async_bytes=0))
    row = mpi_buffers.reduction(torch.float16, "sum")

    def noting(name):
        return lambda x: (log.append(name), getattr(row, name)(x))[1]

    entry = dataclasses.replace(row, encode=noting("encode"), decode=noting("decode"))
    monkeypatch.setattr(mpi_buffers, "reduction", lambda dtype, op: entry)
    x = torch.arange(8).half()
    Mpi().allreduce(channel, x.as_subclass(OnGpu), x, "sum")
    assert x.tolist() == [mpi.size() * value for value in range(8)]
    assert log == ["encode", "settle", "Allreduce", "decode"] * 2


@pytest.mark.mpi
def test_posts_of_gpu_tensors_come_after_a_wait_and_collectives_are_not_posted(mpi, log, monkeypatch):
    for name in ("send", "recv"):
        posted = getattr(mpi_steps, f"post_{name}")
        noting = lambda *arguments, posted=posted, name=name: (log.append(name), posted(*arguments))[1]  # noqa: E731
        monkeypatch.setitem(mpi_flavour._POSTS, name, noting)
    rank, size = mpi.rank(), mpi.size()
    x, y = torch.full((3,), float(rank)).as_subclass(OnGpu), torch.zeros(3).as_subclass(OnGpu)
    receiving = mpi.recv_async(y, (rank - 1) % size, flavour="mpi")
    mpi.wait_all([receiving, mpi.send_async(x, (rank + 1) % size, flavour="mpi")])
    assert y.tolist() == [(rank - 1) % size] * 3
    assert log == ["settle", "recv", "settle", "send"]
    monkeypatch.setattr(devices, "submit", lambda operation, *_: f"{operation.plan.name} in the communication thread")
    assert mpi.allreduce_async(x, flavour="mpi") == "allreduce in the communication thread"
    assert mpi.sendreceive_async(x, rank, rank, flavour="mpi") == "sendreceive in the communication thread"


def test_settling_waits_for_the_current_stream_of_the_tensors_device(monkeypatch):
    asked = []
    stream = types.SimpleNamespace(synchronize=lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (asked.append(device), stream)[1])
    mpi_buffers.synchronize_stream(types.SimpleNamespace(device=torch.device("cuda", 1)))
    assert asked == [torch.device("cuda", 1), "synchronize"]
