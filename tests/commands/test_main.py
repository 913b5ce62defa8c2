"""The commands of the console: their list, their help and their refusals."""

import re
import subprocess
import sys
from contextlib import suppress

import pytest

from pipeline.commands.main import ANEW, COMMANDS, main, settings_of
from pipeline.config.cli import parse
from pipeline.files.console import STARTED_AS
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


def test_an_evaluation_takes_the_settings_of_the_run(tmp_path):
    settings = tmp_path / "config.yaml"
    settings.write_text(
        "recipe: mine\ndata: {domains: [retail]}\nrun: {output_dir: x, num_gpus: 8}"
    )
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    for model in (tmp_path, tmp_path / "checkpoints" / "step-000002"):
        flags = settings_of(str(model))
        assert flags == ["--config", str(settings), *ANEW.split()]
    config = parse(flags)
    assert (config.recipe, config.data.domains) == ("mine", ["retail"])
    assert (config.run.output_dir, config.run.num_gpus, config.grpo.use_grpo) == (None, None, False)
    assert settings_of("org/model") == ["--config", "evaluate_only"]
