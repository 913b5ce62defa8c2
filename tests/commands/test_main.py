"""The commands of the console: their list, their help and their refusals."""

import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from pipeline.commands.main import COMMANDS, main, run_flags
from pipeline.common.console import STARTED_AS
from pipeline.common.errors import RunError, UserError
from pipeline.config.cli import parse
from pipeline.config.settings import AgentSettings
from pipeline.run import exit_code_of
from tests.support import ROOT


def test_without_arguments_the_commands_are_listed_without_torch(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pipeline.commands.main import main"
    code += "; main([]); sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(re.findall(r"^  (\S+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert lines == {name: each.about for name, each in COMMANDS.items()}


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["fly"], "unknown command 'fly'; the commands are train, evaluate, check, doctor, report"),
        (
            ["--num-gpus", "2"],
            "got '--num-gpus' in place of a command; write python pipeline/run.py --num-gpus 2",
        ),
        (["evaluate", "--seed", "1"], "evaluate: got no MODEL; give a run folder, a checkpoint"),
        (["check", "--bogus"], "unknown flag --bogus; --help lists all"),
    ],
)
def test_a_wrong_command_is_one_line(words, refusal, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {refusal}") and said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("form", ["three-domain-grpo", "python -m pipeline"])
def test_a_command_shows_its_own_name(form, monkeypatch, capsys):
    monkeypatch.setenv(STARTED_AS, form)
    for name in ("evaluate", "doctor", "train", "sweep"):
        with suppress(SystemExit):
            assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: {form} {name} ")


LONG = "x" * 4096


@pytest.mark.parametrize(
    "words",
    [
        ["check", "--environments", "[" * 3000],
        ["check", "--tasks", "{a: " * 3000],
        ["check", "--model", LONG],
        ["check", "--config", LONG],
        ["check", "--config", ""],
        ["check", "--output-dir", LONG],
        ["check", "--resume-from-checkpoint", LONG],
        ["check", "--demonstrations", f"{{airline: {LONG}}}"],
        ["train", "--output-dir", "/proc/nope"],
        ["check", "--output-dir", "/sys/nope"],
        ["check", "--loss-type", "y" * 200_000],
        ["check", f"--{'z' * 200_000}"],
        ["evaluate", LONG],
        ["status", LONG],
        ["status", "/dev/null"],
        ["report", LONG],
        ["watch", LONG],
        ["chat", LONG],
        ["export", LONG, "out"],
        ["rescore", LONG, "--reward-funcs", "a:b"],
        ["export-tau2", LONG, "out"],
        ["convert", LONG, "out"],
        ["convert", "/dev/null", "out"],
        ["make-tiny", LONG, "out"],
        ["sweep", "--recipe", LONG],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_value_of_any_form_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main(words) == 2
    said = capsys.readouterr()
    assert re.fullmatch("error: [^\\n]{20,1200}\\n", said.err), said.err[:2000]


@pytest.mark.parametrize("error", [UserError, RunError])
def test_an_error_of_several_lines_is_told_as_one_that_is_not_long(error, capsys):
    def fails():
        raise error("first\n  second " + "x" * 200_000 + "\nlast")

    assert exit_code_of(fails, []) == error.exit_code
    said = capsys.readouterr().err
    assert said.startswith("error: first second xx") and said.endswith("x last\n")
    assert said.count("\n") == 1 and len(said) < 1200


@pytest.mark.parametrize("words", [["--help"], ["status", "tests/support/small_run"]])
def test_output_that_nothing_reads_is_no_fault_and_a_full_disk_is_one_line(words):
    start = [sys.executable, "-m", "pipeline", *words]
    unread, end = os.pipe()
    os.close(unread)
    done = subprocess.run(start, cwd=ROOT, stdout=end, stderr=subprocess.PIPE, text=True)
    os.close(end)
    assert (done.returncode, done.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(start, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    told = "error: the output cannot be written (No space left on device); make room, then do it "
    assert (done.returncode, done.stderr) == (1, f"{told}again\n")


def test_an_evaluation_takes_the_settings_of_the_run(tmp_path):
    settings = tmp_path / "config.yaml"
    settings.write_text(
        "recipe: mine\ndata: {domains: [retail]}\nrun: {output_dir: x, num_gpus: 8}\n"
        "agent: {url: http://host/v1, model: big, max_calls: 9, temperature: 1}\n"
        "evaluation: {eval_on_start: false}\n"
    )
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    for model in (tmp_path, tmp_path / "checkpoints" / "step-000002"):
        config = parse(run_flags(str(model)))
        assert config.agent == AgentSettings()
    assert (config.recipe, config.data.domains) == ("mine", ["retail"])
    assert (config.run.output_dir, config.run.num_gpus, config.grpo.use_grpo) == (None, None, False)
    assert config.evaluation.eval_on_start
    assert run_flags("org/model") == ["--config", "evaluate_only"]
