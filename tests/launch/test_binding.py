"""Which cores a rank gets, near its GPU, and how many threads; the place of a rank in every MPI's words."""

import math

import pytest
from support import jobs

from torchmpi_py.launch import binding, topology, variables, wrap

pytestmark = pytest.mark.timeout(240)


def parts_of(cpus, local_size, near=()):
    """Return the CPUs of each rank's part where each CPU is a core."""
    cores = [topology.Core(0, 0, False, cpu, (cpu,)) for cpu in cpus]
    parts = [binding.cores_of_rank(cores, rank, local_size, near) for rank in range(local_size)]
    return [tuple(cpu for core in part for cpu in core.cpus) for part in parts]


def test_few_cores_bind_nobody_and_a_rank_has_to_be_one():
    for num_cores in (1, 2, 3, 36):
        assert set(parts_of(range(num_cores), 37)) == {tuple(range(num_cores))}
        assert binding.threads_per_rank(num_cores, 37) == 1
    assert parts_of(range(8), 1, [frozenset(range(4))]) == [tuple(range(8))]  # a rank alone has all
    for local_rank in (-1, 2):
        with pytest.raises(ValueError, match=f"local rank {local_rank}: expected 0 to 1"):
            binding.cores_of_rank(topology.cores(), local_rank, 2)


TWO_SOCKETS = [range(16), range(16), range(16, 32), range(16, 32)]  # 4 GPUs, 2 on each
HALF = [range(4), range(8, 12), range(4, 8), range(12, 16)]


@pytest.mark.parametrize(
    ("num_cores", "near", "expected"),
    [
        # As many ranks as GPUs, in the order of sockets, and not.
        (32, TWO_SOCKETS, [range(8), range(8, 16), range(16, 24), range(24, 32)]),
        (32, TWO_SOCKETS[::-1], [range(16, 24), range(24, 32), range(8), range(8, 16)]),
        # Ranks share GPUs, and the cores near them.
        (32, TWO_SOCKETS[1:3], [range(8), range(16, 24), range(8, 16), range(24, 32)]),
        # Half of the machine is near no GPU: half of the part, but not less.
        (16, HALF, HALF),
        (32, [range(8)] * 2, [None] * 4),
        (32, [range(2), range(8, 16)], [None] * 4),
        # Nothing near is allowed; sets overlap; nothing is known.
        (8, [range(16, 32)], [None] * 4),
        (32, [range(16), range(8, 24)], [None] * 4),
        (32, [], [None] * 4),
        (3, TWO_SOCKETS, [None] * 4),
    ],
)
def test_cores_near_the_gpu_of_each_rank(num_cores, near, expected):
    plain, parts = parts_of(range(num_cores), 4), parts_of(range(num_cores), 4, [frozenset(some) for some in near])
    assert parts == [usual if wanted is None else tuple(wanted) for wanted, usual in zip(expected, plain, strict=True)]


@pytest.fixture
def machine(tmp_path):
    """Write the folders of the driver and of PCI devices for GPUs (address, model, cores); return what reads them."""

    def write(*gpus):
        for address, model, cores in gpus:
            (tmp_path / "driver" / address).mkdir(parents=True)
            jobs.write(tmp_path, f"{model}\n", f"pci/{address}/device")
            if cores is not None:
                jobs.write(tmp_path, f"{cores}\n", f"pci/{address}/local_cpulist")
        (tmp_path / "pci" / "0000:00:1f.0").mkdir(parents=True, exist_ok=True)  # something else
        return lambda **environment: binding.cores_near_gpus(environment, tmp_path / "driver", tmp_path / "pci")

    return write


A, B, C, D = (frozenset(some) for some in ((0, 1, 8, 9), (2, 3), (4, 5), (6, 7)))
BUSES = {"c1": "6-7", "07": "0-1,8-9", "47": "2-3", "81": "4-5"}
FOUR = [(f"0000:{bus}:00.0", "0x20b0", cores) for bus, cores in BUSES.items()]


