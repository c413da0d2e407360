"""Cases of PyTorch's RPC tests in which a process group takes part: DDP under distributed autograd, RPC beside groups.

They make their groups themselves, of "gloo" by name; see ``pytorch_cases`` for what carries them. The other RPC tests
have no process group. What RPC leaves behind hinders the next case, so each has a job of its own. Upstream has four
ranks, six where trainers, a master and a remote worker are told apart.
"""

import torch.distributed as dist

TRAINERS_MASTER_WORKER = 6
_NAMES = {
    "DdpComparisonTest": "comparison comparison_uneven_inputs dist_autograd_local_vs_remote dist_autograd_sparse_grads",
    "DdpUnderDistAutogradTest": "ddp_inside ddp_outside ddp_outside_uneven_inputs no_ddp",
    "RpcTest": "deadlock init_pg_then_rpc init_rpc_then_pg pg_init_no_rpc_init",
}
_BEGINS = {"DdpComparisonTest": "test_ddp_", "DdpUnderDistAutogradTest": "test_backward_", "RpcTest": "test_"}
CASES = {name: [_BEGINS[name] + case for case in cases.split()] for name, cases in _NAMES.items()}


def classes(size: int) -> dict:
    """``{case: class}`` for a number of ranks. Every case has a name of its own."""
    if not dist.rpc.is_available():
        return {}
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test
    from torch.testing._internal.distributed.rpc import rpc_test, tensorpipe_rpc_agent_test_fixture

    fixture = tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture
    made = {}
    for name, cases in CASES.items():
        source = getattr(rpc_test, name, None) or getattr(ddp_under_dist_autograd_test, name)
        if source.__name__ == "DdpUnderDistAutogradTest" and size != TRAINERS_MASTER_WORKER:
            continue
        parents = (fixture, source, common_distributed.MultiProcessTestCase)
        made |= dict.fromkeys(cases, type(name, parents, {"world_size": size}))
    return made
