"""The ruler of changes that must leave every run as it is: what it calls different."""

import gzip
import json
import shutil

from scripts.proofs.same import compared
from tests.support import SMALL_RUN


def test_a_file_or_a_metric_that_differs_is_named_and_the_time_in_a_packed_file_is_no_change(
    tmp_path,
):
    a, b = (shutil.copytree(SMALL_RUN, tmp_path / name) for name in "ab")
    packed, missing = sorted(b.glob("trajectories/*/*.gz"))
    said = gzip.decompress(packed.read_bytes())
    packed.write_bytes(gzip.compress(said, mtime=1))
    assert list(compared(a, b)) == []
    packed.write_bytes(gzip.compress(said + b"other"))
    (weights,) = b.glob("checkpoints/*/model.safetensors")
    weights.write_bytes(b"other")
    missing.unlink()
    lines = (b / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    lines[0] = json.dumps(first | {"step": 7, "eval/new": 1.0})
    (b / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = {*compared(a, b)}
    assert found == {
        f"{packed.relative_to(b)}: other content",
        f"{weights.relative_to(b)}: other content",
        f"{missing.relative_to(b)}: only on one side",
        f"metrics.jsonl:1 step: {first['step']} there, 7 here",
        "metrics.jsonl:1 eval/new: None there, 1.0 here",
    }
    (b / "metrics.jsonl").write_text("\n".join(lines[1:]) + "\n")
    assert f"metrics.jsonl: {len(lines)} lines there, {len(lines) - 1} here" in {*compared(a, b)}
