"""The documents are true: links lead somewhere, commands exist, and commands run with few steps.

A file that a page shows begins with its name, as in `# my_env.py`. A command whose comment, or the
comment at the top of its block, names what a test lacks (see LACKING) is parsed and not run.
"""

import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pipeline.commands import sweep
from pipeline.commands.main import COMMANDS, main, run_flags
from pipeline.config.cli import parse
from scripts import settings_page
from tests.support import ROOT
from tests.support.warm import play

README = ROOT / "README.md"
CHINESE = [ROOT / "README.zh.md", *sorted(ROOT.glob("docs/zh/*.md"))]
PROOFS = ROOT / "scripts" / "proofs" / "README.md"
ENGLISH = [page for page in sorted(ROOT.glob("docs/**/*.md")) if page not in CHINESE]
ENGLISH = [README, ROOT / "CONTRIBUTING.md", PROOFS, *ENGLISH]
PAGES = [*ENGLISH, *CHINESE]
LACKING = re.compile(r"\b(GPUs|hub|machines|W&B|checkout|endpoint|GGUF)\b")
# Programs of other projects, whose arguments are not checked and which a test does not run.
OTHERS = ("cd", "git", "pip", "source", "tensorboard", "wandb")
FEW = {  # what makes a run short; a 0 in the command, such as --warm-start-steps 0, stays
    "--max-steps": "3",
    "--warm-start-steps": "2",
    "--warm-start-batch-size": "2",
    "--tasks-per-domain": "4",
    "--tasks-per-step": "3",
    "--num-generations": "2",
    "--eval-tasks-per-domain": "1",
    "--eval-trials": "1",
    "--validation-tasks": "1",
    "--validation-steps": "0",
    "--kl-probe-tasks": "1",
}
SHORT = {"--max-turns": "5", "--max-tokens-per-turn": "12"}  # enough for the embedded domains
FEWER = {"--trials": "1", "--seeds": "1", "--grid": "replay=0"}  # for commands of several runs


class Command(NamedTuple):
    page: Path
    words: list[str]
    runs: bool  # False if a test lacks what the command needs


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [text for language, text in found if language in languages]


def files_of(page: Path) -> dict[str, str]:
    """Return {name: text} of the files that a page shows."""
    heads = [(re.match(r"# (\w+\.\w+)", text), text) for text in blocks(page, "python", "yaml")]
    return {head[1]: text for head, text in heads if head}


def commands_of(page: Path) -> list[Command]:
    found = []
    for block in blocks(page, "bash"):
        lines = block.replace("\\\n", " ").splitlines()
        of_block = lines[0] if lines[0].startswith("#") else ""
        for line in lines:
            if words := shlex.split(line, comments=True):
                comment = f"{of_block} {line.partition(' #')[2]}"
                found.append(Command(page, words, not LACKING.search(comment)))
    return found


# test_chinese.py compares the commands of the Chinese pages with those of the English ones.
ALL = [command for page in ENGLISH for command in commands_of(page)]


def plain(words: list[str]) -> list[str]:
    """Return a command without variables, and with `three-domain-grpo` for all its forms."""
    while re.match(r"[A-Z_]+=", words[0]):
        assert words[0].partition("=")[0] in settings_page.page(), words
        words = words[1:]
    if words[:3] == ["python", "-m", "pipeline"]:
        return ["three-domain-grpo", *words[3:]]
    for entry in ("scripts/run_ddp.sh", "scripts/slurm.sbatch", "pipeline/run.py"):
        if entry in words:
            place = words.index(entry)
            assert all((ROOT / w).is_file() for w in words[:place] if w.endswith(".yaml")), words
            return ["three-domain-grpo", "train", *words[place + 1 :]]
    return words


def flags_of_run(words: list[str]) -> list[str] | None:
    """Return the flags of a run that a command starts, or None."""
    if words[0] != "three-domain-grpo" or words[1] not in ("train", "check", "doctor", "evaluate"):
        return None
    if words[1] == "evaluate":
        return [*run_flags(words[2]), "--model", *words[2:]]
    return [*COMMANDS[words[1]].flags, *words[2:]]


def help_of(name: str) -> str:
    with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
        main([name, "--help"])
    return said.getvalue()


def check(command: Command, cwd: Path) -> None:
    """Fail if a command names a file, a flag or a command that does not exist."""
    words = plain(command.words)
    for name, text in files_of(command.page).items():
        (cwd / name).write_text(text, encoding="utf-8")
    if (flags := flags_of_run(words)) is not None:
        with suppress(SystemExit):  # --help
            parse(flags)
        return
    place = words.index("--") if "--" in words else len(words)
    parse(words[place + 1 :])
    flags = [word for word in words[1:place] if word.startswith("--")]
    if words[0] == "three-domain-grpo" and words[1] != "--help":
        assert words[1] in COMMANDS
        known = help_of(words[1])
        assert all(re.search(rf"{flag}\b", known) for flag in flags), (flags, known)
    elif words[0] in ("python", "bash"):
        file = next(path for path in (ROOT / words[1], cwd / words[1]) if path.is_file())
        code = "".join(path.read_text(encoding="utf-8") for path in file.parent.glob("*.py"))
        assert all(f'"{flag}"' in code for flag in flags), flags
    elif words[0] == "torchrun":
        assert (ROOT / words[-1]).is_file(), words
    else:
        assert words[0] in (*OTHERS, "kill", "three-domain-grpo"), words


