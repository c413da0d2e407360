"""PyTorch's own distributed tests pass on "torchmpi": a choice of them (``scripts/test_pytorch_suite`` runs all)."""

import os

import pytest
from support import jobs

pytest.importorskip("expecttest", reason="PyTorch's tests import it")
pytorch_jobs = pytest.importorskip("pytorch_jobs")
pytorch_table = pytest.importorskip("pytorch_table")

pytestmark = [pytest.mark.timeout(900), jobs.needs_mpi]

# Every operation; DDP's hooks, buffers and uneven inputs; what only gloo or only MPI can do elsewhere; errors.
CHOICE = {
    2: """
    accumulate_gradients_no_sync_allreduce_with_then_hook all_gather_coalesced_simple all_gather_object_subgroup
    all_reduce_coalesced_full_group_sum all_reduce_complex_unsupported_ops all_reduce_sum_async all_to_all_complex
    all_to_all_single_unequal_split barrier_timeout_full_group batch_isend_irecv_gloo broadcast_full_group
    DistributedDataParallelCPU_grad_is_view ddp_create_graph ddp_logging_data_cpu destroy_group gather_checks
    get_backend get_future grads_same_across_ranks_with_no_sync irecv isend_autograd_profiler
    monitored_barrier_gloo_rank_0_timeout reduce_full_group_max reduce_sum_twice scatter_checks scatter_object_list
    send_recv_any_source_torch_profiler send_recv_with_tag sparse_all_reduce_sum static_graph_api_cpu
    """,
    3: """
    all_gather_group all_reduce_coalesced_group_product all_reduce_group_min all_to_all_single_unequal_split_group
    barrier_group broadcast_group gather_group monitored_barrier_failure_order monitored_barrier_gloo_subgroup
    monitored_barrier_wait_all_ranks reduce_group_sum scatter_group send_recv_any_source
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_passed_passes(ranks, tmp_path):
    choice = [f"test_{name}" for name in CHOICE[ranks].split()]
    results = pytorch_jobs.run("torchmpi", ranks, tmp_path / "suite", choice)
    assert not pytorch_table.regressions(results, ranks, chosen=choice)
    assert set(results) == set(choice) <= set(pytorch_table.kept())


def test_no_case_that_gloo_passes_is_kept_as_one_that_fails_here():
    kept = pytorch_table.kept()
    assert sum(had["torchmpi", 3] == "passed" for had in kept.values()) > 100
    for case, had in kept.items():
        for ranks in pytorch_table.RANKS:
            assert had["torchmpi", ranks] == "passed" or had["gloo", ranks] != "passed", case
            assert had["torchmpi", ranks] in ("passed", "skipped"), case


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


@pytest.mark.slow
def test_a_case_that_goes_wrong_hides_no_other(tmp_path, monkeypatch):
    jobs.write(tmp_path, BROKEN, "broken.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cases = ["test_all_reduce_sum", "test_broadcast", "test_gather", "test_get_rank", "test_reduce_sum", "test_scatter"]
    results = pytorch_jobs.run("torchmpi", 2, tmp_path / "suite", cases, module="broken", seconds=15)
    told = [(result.status, result.reason) for result in results.values()]
    assert [status for status, _ in told] == ["passed", "timed out", "failed", "passed", "died", "passed"], told
    assert "ZeroDivisionError" in told[2][1]
    assert "rank 1" in told[4][1], told
