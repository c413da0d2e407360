"""The pages for people who come with another framework's program: complete, and true of what is here."""

import importlib
import pathlib
import re

import pytest
from torch.distributed.run import get_args_parser

import torchmpi_py as mpi
from torchmpi_py.launch import options

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = ["from_horovod.md", "from_torchrun.md", "from_torchmpi.md"]

HOROVOD = """
    init shutdown is_initialized start_timeline stop_timeline rank size local_rank local_size cross_rank cross_size
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
    rocm_built allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
    grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
    grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter
    reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize
    broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object DistributedOptimizer Compression
    SyncBatchNorm ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
    HorovodInternalError elastic
"""  # what horovod.torch 0.28.1 exports

TORCHMPI = """
    start stop barrier rank size hostName withCuda ipcGroups hasNCCL hasGloo hasGlooCuda supportsCuda device
    singleIPCGroup numCommunicators needInterNodeCollectives communicatorNames collectiveAvailability collectiveSelector
    collectiveSelectorToString checkWithAllreduce customBarrier allreduceTensor broadcastTensor reduceTensor
    sendreceiveTensor allgatherTensor allreduce_double broadcast_double reduce_double sendreceive_double syncHandle
    syncHandles initStreams freeDescriptors freeReferencesToTensor freeAllTensorReferences synchronizeParameters
    synchronizeGradients registerAsyncMPIBackward unregisterAsyncMPIBackward skipCollective BlockSequential
    getParameterBlocks parameterBlocks backwardStep init send receive free freeAll initTensors prefetchTensors
    integrateTensors sendTensors prefetchAllocator psInitFun Update DownpourUpdate EASGDUpdate AllReduceSGDEngine
    usegpu devicesync dynamicnetwork debug lrcriterion maxepoch runOneConfig tensorType isFloatType
    torchmpi_get_ torchmpi_set_hierarchical_collectives torchmpi_set_cartesian_communicator
"""


def text(page):
    return (DOCS / page).read_text(encoding="utf-8")


def words(page):
    """All words in the code of a page."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text(page)))))


@pytest.mark.parametrize(("page", "names"), [("from_horovod.md", HOROVOD), ("from_torchmpi.md", TORCHMPI)])
def test_all_names_are_on_the_page(page, names):
    assert [name for name in names.split() if name not in words(page)] == []


def test_options_of_torchrun_are_on_the_page_and_understood_or_answered(capsys):
    """Those that both have, with hyphens or underscores, are taken; the others say what to write."""
    names = {name for action in get_args_parser()._actions for name in action.option_strings} - {"-h", "--help", "-m"}
    assert len(names) > 20
    for name in sorted(names):
        assert not name.startswith("--") or "_" in name or name in text("from_torchrun.md"), name
        for value in (["1"], []):
            try:
                options.parse([name, *value, "a.py"])
            except SystemExit:
                continue
            break
        else:
            said = capsys.readouterr().err
            assert f"{name} is an option of torchrun; " in said, said
    assert options.parse(["--max_restarts", "3", "--log_dir", "d", "a.py"]).max_restarts == 3


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_to_write_exists(page):
    """In tables TorchMPI's names have the same prefixes: only what stands to the right counts there."""
    rows = [line.split(" | ", 1)[-1] if line.startswith("|") else line for line in text(page).splitlines()]
    code = " ".join(re.findall(r"`([^`\n]+)`", "\n".join(rows)))
    aliases = {"mpi": "", "mpinn": "nn.", "optim": "optim.", "ps": "paramserver.", "torch_backend": "torch_backend."}
    prefixed = re.findall(r"(?<![\w.])(mpi|mpinn|optim|ps|torch_backend)\.([A-Za-z][\w.]*\w)", code)
    names = {aliases[prefix] + name for prefix, name in prefixed}
    assert len(names) > 3
    for name in names - {"async", "C"}:  # such as optim.compression.FP16
        value = mpi
        for part in name.split("."):
            value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")


def test_an_option_of_torchmpirun_that_a_page_names_exists(capsys):
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    known = set(re.findall(r"--?[a-z][a-z-]*", capsys.readouterr().out)) | {"--nproc-per-node"}
    for page in PAGES[:2]:
        for command in re.findall(r"torchmpirun ([^`\n]*)", text(page)):
            before_program = re.split(r"\s(?:\S+\.py|-m)\b", " " + command)[0]
            assert set(re.findall(r"(?<!\S)--[a-z][a-z-]*", before_program)) <= known, command
