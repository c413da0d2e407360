"""PyTorch's own distributed tests pass on "torchmpi": a choice of them (``scripts/test_pytorch_suite`` runs all)."""

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
    reduce_full_group_max reduce_sum_twice scatter_checks scatter_object_list
    send_recv_any_source_torch_profiler send_recv_with_tag sparse_all_reduce_sum static_graph_api_cpu
    """,
    3: """
    all_gather_group all_reduce_coalesced_group_product all_reduce_group_min all_to_all_single_unequal_split_group
    barrier_group broadcast_group gather_group reduce_group_sum scatter_group
    send_recv_any_source
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