def test_gpus_are_counted_as_cuda_does(machine):
    near = machine(*FOUR)
    assert near() == near(CUDA_VISIBLE_DEVICES="0,1,2,3") == [A, B, C, D]
    assert near(CUDA_VISIBLE_DEVICES="3, 1") == [D, B]
    assert near(CUDA_VISIBLE_DEVICES="3,1", SLURM_JOB_ID="7") == []
    assert near(CUDA_VISIBLE_DEVICES="3,2,1,0", SLURM_JOB_ID="7") == [D, C, B, A]
    for text in ("", "-1", "2", "0,9", "1,1", "0,-1", "GPU-3f", "MIG-1", "0,"):
        assert near(CUDA_VISIBLE_DEVICES=text) == [], text


def test_one_gpu_is_clear_and_none_is_none(machine, tmp_path):
    assert machine()() == []
    (tmp_path / "driver").mkdir()
    assert machine()() == []
    near = machine(FOUR[0])
    assert near() == near(CUDA_VISIBLE_DEVICES="0") == near(CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="1") == [D]


def test_gpus_of_several_models_need_the_order_of_addresses(machine):
    near = machine(*FOUR[:3], ("0000:81:00.0", "0x1db6", "4-5"))
    assert near() == near(CUDA_DEVICE_ORDER="FASTEST_FIRST") == []
    assert near(CUDA_DEVICE_ORDER="PCI_BUS_ID") == [A, B, C, D]


@pytest.mark.parametrize("cores", [None, "", "all", "3-x"])
def test_what_is_not_told_is_not_guessed(machine, cores):
    assert machine(*FOUR[1:], ("0000:c1:00.0", "0x20b0", cores))() == []


@pytest.mark.parametrize(
    ("how", "near", "cores"),
    [("core", [], 4), ("core", [range(2), range(4, 6)], 2), ("numa", [], 8), ("socket", [], 8), ("none", [], 0)],
)
def test_a_rank_is_bound_and_told_its_threads(monkeypatch, how, near, cores):
    bound = []
    monkeypatch.setattr(binding, "cores_near_gpus", lambda environment: [frozenset(some) for some in near])
    monkeypatch.setattr(topology, "cores", lambda: [topology.Core(0, 0, False, cpu, (cpu,)) for cpu in range(8)])
    monkeypatch.setattr(topology, "num_usable_cores", lambda num_cores: num_cores)
    monkeypatch.setattr(wrap.os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    monkeypatch.setattr(wrap.os, "environ", {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    wrap.bind(how)
    assert [len(some) for some in bound] == ([cores] if cores else [])
    assert how != "core" or min(bound[0]) == 4
    assert {wrap.os.environ[name] for name in binding.THREAD_VARIABLES} == {str(min(cores or 4, 4))}


def test_quota():
    limits = {"max 100000": math.inf, "150000 100000\n": 1.5, "-1\n 100000": math.inf, "": math.inf}
    assert {text: topology.quota_cores(text) for text in limits} == limits


MVAPICH = {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,2"}


@pytest.mark.parametrize(
    ("environment", "rank", "local"),
    [
        ({}, 0, (0, 1)),
        (MVAPICH, 5, (1, 4)),
        (SLURM, 5, (1, 2)),
        ({"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4"}, 5, (1, 4)),
        ({"PMI_RANK": "5", "PALS_LOCAL_RANKID": "1"}, 5, (0, 1)),  # nobody says of how many
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PMI_RANK": "3"}, 3, (0, 1)),  # mpiexec in an allocation
    ],
)
def test_rank_and_local_rank_in_every_mpis_words(environment, rank, local):
    assert (variables.rank_in(environment) or 0) == rank
    assert wrap.local_rank_and_size(environment) == local


def test_slurm_layout():
    assert [variables.tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    assert variables.tasks_on_node("2", 0) == 2
    assert [variables.tasks_on_node(layout, 3) for layout in ("4(x2),3", "", "x")] == [None] * 3


def test_exit_codes_are_plain_pythons():
    errors = [SystemExit(), SystemExit(0), SystemExit(3), SystemExit(-1), SystemExit("no data")]
    codes = [wrap.exit_code(error) for error in (*errors, KeyboardInterrupt(), RuntimeError())]
    assert codes == [0, 0, 3, 255, 1, 130, 1]


def test_wrap_and_launcher_load_neither_torch_nor_numpy_nor_mpi():
    done = jobs.python("import sys, torchmpi_py.launch.wrap, torchmpi_py.launch.__main__; print(*sys.modules)")
    assert "torchmpi_py.launch.wrap" in done.stdout
    assert not {"torch", "numpy", "mpi4py", "mpi4py.MPI"} & set(done.stdout.split())
