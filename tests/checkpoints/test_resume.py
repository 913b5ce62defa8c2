"""Ranks whose machines do not see the run folder of rank 0 work on copies, and hand files over."""

import gzip
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from accelerate import Accelerator

from pipeline.checkpoints import disks
from pipeline.checkpoints.disks import Disk, open_disk
from pipeline.config.cli import parse
from pipeline.distributed.ranks import Ranks
from pipeline.errors import UserError
from pipeline.rollout.trajectory import Trajectory
from scripts.proofs.ranks import play_ranks

RECORD = asdict(Trajectory(domain="d", task_id="t").record())
LINE = RECORD | {"messages": [{"role": "user"}], "ids": [[1]], "logprobs": [[0.0]]}


def give_and_take(folder, sees, gathers):
    """Fetch a checkpoint and answers, and deliver transcripts and answers, as two machines."""
    rank = Accelerator().process_index
    folder, disks.PIECE, disks.LATE_S = Path(folder), 3, 0.0
    os.environ["LOCAL_RANK"] = "0"
    if not sees:
        disks.os.path.exists = lambda path: rank == 0
    disk = Disk(folder, Ranks(rank, 2, 30), gathers)
    if not sees:
        disk.prepare(is_new=True)
    model = disk.fetch("customers", "missing", "checkpoints/one") / "model"
    fetched = model.read_text(), model.parent == folder / "checkpoints" / "one"
    at = disk.folder / "trajectories" / "s" / f"step-000001.rank-{rank}.jsonl.gz"
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_bytes(gzip.compress(f"{json.dumps(LINE | {'task_id': f't{rank}'})}\n".encode()))
    if rank:
        with (disk.folder / "customers" / "rank-1.jsonl").open("a") as file:
            file.write("new\n")
    new = [path.relative_to(disk.folder).as_posix() for path in disk.deliver(at)]
    assert disk.deliver() == []
    records = [record.task_id for record in disk.read_records("s")]
    disk.drop_copies()
    disk.close()
    if rank and not gathers:
        with pytest.raises(UserError, match=r"run\.rank-1 holds transcripts of an earlier run;"):
            disk.prepare(is_new=True)
    return fetched, new, records


@pytest.mark.parametrize(
    ("sees", "gathers"), [(True, True), (False, True), (False, False)], ids=["one", "two", "stay"]
)
def test_a_machine_without_the_run_folder_gets_copies_and_hands_over_what_it_writes(
    tmp_path, sees, gathers
):
    folder, own = tmp_path / "run", tmp_path / "run.rank-1"
    for name in ("checkpoints/one", "customers"):
        (folder / name).mkdir(parents=True)
    (folder / "checkpoints" / "one" / "model").write_text("weights")
    (folder / "customers" / "rank-1.jsonl").write_text("old\n")
    files = [f"trajectories/s/step-000001.rank-{rank}.jsonl.gz" for rank in range(2)]
    found = play_ranks(give_and_take, 2, str(folder), sees, gathers)
    assert (folder / "customers" / "rank-1.jsonl").read_text() == "old\nnew\n"
    given = [] if sees else [files[1], "customers/rank-1.jsonl"]
    left = [] if gathers and not sees else [files[1]]
    assert found[0] == (("weights", True), [files[0], *given], ["t0"])
    assert found[1] == (("weights", sees), left, ["t1"])
    line = json.loads(gzip.decompress((folder / files[1]).read_bytes()))
    empty = {} if gathers else {"messages": [], "ids": [], "logprobs": [], "customer": []}
    assert line == LINE | {"task_id": "t1"} | empty
    stayed = [path.relative_to(own).as_posix() for path in own.rglob("*") if path.is_file()]
    assert stayed == ([] if gathers else [files[1]])
    assert gathers == (not own.exists())


def test_rank_0_does_not_start_anew_on_another_machine_of_the_run(tmp_path):
    (tmp_path / "run.rank-1").mkdir()
    config = parse(["--output-dir", str(tmp_path / "run"), "--resume-from-checkpoint", "auto"])
    with pytest.raises(UserError) as refused:
        open_disk(config, Ranks(0, 1, 30))
    assert str(refused.value) == (
        f"resume_from_checkpoint: {tmp_path}/run is not here, but run.rank-1, of another rank of "
        "the run; start rank 0 on the machine that has the run folder, or remove it"
    )
    (tmp_path / "run").mkdir()
    config, disk = open_disk(config, Ranks(0, 1, 30))
    assert config.run.output_dir == disk.folder == tmp_path / "run"