class Page:
    """Runs the commands of a page one after the other, in one folder."""

    def __init__(self, cwd: Path) -> None:
        self.cwd, self.count = cwd, 0
        self.services: list[subprocess.Popen[bytes]] = []

    def run(self, words: list[str]) -> None:
        words = [word.replace("runs/NAME", str(self._newest())) for word in plain(words)]
        if words[-1] == "--help":
            with suppress(SystemExit):
                assert main(words[1:]) == 0
        elif (flags := flags_of_run(words)) is not None:
            self._train(flags)
        elif words[0] == "three-domain-grpo" and {"watch", "--web"} & {*words}:
            self._serve(["-m", "pipeline", *words[1:]])
            self.close()
        elif words[0] == "three-domain-grpo":
            argv = words[1:]
            assert main(shortened(argv) if argv[0] == "sweep" else argv) == 0, words
        elif words[0] == "python":
            self._script(words)
        elif words[0] == "torchrun":
            started = [sys.executable, "-m", "torch.distributed.run", *words[1:-1]]
            assert subprocess.run([*started, ROOT / words[-1]]).returncode == 0, words
        elif words[0] == "kill":
            self.close()

    def close(self) -> None:
        for service in self.services:
            service.kill()
            service.wait()
        self.services = []

    def _newest(self) -> Path | str:
        checkpoints = self.cwd.glob("runs/*/checkpoints/*")
        newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
        return newest.parents[1] if newest else "runs/NAME"

    def _train(self, flags: list[str]) -> None:
        few = few_steps(dict(pairwise([*flags, ""])))
        if "--check" in flags:
            assert main(["train", *flags, *few]) == 0, flags
            return
        num_ranks = 1 if self.count else 2  # two ranks for the first run; one rank takes less time
        self.count += 1
        has_folder = {"--doctor", "--output-dir"} & {*flags}
        folder = [] if has_folder else ["--output-dir", f"runs/run-{self.count}"]
        few = [] if "--resume-from-checkpoint" in flags else few
        play(*flags, *few, *folder, cwd=self.cwd, num_ranks=num_ranks)

    def _script(self, words: list[str]) -> None:
        path = ROOT / words[1] if (ROOT / words[1]).is_file() else self.cwd / words[1]
        argv = [word for word in words[2:] if word != "&"]
        if path.name == "optuna_study.py":
            argv = [*shortened(argv), "--validation-steps", "2"]
        if words[-1] == "&":
            self._serve([str(path), *argv])
        else:
            assert self._started([str(path), *argv]).wait() == 0, words

    def _started(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(self.cwd)))}
        return subprocess.Popen([sys.executable, *arguments], cwd=self.cwd, env=environment)

    def _serve(self, arguments: list[str]) -> None:
        """Start a program, and wait until it listens."""
        started = self._started(arguments)
        self.services.append(started)
        while not psutil.Process(started.pid).net_connections():
            assert started.poll() is None, arguments
            time.sleep(0.1)


def shortened(words: list[str]) -> list[str]:
    """Return the arguments of a command of several runs for fewer and shorter runs."""
    argv: list[str] = []
    for word in words:
        if argv and argv[-1] in FEWER:
            argv.append(FEWER[argv[-1]])
        elif word.startswith("--") or len(argv) < 2 or argv[-2] not in FEWER:
            argv.append(word)
    return [*argv, *([] if "--" in argv else ["--"]), *few_steps({})]


def few_steps(given: Mapping[str, str]) -> list[str]:
    """Return flags that make a run with the flags `given` short."""
    flags = {k: v for k, v in FEW.items() if given.get(k) != "0"}
    flags |= {} if {"--environments", "--reward-funcs", "--config"} & given.keys() else SHORT
    flags |= {} if "--report-to" in given else {"--report-to": "none"}
    flags |= {"--validation-steps": "1"} if "--keep-best" in given else {}
    return [word for pair in flags.items() for word in pair]


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def targets(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))
    return [target for target in found if not re.match(r"https?:|mailto:", target)]


def headings(page: Path) -> list[tuple[int, str]]:
    """Return level and anchor, as GitHub makes it, of each heading of a page."""
    found = re.findall(r"^(#+) +(.*?) *$", without_blocks(page), re.M)
    kept = ((len(marks), re.sub(r"[^\w\- ]", "", text.lower())) for marks, text in found)
    return [(level, text.replace(" ", "-")) for level, text in kept]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in targets(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not anchor or anchor in {name for _, name in headings(path)}, target
    assert "@@" not in page.read_text(encoding="utf-8")  # a mark for what is to be filled in


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in targets(index)}
    assert {*ROOT.glob("docs/**/*.md")} - {index} <= named


def test_the_page_of_settings_is_current() -> None:
    remedy = "run python scripts/settings_page.py --write"
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), remedy


@pytest.mark.parametrize("command", ALL, ids=lambda c: f"{name_of(c.page)}: {' '.join(c.words)}")
def test_a_command_names_files_and_flags_that_exist(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(command, tmp_path)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page == README else pytest.mark.proof)
        for page in ENGLISH
        if page == README or (page.is_relative_to(ROOT / "docs") and commands_of(page))
    ],
    ids=name_of,
)
def test_the_commands_of_a_page_run_with_few_steps(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    monkeypatch.setattr("pipeline.report.plots.pictures.OF_RUN", {})
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))  # for a chat; then the input ends
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    runner = Page(tmp_path)
    try:
        for command in commands_of(page):
            if command.runs:
                runner.run(command.words)
    finally:
        runner.close()
