"""The benchmark of slow customers in small: the same draws, whatever the clock says."""

import json

from tests.support import ROOT


def test_slow_customers_leave_the_draws_as_they_are(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "bench")
    import inflight

    monkeypatch.setattr(inflight, "MOST_RATIO", float("inf"))
    path = tmp_path / "figures.json"
    small = ["--customers", "6", "--turns", "2", "--median", "0.01", "--json", str(path)]
    assert inflight.main(small) == 0
    figures = json.loads(path.read_text())["figures"]
    assert figures["6/turned"] == 0
    assert figures["6/wall_s"] >= figures["6/longest_s"] > 0
