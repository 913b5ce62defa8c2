"""A domain that pip has installed needs its name alone, wherever a run needs a domain."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.commands.main import main
from tests.support import ROOT
from tests.support.messages import says
from tests.support.warm import play

SHORT = [
    *("--domains", "cloakroom", "--output-dir", "out", "--report-to", "none", "--max-steps", "2"),
    *("--warm-start-steps", "3", "--warm-start-batch-size", "4", "--tasks-per-domain", "6"),
    *("--tasks-per-step", "2", "--num-generations", "2", "--eval-tasks-per-domain", "2"),
    *("--eval-trials", "1", "--validation-steps", "0", "--save-steps", "1"),
    *("--max-turns", "5", "--max-tokens-per-turn", "16"),
]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of libraries with the example package; ranks find it as their working folder."""
    shutil.copytree(ROOT / "examples" / "domain_package", tmp_path / "source")  # pip writes there
    folder = tmp_path / "site-packages"
    pip = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--target", str(folder), str(tmp_path / "source")),
    ]
    subprocess.run(pip, check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("pipeline.report.plots.pictures.OF_RUN", {})
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("cloakroom", None)


def test_an_installed_domain_is_trained_resumed_evaluated_and_played(site: Path, capsys):
    play(*SHORT, cwd=site, num_ranks=1)
    config = yaml.safe_load(Path("out/config.yaml").read_text())
    assert config["data"]["environments"] == {"cloakroom": "cloakroom:CloakroomEnvironment"}
    results = yaml.safe_load(Path("out/results.json").read_text())
    assert list(results["evaluations"][-1]["success"]) == ["cloakroom"]
    assert [name for name in results["made_of"] if "module" in name] == ["module cloakroom"]

    again = [*SHORT, "--resume-from-checkpoint", "step-000001"]
    play(*again, cwd=site, num_ranks=1)
    done = play("--model", "out", "--no-grpo", *SHORT[:2], *SHORT[4:], cwd=site, num_ranks=1)
    model = "out/checkpoints/stage-1-cloakroom"
    says(done.stdout, f"model: {model}, the latest checkpoint of its run\n")
    assert main(["report", "out"]) == 0
    domain = "Own domains: cloakroom (environment `cloakroom:CloakroomEnvironment`)"
    assert domain in Path("out/report.md").read_text()
    assert main(["chat", "out"]) == 0
    says(capsys.readouterr().out, "cloakroom, of cloakroom", "get_ticket")

    module = site / "cloakroom.py"
    module.write_text(module.read_text() + "\n")
    refused = play(*again, cwd=site, num_ranks=1, code=2)
    says(refused.stderr, "error: made_of: step-000001 was made with other module cloakroom; put")
