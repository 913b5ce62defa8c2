"""What can name a model, before any file is read."""

from pipeline.models.model_files import check_name, problem_of_name
from tests.support.messages import refusal, says


def test_a_run_that_is_not_there_is_not_asked_for_at_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem_of_name("runs/TYPO") == ""  # may be a hub id
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("recipe: tiny\n")
    says(refusal(check_name, "runs/TYPO"), "got 'runs/TYPO'", "there is no such run")
    assert problem_of_name("Qwen/Qwen3-4B") == problem_of_name("gpt2") == ""
