"""A run that goes on, is evaluated or is compared must be made of what it was made of."""

import json
from pathlib import Path

from pipeline.data.tasks import HELD_OUT
from pipeline.evaluation.transfer import Runs
from pipeline.models.tiny import CHAT_TEMPLATE, tiny_model
from tests.support.helpers import tokenizer
from tests.support.messages import refusal, says
from tests.support.warm import play

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(20)]
REWARD = """
from pathlib import Path
from my_graders import graded


def correct(completions, answer, **_):
    if Path("out/metrics.jsonl").exists():  # not before the run
        import my_late
    return [graded(a) for a in answer]
"""
GRADERS = "def graded(answer):\n    return float(len(answer))\n"
DOMAIN = """
import os
from pipeline.data.tasks import Task


class Shop:
    def reset(self, **row):
        self.final_message = ""

    def get_reward(self):
        return 0.0


def generate_tasks(seed, n, split, difficulty):
    prompt = ({"role": "user", "content": f"hello from {os.environ['RANK']}"},)
    return [Task(domain="shop", id=f"{split}-{i}", prompt=prompt, payload="{}") for i in range(n)]
"""
SHORT = [
    *("--warm-start-steps", "0", "--tasks-per-step", "2", "--num-generations", "2"),
    *("--max-tokens-per-turn", "4", "--eval-trials", "1", "--save-steps", "1"),
    *("--validation-tasks", "2", "--report-to", "none"),
]
OWN = [
    *("--domains", "sums", "--tasks", "{sums: sums.jsonl}", "--reward-funcs", "my_reward:correct"),
    *(*SHORT, "--eval-tasks-per-domain", "4", "--chat-template", "my_template.jinja"),
]


def write(folder: Path, rows: list[dict[str, str]], graders: str = GRADERS) -> None:
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "my_graders.py").write_text(graders)
    (folder / "my_late.py").write_text("")
    (folder / "my_template.jinja").write_text(CHAT_TEMPLATE)


def changed(number: int, answer: str) -> list[dict[str, str]]:
    """The rows, with another answer in one of them."""
    return [{**row, "answer": answer} if n == number else row for n, row in enumerate(ROWS)]


def test_other_data_or_more_steps_are_refused_when_a_run_goes_on_or_is_evaluated(tmp_path: Path):
    write(tmp_path, ROWS)
    begun = [*OWN, "--output-dir", "out", "--max-steps", "2"]
    play(*begun, cwd=tmp_path, num_ranks=1)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    old = results["made_of"]
    held_out = [int(task) for task in results["task_families"]["sums"]]
    trained = next(number for number in range(20) if number not in held_out)
    evaluation = ["--model", "out/checkpoints/step-000001", *OWN, "--no-grpo"]

    def refused(*argv: str) -> str:
        done = play(*argv, cwd=tmp_path, num_ranks=1, code=2)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in done.stderr and "resuming from" not in done.stdout
        return line

    # A finished run takes no more steps.
    more = [*begun[:-1], "3", "--override", "--resume-from-checkpoint", "latest"]
    line = refused(*more)
    says(
        line,
        "max_steps: stage sums has ended at step 2, and would now end at step 3; ",
        "train on in a new run with --model out",
    )

    begun += ["--resume-from-checkpoint", "step-000001"]
    write(tmp_path, [*ROWS[1:], ROWS[0]])
    line = refused(*begun)
    says(
        line,
        "made_of: step-000001 was made with other training tasks of sums, ",
        "put back what was there, or start a new run; --override goes on all the same",
    )
    write(tmp_path, changed(held_out[0], "7"))
    says(refused(*begun), "was made with other held-out tasks of sums; put back")
    line = refused(*evaluation, "--output-dir", "eval")
    says(line, "made_of: step-000001 was made with other held-out tasks of sums; put back")
    write(tmp_path, changed(trained, "70"))
    says(refused(*begun), "was made with other training tasks of sums; put back")
    play(*evaluation, "--output-dir", "eval", cwd=tmp_path, num_ranks=1)
    write(tmp_path, ROWS, GRADERS.replace("len(answer)", "0"))
    says(refused(*begun), "was made with other module my_graders; put back")
    write(tmp_path, ROWS)
    (tmp_path / "my_late.py").write_text("late = 1")
    says(refused(*begun), "was made with other module my_late; put back")
    says(refused(*evaluation, "--output-dir", "eval-2"), "other module my_late; put back")
    write(tmp_path, ROWS)
    (tmp_path / "my_template.jinja").write_text("Hello." + CHAT_TEMPLATE)
    says(refused(*begun), "was made with other tokenizer and chat template; put back")

    write(tmp_path, ROWS, GRADERS.replace("len(answer)", "0"))
    (tmp_path / "moved").mkdir()
    (tmp_path / "my_template.jinja").rename(tmp_path / "moved" / "my_template.jinja")
    begun[begun.index("my_template.jinja")] = "moved/my_template.jinja"
    done = play(*begun, "--override", cwd=tmp_path, num_ranks=1)
    says(done.stderr, "warning: overridden: step-000001 was made with other module my_graders")
    new = json.loads((tmp_path / "out" / "results.json").read_text())["made_of"]
    assert [name for name in old if old[name] != new[name]] == ["module my_graders"]
    assert "module my_reward" in old


