"""Records of episodes are read from transcripts; a damaged file is refused in one line."""

import gzip
import json
from dataclasses import asdict

from pipeline.checkpoints.transcripts import read_transcripts
from pipeline.rollout.trajectory import Trajectory
from tests.support.messages import refusal, says

RECORD = Trajectory(domain="d", task_id="t").record()


def test_each_rank_reads_its_share_and_a_damaged_file_is_refused(tmp_path):
    for rank in range(3):
        path = tmp_path / f"step-000001.rank-{rank}.jsonl.gz"
        with gzip.open(path, "wt") as file:
            file.write(json.dumps(asdict(RECORD)) + "\n")
    assert read_transcripts(tmp_path, 0, 2) == [RECORD] * 2
    assert read_transcripts(tmp_path, 1, 2) == [RECORD]
    whole = path.read_bytes()
    broken = [gzip.compress(text) for text in (b"[]\n", b"{}\n", b'{"domain"')]
    for content in (*broken, whole[:-9]):
        path.write_bytes(content)
        says(
            refusal(read_transcripts, tmp_path, 0, 2),
            "rank-2.jsonl.gz cannot be read as transcripts",
        )
