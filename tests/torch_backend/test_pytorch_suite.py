"""PyTorch's own distributed tests pass on "torchmpi": a choice of them, or with TORCHMPI_PYTORCH_SUITE=all all."""

import os

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import mpirun

pytest.importorskip("expecttest", reason="PyTorch's tests import it")
pytorch_jobs = pytest.importorskip("pytorch_jobs")
pytorch_table = pytest.importorskip("pytorch_table")

try:
    mpirun.find("", os.environ)
    MISSING = ""
except LaunchError as error:
    MISSING = str(error)

ALL = os.environ.get("TORCHMPI_PYTORCH_SUITE") == "all"
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

# Every operation; DDP's hooks, buffers and uneven inputs; what only gloo or only MPI can do elsewhere; errors.
ON_2_RANKS = [
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_sum_async",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_broadcast_full_group",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather_checks",
    "test_get_backend",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_irecv",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_full_group_max",
    "test_reduce_sum_twice",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]
ON_3_RANKS = [
    "test_all_gather_group",
    "test_all_reduce_coalesced_group_product",
    "test_all_reduce_group_min",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_group",
    "test_broadcast_group",
    "test_gather_group",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
    "test_reduce_group_sum",
    "test_scatter_group",
    "test_send_recv_any_source",
]

# A backend in which some operations go wrong on rank 1.
BROKEN = """
import os, signal, time
import torch.distributed as dist
import torchmpi_py.torch_backend
from mpi4py import MPI

def broken(name, how):
    right = getattr(dist, name)
    setattr(dist, name, lambda *a, **k: how() if dist.get_rank() == 1 else right(*a, **k))

broken("broadcast", lambda: time.sleep(1000))
broken("reduce", lambda: os.kill(os.getpid(), signal.SIGKILL))
broken("gather", lambda: 1 / 0)
"""


seldom = pytest.mark.skipif(not ALL, reason="TORCHMPI_PYTORCH_SUITE is not all")


@pytest.mark.parametrize(
    ("ranks", "choice"), [(2, ON_2_RANKS), pytest.param(3, ON_3_RANKS, marks=seldom)], ids=["2", "3"]
)
def test_what_passed_passes(ranks, choice, tmp_path):
    results = pytorch_jobs.run("torchmpi", ranks, tmp_path / "suite", None if ALL else choice)
    assert not pytorch_table.regressions(results, ranks, chosen=None if ALL else choice)
    known = pytorch_table.kept()
    assert set(results) <= set(known) or ALL
    assert any(result.status == "passed" for result in results.values())


def test_no_case_that_gloo_passes_is_kept_as_one_that_fails_here():
    for case, had in pytorch_table.kept().items():
        for ranks in pytorch_table.RANKS:
            assert had["torchmpi", ranks] == "passed" or had["gloo", ranks] != "passed", case
            assert had["torchmpi", ranks] in ("passed", "skipped"), case


@seldom
def test_a_case_that_goes_wrong_hides_no_other(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cases = ["test_all_reduce_sum", "test_broadcast", "test_gather", "test_get_rank", "test_reduce_sum", "test_scatter"]
    results = pytorch_jobs.run("torchmpi", 2, tmp_path / "suite", cases, module="broken", seconds=15)
    told = [(result.status, result.reason) for result in results.values()]
    assert [status for status, _ in told] == ["passed", "timed out", "failed", "passed", "died", "passed"], told
    assert "ZeroDivisionError" in told[2][1]
    assert "rank 1" in told[4][1], told