def test_another_base_model_under_adapters_is_refused_and_the_same_may_move(tmp_path: Path):
    elsewhere, tmp_path = tmp_path / "moved", tmp_path / "made"
    base = tmp_path / "base"
    tokenizer().save_pretrained(base)
    tiny_model(tokenizer(), 1).save_pretrained(base)
    begun = [
        *(*SHORT, "--domains", "airline", "--eval-tasks-per-domain", "2", "--max-turns", "1"),
        *("--model", "base", "--use-peft", "--max-steps", "1", "--output-dir", "out"),
        *("--tasks-per-domain", "8"),
    ]
    done = play(*begun, cwd=tmp_path, num_ranks=1)
    says(done.stdout, "no held-out episode called a tool of airline", "--warm-start-steps 40")
    again = [*begun, "--resume-from-checkpoint", "latest"]
    changes = {
        "chat_template.jinja": ("", "Hello. ", "tokenizer and chat template"),
        "tokenizer.json": ('"normalizer": null', '"normalizer": {"type": "NFC"}', "rules of the"),
        "generation_config.json": ('"eos_token_id": 896', '"eos_token_id": [894, 896]', "ends of"),
        "config.json": ('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05', "configuration of the"),
    }
    for name, (before, after, what) in changes.items():
        text = (base / name).read_text()
        assert before in text
        (base / name).write_text(text.replace(before, after, 1))
        done = play(*again, cwd=tmp_path, num_ranks=1, code=2)
        says(done.stderr, f"was made with other {what}")
        (base / name).write_text(text)
    tmp_path.rename(elsewhere)
    play(*again, cwd=elsewhere, num_ranks=1)
    tiny_model(tokenizer(), 2).save_pretrained(elsewhere / "base")
    done = play(*again, cwd=elsewhere, num_ranks=1, code=2)
    says(done.stderr, "was made with other weights of the base model (float32); put back")


def test_tasks_that_differ_by_process_are_refused_on_all_ranks(tmp_path: Path):
    (tmp_path / "shop.py").write_text(DOMAIN)
    flags = ["--domains", "shop", "--environments", "{shop: shop:Shop}", *SHORT]
    done = play(*flags, "--output-dir", "out", cwd=tmp_path, code=2)
    says(
        done.stderr,
        "error: training tasks of shop: rank 1 on ",
        "give all the same files; generate_tasks may depend on its arguments alone",
    )


def test_runs_with_other_code_are_no_seeds_of_one_run():
    run = {"evaluations": [], "success_threshold": 1.0}
    runs = [{**run, "made_of": {"module my_reward": name}} for name in "ab"]
    says(
        refusal(Runs, runs), "report: runs with other versions of the module my_reward are no seeds"
    )
    Runs(runs[:1] * 2), Runs(runs, over_seeds=False)


def test_runs_on_other_tasks_under_equal_ids_are_not_compared():
    success = {"shop": {"tasks": {"a": [1.0], "b": [0.0]}}}
    run = {
        "success_threshold": 1.0,
        "evaluations": [{"after": "start", "success": success}],
        "made_of": {f"{HELD_OUT}shop": "1", "training tasks of shop": "1"},
    }
    other = {**run, "made_of": {f"{HELD_OUT}shop": "1", "training tasks of shop": "2"}}
    Runs([run, other, {**run, "made_of": {}}])
    says(
        refusal(Runs, [run, {**run, "made_of": {f"{HELD_OUT}shop": "2"}}]),
        "runs with other held-out tasks of shop cannot",
    )
