"""Imports point down, public names are complete, files and functions stay small."""

import ast
import pathlib

import pytest

import torchmpi_py

PACKAGE = pathlib.Path(torchmpi_py.__file__).parent

# Lowest first: a module may import from its own row and from rows above it in this list, never from a later one.
ROWS = [
    ["errors", "config", "grouping", "clocks", "trace_rows", "fences", "processes", "signals", "board_layout"],
    ["waiting", "digests"],
    ["recovery"],
    ["tensors", "handles", "placement", "channels", "devices", "shared_files"],
    ["posted"],
    ["communication_thread", "gpus", "board"],
    ["sequences", "comparison", "claims"],
    ["calls"],
    ["watch"],
    ["reports", "flight_recorder"],
    ["neighbours"],
    ["communicators", "streams", "cuda_ipc"],
    ["tracing"],
    ["exits", "symmetric"],
    ["watchdog", "levels"],
    [
        "collectives.cuda_trial",
        "collectives.operation",
        "collectives.reductions",
        "collectives.scalars",
        "collectives.schedule",
        "collectives.ring_schedule",
    ],
    [
        "collectives.cuda_aware",
        "collectives.ipc_trial",
        "collectives.wire",
        "collectives.two_shot",
        "collectives.node_group",
    ],
    ["collectives.gathering", "collectives.rendezvous", "collectives.process_groups", "collectives.staging"],
    ["collectives.ipc_group", "collectives.host_slots", "collectives.groups"],
    ["collectives.flavour"],
    ["collectives.mpi_steps"],
    [
        "collectives.mpi",
        "collectives.shared",
        "collectives.ring",
        "collectives.hierarchical",
        "collectives.cudaipc",
        "collectives.staged",
        "collectives.torch_group",
    ],
    ["collectives.registry"],
    ["collectives.selector"],
    ["collectives.operands", "collectives.forms"],
    ["collectives.verbs", "collectives.objects"],
    [
        "collectives.consistency",
        "collectives.timing",
        "collectives.crossovers",
        "collectives.tuning_file",
        "collectives",
    ],
    ["collectives.autotune"],
    ["startup"],
    ["survivors"],
    ["runtime", "first_batches"],
    ["buckets"],
    ["nn.synchronize", "nn.block_sequential", "nn.async_backward", "nn.sync_batch_norm", "nn.optimizer_state", "nn"],
    [
        "paramserver.sharding",
        "paramserver.agreement",
        "paramserver.rules",
        "paramserver.locks",
        "paramserver.client",
        "paramserver.host_copies",
    ],
    ["paramserver.optimizers", "paramserver.shard"],
    ["paramserver.store", "paramserver.messages", "paramserver.states"],
    ["paramserver.service"],
    ["paramserver.exchange"],
    ["paramserver.carrier"],
    ["paramserver.server", "paramserver.timetable"],
    ["paramserver.lists"],
    ["paramserver.update", "paramserver.averaging", "paramserver.hogwild", "paramserver.synchronous"],
    ["paramserver"],
    [
        "torch_backend.buckets",
        "torch_backend.call",
        "torch_backend.compiling",
        "torch_backend.futures",
        "torch_backend.joining",
        "torch_backend.members",
        "torch_backend.meeting",
        "torch_backend.options",
        "torch_backend.parts",
        "torch_backend.placeholder",
        "torch_backend.registration",
        "torch_backend.sites",
    ],
    ["torch_backend.monitoring", "torch_backend.steps", "torch_backend.work"],
    ["torch_backend.averages", "torch_backend.call_queue", "torch_backend.messages", "torch_backend.plans"],
    ["torch_backend.process_group"],
    ["torch_backend.creation", "torch_backend.gradients"],
    ["torch_backend"],
    ["engine"],
    ["bench"],
]
FLAVOURS = ["mpi", "shared", "ring", "hierarchical", "cudaipc", "staged", "torch_group"]
ROW_OF = {name: index for index, row in enumerate(ROWS) for name in row}


def modules():
    return {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path for path in PACKAGE.rglob("*.py")}


def row_of(module):
    module = module.removesuffix(".__init__")
    while module not in ROW_OF and "." in module:
        module = module.rpartition(".")[0]
    return ROW_OF.get(module)


def imports(path, *, at_run_time=True):
    """(line, module) of every import that runs; those under ``if TYPE_CHECKING`` do not."""
    tree = ast.parse(path.read_text())
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def ours(imported):
    """The module inside the package that an import names, or None."""
    if not imported.startswith("torchmpi_py."):
        return None
    return imported.removeprefix("torchmpi_py.")


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module):
    path = modules()[module]
    for line, imported in imports(path):
        target = ours(imported)
        if target is None:
            continue
        if module.startswith("launch"):
            assert target.startswith(("launch", "errors")), f"{path}:{line}: launch imports {target}"
        elif row_of(module) is not None and row_of(target) is not None:
            assert row_of(target) <= row_of(module), f"{path}:{line}: {module} imports {target}, which is above it"


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_has_a_row(module):
    assert module == "__init__" or module.startswith("launch") or row_of(module) is not None, f"add {module} to ROWS"


def test_flavours_do_not_import_each_other():
    for flavour in (name for name in FLAVOURS if f"collectives.{name}" in modules()):
        for line, imported in imports(PACKAGE / "collectives" / f"{flavour}.py"):
            assert not any(imported.endswith(f".{other}") for other in FLAVOURS if other != flavour), (flavour, line)


def test_the_launcher_imports_the_standard_library_only():
    import sys

    for name, path in modules().items():
        if name.startswith("launch"):
            for line, imported in imports(path):
                top = imported.partition(".")[0]
                allowed = top in sys.stdlib_module_names or top == "torchmpi_py" or imported.startswith("mpi4py")
                assert allowed, f"{path}:{line}: launch imports {imported}"


def test_optional_dependencies_are_met_in_one_file():
    homes = {
        "matplotlib": {"bench/plot.py"},
        "torch.distributed": {
            "collectives/rendezvous.py",
            "collectives/process_groups.py",
            "collectives/torch_group.py",
            "bench/torch_groups.py",
            *(f"torch_backend/{path.name}" for path in (PACKAGE / "torch_backend").glob("*.py")),
        },
        "sklearn": {"bench/modes_data.py"},
        "tqdm": {"engine/progress.py", "bench/progress.py"},
    }
    for name, path in modules().items():
        for line, imported in imports(path):
            home = next((files for top, files in homes.items() if f"{imported}.".startswith(f"{top}.")), None)
            is_home = home is None or str(path.relative_to(PACKAGE)) in home
            assert is_home, f"{name}:{line} imports {imported}, which belongs in {home}"


def test_public_names_are_sorted_complete_and_typed():
    assert torchmpi_py.__all__ == sorted(torchmpi_py.__all__)
    for name in torchmpi_py.__all__:
        assert getattr(torchmpi_py, name) is not None
        assert name in dir(torchmpi_py)
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    typed = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(typed) == torchmpi_py.__all__


def test_every_public_name_has_a_docstring():
    for name in torchmpi_py.__all__:
        assert getattr(torchmpi_py, name).__doc__, name


def functions():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def test_budgets():
    over = [f"{path}: {count} lines" for path in PACKAGE.rglob("*.py") if (count := path.read_text().count("\n")) > 400]
    for path, node in functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        length = node.end_lineno - body[0].lineno + 1 if body else 0
        if length > 40:
            over.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not over, "over the budget (files 400 lines, functions 40): " + "; ".join(over)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="all_reduce"):
        torchmpi_py.all_reduce  # noqa: B018
