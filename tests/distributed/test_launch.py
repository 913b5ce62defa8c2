"""Launching: however ranks are started, N of them know each other, or one line says why not.

The real processes run the real `pipeline/run.py`; in place of the training, a `sitecustomize` on
their path puts a short one that connects the ranks through Accelerate and says what they found.
Each way to launch is tried once with everything cold; elsewhere the launcher forks from a process
that has imported torch, and ranks that need not meet import nothing heavy.
"""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from pipeline import run
from pipeline.distributed import launch, main_memory
from pipeline.distributed.launch import RankLayout, layout_of_ranks
from scripts.proofs.ranks import free_port
from tests.support import ROOT
from tests.support.launcher import RUN, WarmLauncher
from tests.support.messages import refusal, says

pytestmark = pytest.mark.whole_run

CONFIGS = ROOT / "accelerate_configs"
GIB = 1 << 30

SHORT_TRAINING = """
import os, sys, time, types

def main(config):
    from pipeline.common.errors import UserError
    do = config.tracking.run_name
    rank = connected(config) if do in (None, "fault") else int(os.environ["RANK"])
    if do == "mistake":
        raise UserError("tasks: got none; give some")
    if rank == 1 and do == "fault":
        raise RuntimeError("the second rank broke")
    if rank == 1 and do == "killed":
        os.kill(os.getpid(), 9)
    if do == "fault":
        accelerator.wait_for_everyone()
    if do == "sleep":
        print(f"rank {rank} sleeps", flush=True)
    if do in ("sleep", "killed"):
        time.sleep(600)
    return 0

def connected(config):
    global accelerator
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator()
    rank = accelerator.process_index
    total = int(accelerator.reduce(torch.tensor([2.0**rank])))
    facts = f"rank {rank} of {accelerator.num_processes}: sum {total}, "
    facts += f"{accelerator.device.type}, {torch.get_num_threads()} threads\\n"
    print(facts, end="", flush=True)
    return rank

sys.modules["pipeline.train"] = train = types.ModuleType("pipeline.train")
train.main = main
"""


def facts(num_ranks: int, threads: int = 1) -> list[str]:
    total = 2**num_ranks - 1
    return [
        f"rank {rank} of {num_ranks}: sum {total}, cpu, {threads} threads"
        for rank in range(num_ranks)
    ]


def lines(text: str, start: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith(start))


