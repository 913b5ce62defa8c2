"""The shape of the package: imports go one way, ranks talk in one file, functions stay short."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pipeline"
LAYERS = (  # a module imports from earlier lines only
    "config manifest sentinel",
    "untrusted variables wandb_parts wandb_extras",
    "draws recipe task_rows dataset_files wandb_feed",
    "continual",
    "transfer",
    "tasks run_folder trackers afterwards",
    "cli",
    "trajectory",
    "environments special_text tool_calls response_reader model_files layers",
    "tiny lora probes flops picking prefixes row_cache rotary",
    "policy conversations chat distributed exchange advantages",
    "sampler generate_sampler watchdog",
    "rollout grpo micro_batches curriculum error_shares",
    "balance update_faults",
    "updater",
    "tracking checkpoint evaluate warm_start",
    "prepare wandb_sync reporting stand_in",
    "check",
    "report",
    "session",
    "learner collect dynamic_sampling",
    "validation",
    "step_metrics profiling",
    "launch train doctor",
    "run",
)
LAYER = {name: number for number, line in enumerate(LAYERS) for name in line.split()}
WITHOUT_TORCH = ("config", "recipe", "cli", "tasks", "draws", "run_folder", "environments")
COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all"),
    *("broadcast", "broadcast_object_list", "gather_object", "gather_for_metrics", "new_group"),
    *("monitored_barrier", "reduce_scatter", "scatter_object_list", "wait_for_everyone"),
}


def module_name(path: Path) -> str:
    """`grpo`; the environments are one module, `environments`."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
EACH_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything imported, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    names = (name.split(".") for name in imports(TREES[path]))
    return {parts[1] for parts in names if parts[0] == "pipeline" and len(parts) > 1}


def test_every_module_has_its_place():
    assert {module_name(path) for path in FILES} == set(LAYER)


@EACH_FILE
def test_imports_go_one_way(path):
    name = module_name(path)
    allowed = {other for other in LAYER if LAYER[other] < LAYER[name]}
    if (PACKAGE / name).is_dir():
        allowed.add(name)
    assert own_imports(path) <= allowed


def test_domains_do_not_import_each_other_and_what_they_share_goes_one_way():
    shared = ("deadline", "calls", "base", "experts", "cases", "generation")
    variant_of = {"telecom_chat": {"telecom"}}
    for path in (PACKAGE / "environments").glob("*.py"):
        inside = {name for name in imports(TREES[path]) if name.startswith("pipeline.environments")}
        place = shared.index(path.stem) if path.stem in shared else len(shared)
        allowed = {*shared[:place], *variant_of.get(path.stem, ())}
        assert {name.split(".")[2] for name in inside} <= allowed


def test_the_update_knows_no_environment_and_the_environments_no_model():
    assert not own_imports(PACKAGE / "grpo.py") & {"environments", "rollout", "chat", "tasks"}
    for path in (PACKAGE / "environments").glob("*.py"):
        assert own_imports(path) <= {"environments", "config", "draws", "tasks"}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_settings_tasks_and_environments_import_no_torch(name):
    for path in FILES:
        if module_name(path) == name:
            heavy = {"torch", "accelerate", "trl"}
            assert not {first for first in map(first_part, imports(TREES[path])) if first in heavy}


def first_part(name: str) -> str:
    return name.split(".")[0]


def test_reading_the_command_line_loads_no_torch():
    modules = ", ".join(f"pipeline.{name}" for name in WITHOUT_TORCH)
    domains = "pipeline.embedded.airline, pipeline.embedded.retail"
    code = f"import sys, {modules}, {domains}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@EACH_FILE
def test_ranks_talk_in_distributed_alone(path):
    if path.name == "distributed.py":
        return
    elastic = "torch.distributed.elastic"  # the launcher's own exceptions
    talking = [
        name
        for name in imports(TREES[path])
        if name.startswith("torch.distributed") and not name.startswith(elastic)
    ]
    talking += [
        ast.unparse(node)
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.Attribute)
        and (node.attr in COLLECTIVES or ast.unparse(node.value) == "torch.distributed")
    ]
    assert talking == []


def test_no_module_is_named_like_one_of_the_standard_library():
    names = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert not names & sys.stdlib_module_names


@EACH_FILE
def test_functions_have_at_most_60_lines(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(TREES[path])
        if isinstance(node, functions) and node.end_lineno - node.lineno >= 60
    }
    assert long == {}


@EACH_FILE
def test_no_exception_is_swallowed_unseen(path):
    handlers = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.ExceptHandler)]
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
        "scripts/**/*.[ps]*",
        "recipes/*.yaml",
        "accelerate_configs/*",
    )
    files = [path for kind in kinds for path in ROOT.glob(kind) if path.is_file()]
    notes = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")
    found = {str(path.relative_to(ROOT)) for path in files if notes.search(path.read_text("utf-8"))}
    assert found == set()


def test_files_of_whole_runs_are_tested_first():
    flags = ["--collect-only", "-q", "-p", "no:cacheprovider"]
    files = ["tests/test_layout.py", "tests/scripts/test_survival.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("tests/scripts/test_survival.py::")
