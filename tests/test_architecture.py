"""Imports point down, public names are complete, files and functions stay small."""

import ast
import functools
import pathlib
import runpy
import sys

import pytest

import torchmpi_py
from torchmpi_py.collectives import registry

PACKAGE = pathlib.Path(torchmpi_py.__file__).parent

# Lowest first. A module may import from its own room and from rooms above it in this list, never from a later one.
ROOMS = [
    ["errors", "trusted_files"],
    ["launch"],
    ["core"],
    ["memory"],
    ["watch"],
    ["collectives"],
    ["runtime"],
    ["nn"],
    ["optim"],
    ["engine", "paramserver", "sweeps", "torch_backend"],
    ["bench", "doctor", "notebook"],
    ["__main__"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
FLAVOURS = {type(flavour).__module__.removeprefix("torchmpi_py.") for flavour in registry.FLAVOURS}


@functools.cache
def modules():
    """Path of every module, by its name inside the package; that of a package ends in ``.__init__``."""
    return {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def imports(path):
    """(line, module) of every import, typing imports and those by importlib included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found += [(node.lineno, name.value) for name in node.args if isinstance(name, ast.Constant)]
    return found


def our_imports(path):
    """(line, module) of every import of a module of the package."""
    known = modules()
    for line, imported in imports(path):
        name = imported.removeprefix("torchmpi_py.")
        if name != imported:
            candidates = (name, f"{name}.__init__", name.rpartition(".")[0], f"{name.rpartition('.')[0]}.__init__")
            yield line, next(module for module in candidates if module in known)


def room_of(module):
    return module.partition(".")[0]


@pytest.mark.parametrize("module", sorted(set(modules()) - {"__init__"}))
def test_imports_point_down(module):
    path = modules()[module]
    floor = FLOOR_OF[room_of(module)]  # a new room needs a place in ROOMS
    for line, target in our_imports(path):
        if target != "__init__" and room_of(target) != room_of(module):
            assert FLOOR_OF[room_of(target)] < floor, f"{path}:{line}: {module} imports {target}, which is not below it"


def test_no_imports_in_a_circle():
    targets = {module: {target for _, target in our_imports(path)} for module, path in modules().items()}
    while leaves := {module for module, below in targets.items() if not below & set(targets) - {module}}:
        targets = {module: below for module, below in targets.items() if module not in leaves}
    assert not targets, f"these modules import each other, directly or through others: {sorted(targets)}"


def test_no_name_twice():
    """Of modules, and of classes."""
    names = [module.rpartition(".")[2] for module in modules() if not module.endswith("__")]
    for path in modules().values():
        names += [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_flavours_do_not_import_each_other():
    for flavour in FLAVOURS:
        for line, target in our_imports(modules()[flavour]):
            assert target == flavour or target not in FLAVOURS, f"{flavour}, line {line}, imports flavour {target}"


def test_the_launcher_imports_the_standard_library_only():
    for name, path in modules().items():
        if name.startswith("launch"):
            for line, imported in imports(path):
                top = imported.partition(".")[0]
                allowed = top in sys.stdlib_module_names or top in ("torchmpi_py", "mpi4py", "tomli")  # for Python 3.10
                assert allowed, f"{path}:{line}: launch imports {imported}"


def test_mpi_is_imported_in_one_module():
    for name, path in modules().items():
        is_program = name in ("collectives.flavours.cuda_trial", "doctor.probes")  # which import nothing of the package
        if name != "core.mpi_api" and not is_program and not name.startswith("launch"):
            found = [imported for _, imported in imports(path)]
            assert "mpi4py.MPI" not in found, f"{path}: take it from core.mpi_api"


# The parts of the session, as the lower rooms find them; ``config.use`` assigns those of config.
SESSION_PARTS = {
    "core.ulfm": {"num_acknowledged"},
    "collectives.flavours.gpu_probe": {"why_no_gpu_memory"},
    "core.config": {"current", "can_raise"},
    "core.status_board": {"current"},
    "core.communication_thread": {"current_thread"},
    "core.communicators": {"current_stack", "why_not"},
    "memory.gpus": {"current"},
    "memory.symmetric": {"unavailable_because"},
    "watch.node_links": {"current"},
    "watch.tracing": {"current"},
}
ASSIGNERS = {"runtime.session", "runtime.exits"}  # the latter in a forked child


def changed_modules(path):
    """(line, module, attribute) of every assignment to an attribute of another module of the package."""
    tree, known, names = ast.parse(path.read_text()), modules(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported = {alias.asname or alias.name: f"{prefix}{alias.name}" for alias in node.names}
            names |= {name: module.removeprefix("torchmpi_py.") for name, module in imported.items()}
    for node in ast.walk(tree):
        target, attribute = None, ""
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            target, attribute = node.args[0], ast.unparse(node.args[1]).strip("'")
        module = names.get(ast.unparse(target)) if target is not None else None
        if module in known:
            yield node.lineno, module, attribute


def test_the_session_alone_assigns_its_parts():
    assigned = {("core.config", attribute) for attribute in SESSION_PARTS["core.config"]}
    for name, path in modules().items():
        for line, module, attribute in changed_modules(path):
            if module in SESSION_PARTS or room_of(module) != room_of(name):
                text = f"{path}:{line}: {name} assigns {module}.{attribute}; a session alone does this"
                assert name in ASSIGNERS, text
                assigned.add((module, attribute))
        assert name in ASSIGNERS or "config.use(" not in path.read_text(), f"{path} replaces the session's tuning"
    parts = {(module, attribute) for module, attributes in SESSION_PARTS.items() for attribute in attributes}
    assert assigned == parts  # a new part of the session needs a place in SESSION_PARTS


def test_no_function_assigns_a_part_of_the_session():
    """In its own module a part has the value of a process without session; ``use`` alone assigns that of config."""
    for module, attributes in SESSION_PARTS.items():
        for function in ast.walk(ast.parse(modules()[module].read_text())):
            if isinstance(function, ast.FunctionDef) and function.name != "use":
                declared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
                assert not declared & attributes, f"{module}: {function.name}"


def test_optional_dependencies_are_met_in_one_file():
    homes = {
        "matplotlib": set(),
        "IPython": {"notebook/magics.py", "notebook/rank_program.py"},
        "torch.distributed": {f"collectives/flavours/{name}.py" for name in ("rendezvous", "torch_group")}
        | {"bench/candidates.py", "bench/trainers.py"}
        | {f"torch_backend/{path.name}" for path in (PACKAGE / "torch_backend").glob("*.py")},
        "sklearn": set(),
        "tqdm": {"engine/training_bar.py", "bench/progress_bar.py", "sweeps/progress.py"},
    }
    for name, path in modules().items():
        for line, imported in imports(path):
            home = next((files for top, files in homes.items() if f"{imported}.".startswith(f"{top}.")), None)
            is_home = home is None or str(path.relative_to(PACKAGE)) in home
            assert is_home, f"{name}:{line} imports {imported}, which belongs in {home}"


def test_public_names_are_sorted_and_typed():
    assert torchmpi_py.__all__ == sorted(torchmpi_py.__all__)
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    typed = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(typed) == torchmpi_py.__all__


def test_budgets():
    weight = runpy.run_path(str(PACKAGE.parent / "scripts/dev/weight.py"))["weight"]
    counts = {path: weight(path.read_text()) for path in PACKAGE.rglob("*.py")}
    over = [f"{path}: {count} lines" for path, x in counts.items() if (count := x["lines"] - x["docstrings"]) > 400]
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = node.end_lineno - body[0].lineno + 1 if body else 0
                if length > 40:
                    over.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    assert not over, "over the budget (files 400 lines, functions 40): " + "; ".join(over)