@pytest.fixture
def environment(tmp_path, monkeypatch, no_stray_processes):
    """For real processes: the short training, no GPU, no configuration of Accelerate, own /tmp."""
    monkeypatch.chdir(tmp_path)
    for folder in ("site", "home", "tmp"):
        (tmp_path / folder).mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SHORT_TRAINING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def start(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def start_warm(*flags: str) -> WarmLauncher:
    launcher = WarmLauncher([sys.executable, RUN, *flags])
    launcher.wait()
    return launcher


# The world, from `--num-gpus` and the environment


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many GPUs are visible, and what a launcher says in the environment."""
    for name in list(os.environ):
        if name in launched(0, 1, 1) or name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "main_memory", lambda: (24 * GIB, 24 * GIB))

    def see(visible: int, **variables: str) -> None:
        monkeypatch.setattr(launch, "visible_gpus", lambda: visible)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return see


def launched(rank: int, num_ranks: int, local: int) -> dict[str, str]:
    """What torchrun and Accelerate tell a rank, on machines with `local` ranks each."""
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank % local}
    names |= {"LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500}
    return {name: str(value) for name, value in names.items()}


def machine(number: int, address: str = "10.0.0.1", port: int = 29500) -> dict[str, str]:
    """What tells a machine of two which it is, as torchrun reads it from the environment."""
    names = {"NNODES": 2, "NODE_RANK": number, "MASTER_ADDR": address, "MASTER_PORT": port}
    return {f"PET_{name}": str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ("num_gpus", "visible", "variables", "expected"),
    [
        (None, 0, {}, (1, 0, "cpu", 1)),
        (None, 4, {}, (1, 0, "cuda", 1)),
        (2, 0, {}, (2, 0, "cpu", 1)),
        (2, 4, {}, (2, 0, "cuda", 1)),
        (8, 4, {"ACCELERATE_USE_CPU": "true"}, (8, 0, "cpu", 1)),
        (None, 0, launched(1, 2, 2), (2, 1, "cpu", 2)),
        (2, 2, launched(1, 2, 2), (2, 1, "cuda", 2)),
        (16, 8, launched(9, 16, 8), (16, 9, "cuda", 16)),
        (2, 0, launched(0, 1, 1), (2, 0, "cpu", 1)),
        (16, 8, machine(1), (16, 0, "cuda", 1, 2)),
        (16, 8, machine(1) | launched(9, 16, 8), (16, 9, "cuda", 16)),
    ],
)
def test_the_world_is_what_was_asked_for_and_launched(gpus, num_gpus, visible, variables, expected):
    gpus(visible, **variables)
    assert layout_of_ranks(num_gpus) == RankLayout(*expected)


NO_ROOM = ("use: python pipeline/run.py --num-gpus", "ACCELERATE_USE_CPU=true")


@pytest.mark.parametrize(
    ("num_gpus", "visible", "variables", "words"),
    [
        (
            4,
            0,
            launched(0, 2, 2),
            ("--num-gpus: got 4, but 2 ranks", "give --num-gpus 2", "pipeline/run.py --num-gpus 4"),
        ),
        (8, 2, {}, ("--num-gpus: got 8 ranks", "2 GPUs are visible", "--num-gpus 2", *NO_ROOM)),
        (
            None,
            1,
            launched(0, 16, 8),
            ("--num-gpus: got 8 ranks", "1 GPU is visible", "--num-gpus 1", *NO_ROOM),
        ),
        (
            2,
            0,
            {"WORLD_SIZE": "2", "RANK": "0"},
            (
                "WORLD_SIZE is 2 without LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
                "start the ranks with: python pipeline/run.py --num-gpus 2",
            ),
        ),
        (None, 0, {"WORLD_SIZE": "two"}, ("WORLD_SIZE: got 'two'", "unset it")),
        (3, 8, machine(1), ("--num-gpus: got 3", "PET_NNODES is 2", "a multiple of 2")),
        (16, 4, machine(1), ("--num-gpus: got 8 ranks for this node, but 4 GPUs",)),
        (16, 8, machine(1) | {"PET_MASTER_ADDR": ""}, ("PET_MASTER_ADDR: got none", "is 2")),
    ],
)
def test_a_world_that_cannot_be_is_refused_in_one_line(gpus, num_gpus, visible, variables, words):
    gpus(visible, **variables)
    says(refusal(layout_of_ranks, num_gpus), *words)


@pytest.mark.parametrize(
    ("num_gpus", "variables", "most"),
    [
        (64, {}, 30),
        (31, {}, 30),
        (128, machine(1), 30),
        (None, launched(3, 64, 64), 40),  # they already run, so what is free is less than they have
        (None, launched(3, 128, 64), 40),
    ],
)
def test_ranks_that_main_memory_cannot_hold_are_refused(
    gpus, monkeypatch, num_gpus, variables, most
):
    monkeypatch.setattr(launch, "main_memory", lambda: (24 * GIB, 18 * GIB))
    gpus(0, **variables)
    says(
        refusal(layout_of_ranks, num_gpus), "--num-gpus: got ", "on CPU", f"give --num-gpus {most}"
    )


@pytest.mark.parametrize("num_gpus", [2, 3, 4, 8, 30])
def test_ranks_that_main_memory_can_hold_are_not(gpus, monkeypatch, num_gpus):
    monkeypatch.setattr(launch, "main_memory", lambda: (24 * GIB, 18 * GIB))
    gpus(0)
    assert layout_of_ranks(num_gpus).num_ranks == num_gpus


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": 8, "memory.current": 3, "memory.stat": 1}, (8, 7)),
        ("0::/job/step\n", {"job/memory.max": 4, "job/memory.current": 1}, (4, 3)),
        (
            "4:memory:/docker/x\n0::/\n",  # seen from inside, it is the outermost
            {"memory/memory.limit_in_bytes": 2, "memory/memory.usage_in_bytes": 1},
            (2, 1),
        ),
        ("0::/\n", {"memory.max": 8}, (8, 8)),  # how much is taken cannot be read
        ("0::/\n", {}, (24, 18)),
        ("", {}, (24, 18)),
    ],
)
def test_main_memory_is_what_control_groups_allow(tmp_path, monkeypatch, groups, files, expected):
    for name, gib in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{gib * GIB}\n")
        if path.name.startswith(("memory.current", "memory.usage")):
            path.with_name("memory.stat").touch()
    if "memory.stat" in files:
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n")
    monkeypatch.setattr(main_memory, "CGROUPS", tmp_path)
    here = types.SimpleNamespace(total=24 * GIB, available=18 * GIB)
    monkeypatch.setattr(main_memory.psutil, "virtual_memory", lambda: here)
    total, free = main_memory.main_memory(groups)
    assert (total / GIB, free / GIB) == expected


# The command line in this process


@pytest.fixture
def replaced(monkeypatch, gpus):
    """Puts functions in place of the training and the check."""
    gpus(0)

    def replace(name: str, main) -> None:
        module = types.ModuleType(f"pipeline.{name}")
        module.main = main
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return replace


def test_a_check_needs_no_ranks_and_is_made_once(replaced, monkeypatch):
    checked = []
    replaced("preflight.check", lambda config, **_: checked.append(config.run.num_gpus) or 0)
    assert run.main(["--check", "--num-gpus", "64"]) == 0
    monkeypatch.setenv("RANK", "1")
    assert run.main(["--check", "--num-gpus", "64"]) == 0
    assert checked == [64]


def test_an_interrupted_run_says_so_without_a_traceback(replaced, monkeypatch, capsys):
    def interrupted(config):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    replaced("train", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert run.main([]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "running on CPU: 1 rank\ninterrupted\n"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--num-gpu", "2"], 2, "error: unknown flag --num-gpu; did you mean --num-gpus?"),
        (["--help"], 0, "--num-gpus"),
    ],
)
def test_help_and_mistakes_are_told_before_anything_heavy_is_imported(
    environment, flags, code, said
):
    done = start(sys.executable, "-X", "importtime", RUN, *flags)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert not re.search(r"\| +(torch|transformers|accelerate|numpy)\b", done.stderr)


# Ranks that the run starts itself


def test_one_process_starts_the_ranks_and_imports_no_model_code(environment, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = start(sys.executable, "-X", "importtime", RUN, "--num-gpus", "2")
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\| +(transformers|peft|datasets|trl)\b", done.stderr)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == facts(2, threads)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert said == ["running on CPU: 2 ranks, over gloo"]
    assert not list(Path("tmp").iterdir()), "the launcher leaves files behind"


def test_a_mistake_that_all_ranks_see_is_told_once(environment):
    done = start_warm("--num-gpus", "2", "--run-name", "mistake")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == ["error: tasks: got none; give some"]


def test_the_fault_of_one_rank_ends_the_run_with_its_traceback_alone(environment):
    done = start_warm("--num-gpus", "2", "--run-name", "fault")
    assert done.returncode == 1
    assert lines(done.stderr, "rank") == ["rank 1 failed:"]
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("RuntimeError: the second rank broke\n")


def test_a_killed_rank_is_named(environment):
    done = start_warm("--num-gpus", "2", "--run-name", "killed")
    assert done.returncode == 1
    running = lines(done.stderr, "running on CPU")  # rank 0 may be ended before it says so
    told = [line for line in done.stderr.splitlines() if line not in running]
    assert told == ["rank 1 was ended by SIGKILL (out of memory?)"]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_ranks_too(environment, stop):
    command = [sys.executable, RUN, "--num-gpus", "2", "--run-name", "sleep"]
    launcher = WarmLauncher(command, ignored=[signal.SIGHUP], default=[stop])  # as under nohup
    assert launcher.process.pid is not None
    while not Path("stdout").is_file() or Path("stdout").read_text().count("sleeps") < 2:
        assert launcher.process.is_alive()
        time.sleep(0.05)
    os.kill(launcher.process.pid, signal.SIGHUP)
    launcher.process.join(0.5)
    assert launcher.process.is_alive()
    os.kill(launcher.process.pid, stop)
    launcher.wait()
    assert launcher.returncode == 1
    said = {signal.SIGTERM: "interrupted; what was saved before stands"}
    assert launcher.stderr.splitlines()[1:] == [said.get(stop, "interrupted")]


def start_machine(number: int, port: int, *flags: str) -> WarmLauncher:
    Path(f"machine-{number}").mkdir()
    with contextlib.chdir(f"machine-{number}"):
        told = {**os.environ, **machine(number, "127.0.0.1", port)}
        return WarmLauncher([sys.executable, RUN, "--num-gpus", "2", *flags], told)


def test_each_of_several_machines_starts_its_ranks(environment):
    port = free_port()
    launchers = [start_machine(number, port) for number in range(2)]
    for number, launcher in enumerate(launchers):
        with contextlib.chdir(f"machine-{number}"):
            launcher.wait()
        assert launcher.returncode == 0, launcher.stderr
        (fact,) = lines(launcher.stdout, "rank")
        assert re.fullmatch(rf"rank {number} of 2: sum 3, cpu, \d+ threads", fact)


def test_a_machine_that_never_comes_is_one_line(environment):
    port = free_port()
    launcher = start_machine(0, port, "--timeout", "1", "--call-timeout", "0.5")
    with contextlib.chdir("machine-0"):
        launcher.wait()
    assert launcher.returncode == 1
    (line,) = launcher.stderr.splitlines()
    met = f"node 0 on {platform.node()} did not meet all nodes at 127.0.0.1:{port} ("
    says(line, f"error: connection: {met}", "1/2 clients joined", "same PET_MASTER_ADDR")


# Ranks that others start


@pytest.mark.parametrize(
    ("name", "num_processes", "port"),
    [("single", 1, None), ("multi_gpu", 8, 0), ("multi_node", 16, 29500)],
)
def test_every_shipped_configuration_is_one_that_accelerate_reads(name, num_processes, port):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.num_processes == num_processes
    assert config.main_process_port == port
    assert config.num_machines == (2 if name == "multi_node" else 1)
    assert config.mixed_precision == "no"
    assert len(list(CONFIGS.iterdir())) == 3


# scripts/run_ddp.sh, on a Python that only notes what it is asked for

NOTING_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) exit 0 ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
echo "$@" >>calls
echo "$PIPELINE_STARTED_AS" >started
[ ! -e code ] || exit "$(cat code)"
"""


def test_run_ddp_installs_when_needed_and_passes_flags_and_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkout = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(NOTING_PYTHON)
    python.chmod(0o755)
    no_gpu = tmp_path / "nvidia-smi"
    no_gpu.write_text("#!/bin/sh\nexit 9\n")
    no_gpu.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    settings = {"PATH": path, "PYTHON": str(python), "NUM_GPUS": "2"}

    said: list[str] = []

    def run_ddp(*flags: str, **variables: str) -> list[str]:
        """What was asked of Python, each call by its first words."""
        calls.write_text("")
        script = ["bash", str(checkout / "scripts" / "run_ddp.sh"), *flags]
        done = subprocess.run(script, env=settings | variables, capture_output=True, check=True)
        said[:] = done.stderr.decode().splitlines()
        return calls.read_text().replace(str(checkout), "ROOT").splitlines()

    entry = "ROOT/pipeline/run.py --num-gpus 2"
    making, _, installing, running = run_ddp("--beta", "0.1", MODEL="a/b", GROUP_SIZE="4")
    assert making == "-m venv ROOT/.venv"
    assert re.match(r"-m pip install .*-c ROOT/constraints.txt -e ROOT$", installing)
    assert running == f"{entry} --model a/b --group-size 4 --beta 0.1"
    console = str(checkout / ".venv" / "bin" / "three-domain-grpo")
    assert Path("started").read_text() == f"{console.replace(' ', chr(92) + ' ')}\n"
    hint = "run_ddp.sh: no GPU: TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu gives torch "
    assert said.count(f"{hint}without CUDA") == 1
    assert run_ddp() == [entry]
    assert not [line for line in said if "no GPU" in line]

    (checkout / "constraints.txt").write_text("torch==2.12.0\n")
    assert run_ddp() == [installing, entry]

    index = {"TORCH_INDEX_URL": "https://index"}  # torch alone comes from there, and only once
    torch, *rest = run_ddp(**index)
    assert torch.startswith("-m pip install ") and "--no-deps" in torch
    assert torch.endswith("--index-url https://index torch==2.12.0")
    assert rest == [installing, entry]
    assert run_ddp(**index) == run_ddp() == [entry]

    Path("code").write_text("2")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_ddp()
    assert failed.value.returncode == 2
