"""What befalls a run's folder under it is one line and exit code 1, and nothing is written anew."""

import contextlib
import io
import os
from functools import partial
from pathlib import Path

import pytest

from pipeline.run import main
from pipeline.run_state import open_run
from scripts.proofs.ranks import play_ranks
from tests.support.messages import says

FLAGS = [
    *("--domains", "airline", "--tasks-per-step", "2", "--num-generations", "2", "--report-to"),
    *("none", "--max-turns", "2", "--max-tokens-per-turn", "8", "--eval-tasks-per-domain", "2"),
    *("--eval-trials", "1", "--validation-steps", "0", "--warm-start-steps", "0"),
    *("--max-steps", "2"),
    *("--no-drop-zero-std-groups", "--entropy-coef", "0.05", "--save-steps", "1"),
    *("--tasks-per-domain", "8"),
]


def play(folder: str, harm: str, num_ranks: int) -> tuple[int, str]:
    """Exit code and standard error of a rank of a run that is harmed at its second step."""
    said = io.StringIO()

    def do_harm(trainer, *_):
        if trainer.state.step == 2 and trainer.ranks.is_main:
            if harm == "replaced":
                os.rename(folder, f"{folder}-moved")
                Path(folder).mkdir()
            if harm == "full":
                Path.open = full  # type: ignore[method-assign]
        trainer.ranks.barrier("harmed")

    opened = Path.open

    def full(path, *arguments, **settings):
        at = Path("/dev/full") if path.name == "optimizer.pt" else path
        return opened(at, *arguments, **settings)

    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        flags = [*FLAGS, "--output-dir", folder, "--num-gpus", str(num_ranks)]
        code = main(flags, open_run=partial(open_run, on_batch=do_harm))
    return code, said.getvalue()


@pytest.mark.parametrize(("harm", "num_ranks"), [("replaced", 2), ("full", 1)])
def test_a_run_says_in_one_line_what_the_machine_did_to_its_folder(tmp_path, harm, num_ranks):
    folder = tmp_path / "out"
    results = play_ranks(play, num_ranks, str(folder), harm, num_ranks)
    assert [code for code, _ in results] == [1] * num_ranks, results
    lines = [line for _, said in results for line in said.splitlines()]
    told = [line for line in lines if not line.startswith(("running on", "airline "))]
    if harm == "full":
        (line,) = told
        says(
            line,
            "error: output_dir: ",
            str(folder),
            "full (No space left",
            "free some space",
            "--resume-from-checkpoint latest",
        )
        assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
            *("latest", "step-000000", "step-000001"),
        ]
        return
    (line,) = set(told)  # each rank may be the first
    says(line, f"error: output_dir: {folder} ", "removed or replaced", "start again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-moved"]
    assert not any(folder.iterdir())


def test_a_disk_that_is_full_at_the_start_is_one_line(tmp_path):
    (tmp_path / ".config.yaml.writing").symlink_to("/dev/full")
    ((code, said),) = play_ranks(play, 1, str(tmp_path), "", 1)
    assert code == 1
    (line,) = (line for line in said.splitlines() if not line.startswith("running on"))
    says(line, f"error: output_dir: the disk of {tmp_path} is full", "start again in another")
