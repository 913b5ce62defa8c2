"""The start of a run on several ranks: all of them must see the run folder of rank 0."""

from pathlib import Path

from accelerate import Accelerator

from pipeline.checkpoints.resume import refuse_other_disks
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from scripts.proofs.ranks import play_ranks


def look(folders):
    """Return the refusal on a rank that looks for the run folder in its own place."""
    ranks = Ranks(Accelerator().process_index, 2, 30)
    try:
        refuse_other_disks(Path(folders[ranks.rank]), ranks)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_without_the_run_folder_are_refused_on_every_rank(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / ".lock").touch()  # `other` is of an earlier run
    assert play_ranks(look, 2, [str(one), str(one)]) == ["", ""]
    for elsewhere in (other, tmp_path / "missing"):
        first, second = play_ranks(look, 2, [str(one), str(elsewhere)])
        assert first == second.replace(str(elsewhere), str(one))
        assert f" cannot see {one} of rank 0 on " in first
        assert first.endswith("; give one on a disk that all machines share, as an absolute path")
