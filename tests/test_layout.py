"""The shape of the package: wings in one order, without circles, and collectives in one wing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"
EMBEDDED = PACKAGE / "environments" / "embedded"
WINGS = (  # in the order of the flow; a wing imports only wings before it
    "common",
    "config",
    "distributed",
    "data",
    "environments",
    "models",
    "rollout",
    "checkpoints",
    "training",
    "evaluation",
    "report",
    "preflight",
    "run_state",
    "before_grpo",
    "train",
    "run",
    "commands",
    "__main__",
)
WITHOUT_TORCH = ("common", "config", "data", "environments", "report")
TALKING = [PACKAGE / "distributed" / f"{n}.py" for n in ("ranks", "rendezvous", "sharding")]
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all"),
    *("broadcast", "broadcast_object_list", "gather_object", "gather_for_metrics", "new_group"),
    *("monitored_barrier", "reduce_scatter", "scatter_object_list", "wait_for_everyone"),
}


def wing_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MODULES = {module_of(path): path for path in FILES}


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """The wings that a file imports from."""
    names = (name.split(".") for name in imports(TREES[path]))
    return {parts[1] for parts in names if parts[0] == "pipeline" and len(parts) > 1}


def own_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports, or imports names of."""
    names = {name for name in imports(TREES[path]) if name.startswith("pipeline.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & set(MODULES)


def test_every_file_has_its_wing():
    assert {wing_of(path) for path in FILES} == set(WINGS)


def test_a_wing_imports_only_wings_before_it():
    for path in FILES:
        allowed = {*WINGS[: WINGS.index(wing_of(path)) + 1]}
        assert own_imports(path) <= allowed, path


def test_a_wing_has_no_circle_of_imports():
    for wing in WINGS:
        inside = {name for name, path in MODULES.items() if wing_of(path) == wing}
        graph = {name: own_modules(MODULES[name]) & inside - {name} for name in inside}
        TopologicalSorter(graph).prepare()  # which raises CycleError


def test_domains_do_not_import_each_other_and_what_they_share_goes_one_way():
    shared = ("cases",)
    for path in EMBEDDED.glob("*.py"):
        inside = {name for name in own_modules(path) if name.startswith(f"{module_of(EMBEDDED)}.")}
        place = shared.index(path.stem) if path.stem in shared else len(shared)
        assert {name.rpartition(".")[2] for name in inside} <= {*shared[:place]}


def test_the_update_knows_no_environment_and_the_domains_no_settings():
    of_update = ("grpo", "micro_batches", "prefix_tree", "token_logprobs", "updater")
    for name in of_update:
        path = PACKAGE / "training" / f"{name}.py"
        assert not own_imports(path) & {"environments", "data"}
        assert not any(name.startswith("pipeline.models.chat.") for name in own_modules(path))
    for path in EMBEDDED.glob("*.py"):
        assert own_imports(path) <= {"environments", "data"}


def test_reading_the_command_line_or_a_run_folder_loads_no_torch():
    modules = {name for name, path in MODULES.items() if wing_of(path) in WITHOUT_TORCH}
    modules |= {"pipeline.checkpoints.run_folder", "pipeline.report.run_files", "pipeline.run"}
    modules |= {"pipeline.commands.main"}
    code = (
        "import sys, importlib\n"
        f"for name in {sorted(modules)}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_ranks_talk_in_distributed_alone():
    launcher = ("torch.distributed.elastic", "torch.distributed.run")
    for path in {*FILES} - {*TALKING}:
        modules = [name for name in imports(TREES[path]) if name.startswith("torch.distributed")]
        assert all(name.startswith(launcher) for name in modules), path
        attributes = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)]
        assert not {node.attr for node in attributes} & COLLECTIVES, path
        of_torch = [node.value for node in attributes if isinstance(node.value, ast.Attribute)]
        assert "torch.distributed" not in map(ast.unparse, of_torch), path


def test_no_module_is_named_like_one_of_the_standard_library():
    names = {path.stem for path in FILES} - {"__init__", "__main__"}
    assert not names & sys.stdlib_module_names


def test_no_exception_is_swallowed_unseen():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
    assert all(handler.type is not None for handler in handlers)
    silent = [
        ast.unparse(handler)
        for handler in handlers
        if ast.unparse(handler.type) in ("Exception", "BaseException")
        and all(isinstance(statement, ast.Pass) for statement in handler.body)
    ]
    assert silent == []


def test_nothing_is_left_to_do_in_the_code():
    kinds = (
        "pipeline/**/*.py",
        "tests/**/*.py",
        "scripts/**/*.py",
        "scripts/**/*.sh",
        "recipes/*.yaml",
        "accelerate_configs/*",
    )
    files = [path for kind in kinds for path in ROOT.glob(kind) if path.is_file()]
    notes = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    found = {str(path.relative_to(ROOT)) for path in files if notes.search(path.read_text("utf-8"))}
    assert found == set()
