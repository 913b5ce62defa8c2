"""A run whose customers are a language model, with a budget that ends it once."""

import gzip
import json

from tests.support import warm
from tests.support.endpoint import serving
from tests.support.tau2_miniature import write

FEW = [
    *("--report-to", "none", "--output-dir", "out", "--max-steps", "2", "--eval-trials", "1"),
    *("--tasks-per-step", "2", "--num-generations", "2", "--max-tokens-per-turn", "8"),
    *("--eval-tasks-per-domain", "2", "--domains", "airline", "--validation-steps", "0"),
]


def test_a_run_out_of_budget_is_resumed_and_pays_nothing_twice(tmp_path):
    asked = "I want to cancel my flight."
    with serving(lambda body: "###STOP###" if len(body["messages"]) > 2 else asked) as server:
        llm = ["--customer-url", server.url, "--customer-model", "m"]
        argv = ["--tau2", str(write(tmp_path / "checkout")), *llm, *FEW]
        argv = ["--config", "tau2_three_smoke", *argv, "--customer-max-calls", "6"]
        spent = warm.play(*argv, cwd=tmp_path, code=2)
        line = "error: customer_max_calls: got 6, which is spent; go on with "
        assert line in spent.stderr and "Traceback" not in spent.stderr
        assert sum(server.paid.values()) <= 6
        resume = ["--output-dir", "out", "--resume-from-checkpoint", "auto"]
        warm.play(*resume, "--customer-max-calls", "null", cwd=tmp_path)
    assert set(server.paid.values()) == {1}
    assert {body["temperature"] for body in server.bodies} == {0.0}
    (about,) = json.loads((tmp_path / "out" / "results.json").read_text())["about"].values()
    assert about["customer"] == "m at temperature 0, with the benchmark's user prompt"
    (path, *_) = (tmp_path / "out" / "trajectories" / "airline").glob("*.gz")
    with gzip.open(path, "rt") as file:
        episodes = [json.loads(line) for line in file]
    assert all(episode["messages"][2]["content"] == asked for episode in episodes)
    assert all(episode["customer"][2]["content"] == asked for episode in episodes)
