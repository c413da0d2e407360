import math
import subprocess
import sys

import pytest

from torchmpi_py.launch import binding, variables, wrap

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("local_size", range(1, 38))
def test_parts_are_disjoint_contiguous_equal_and_complete(local_size):
    for num_cores in range(local_size, 65):
        cores = [3 * core for core in range(num_cores)]
        parts = [binding.cores_of_rank(cores, rank, local_size) for rank in range(local_size)]
        assert [core for part in parts for core in part] == cores  # in rank order: disjoint, contiguous, complete
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert all(len(part) >= binding.threads_per_rank(num_cores, local_size) for part in parts)


@pytest.mark.parametrize("num_cores", [1, 2, 3, 36])
def test_fewer_cores_than_ranks_binds_nobody(num_cores):
    cores = tuple(range(num_cores))
    assert {binding.cores_of_rank(cores, rank, 37) for rank in range(37)} == {cores}
    assert binding.threads_per_rank(num_cores, 37) == 1


def test_cores_need_no_order_and_no_gaplessness():
    assert binding.cores_of_rank([7, 1, 5, 3], 0, 2) == (1, 3)
    assert binding.cores_of_rank([7, 1, 5, 3], 1, 2) == (5, 7)


@pytest.mark.parametrize("local_rank", [-1, 2])
def test_a_rank_that_is_none_is_named(local_rank):
    with pytest.raises(ValueError, match=f"local rank {local_rank} is not in 0..1"):
        binding.cores_of_rank([0, 1], local_rank, 2)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", math.inf), ("150000 100000\n", 1.5), ("-1\n 100000", math.inf), ("", math.inf)]
)
def test_quota(text, cores):
    assert binding.quota_cores(text) == cores


def test_slurm_layout():
    assert [variables.tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]
    assert variables.tasks_on_node("2", 0) == 2
    assert [variables.tasks_on_node(layout, 3) for layout in ("4(x2),3", "", "x")] == [None] * 3


def test_usable_cores_are_at_least_one_and_at_most_the_allowed():
    assert 1 <= binding.num_usable_cores() <= len(binding.allowed_cores())


@pytest.mark.parametrize(
    ("environment", "rank", "local"),
    [
        ({}, 0, (0, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            5,
            (1, 4),
        ),
        ({"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, 5, (1, 4)),
        (
            {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "4"},
            5,
            (1, 4),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4,2",
            },
            5,
            (1, 2),
        ),
        ({"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4"}, 5, (1, 4)),
        ({"PMI_RANK": "5", "PALS_LOCAL_RANKID": "1"}, 5, (0, 1)),  # nobody says of how many
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PMI_RANK": "3"}, 3, (0, 1)),  # mpiexec in an allocation
    ],
)
def test_rank_and_local_rank_in_every_mpis_words(environment, rank, local):
    assert (variables.rank(environment) or 0) == rank
    assert wrap.local_rank_and_size(environment) == local


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit("no data"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError(), 1),
    ],
)
def test_exit_codes_are_plain_pythons(error, code):
    assert wrap.exit_code(error) == code


def test_wrap_and_launcher_load_neither_torch_nor_numpy_nor_mpi():
    code = "import sys, torchmpi_py.launch.wrap, torchmpi_py.launch.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "mpi4py", "mpi4py.MPI"} & set(loaded)
