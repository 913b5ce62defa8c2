"""A policy that falls to one action is named once, with what to change; others are not."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.tasks import Task
from pipeline.distributed.ranks import Ranks
from pipeline.environments.tools import tool_schemas
from pipeline.evaluation.one_action import Decisions, decision_of
from pipeline.run import main
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from tests.support.helpers import call, make_task, say
from tests.support.messages import says

ALONE = Ranks(0, 1, 5)
STAGE = Stage(index=0, name="desk", own=("desk",), difficulty="easy", groups={"desk": 4})
METRICS = {"train/entropy": 0.02, "rollout/frac_reward_zero_std/desk": 0.75}
ACTIONS = ("refund", "refuse")


class Returns:
    def get_order(self, order: str) -> str:
        """Look up an order.

        Args:
            order: Number of the order.
        """
        return "late"

    def refund(self, order: str) -> str:
        """Pay back.

        Args:
            order: Number of the order.
        """
        return "ok"

    def refuse(self, order: str, reason: str) -> str:
        """Refuse.

        Args:
            order: Number of the order.
            reason: Why. (choices: ["late", "worn"])
        """
        return "ok"


CONFIG = Config.model_validate({"grpo": {"learning_rate": 3e-4}})


def episode(decision, branch, number=0, solved=None, **fields):
    asked = {"role": "user", "content": f"order R{number}"}
    done = [call(decision, order=f"R{number}")] if decision else []
    reward = float(decision == branch if solved is None else solved)
    messages = [asked, *done, say("Done.")]
    named = {"messages": messages, "branch": branch, "reward": reward, "task_id": f"t{number}"}
    return make_trajectory(**{"family": "return", **named, **fields})


def of_step(*decisions, branches=ACTIONS, solved=None, **fields):
    """Eight episodes of four tasks; two decisions for each task of a branch, in turn."""
    return [
        episode(decisions[(2 * n + trial) % len(decisions)], branches[n % len(branches)], n, solved)
        for n in range(4)
        for trial in range(2)
    ]


SPREAD, ALIKE = of_step("refund", "refuse"), of_step("refund")


def named(trajectories):
    """The same, with trial 0 once for each task."""
    seen = set()
    for t in trajectories:
        t.trial = int(t.task_id in seen)
        seen.add(t.task_id)
    return trajectories


def told(*steps, ranks=ALONE):
    """The lines after each step, with a resume before each."""
    decisions, lines = Decisions(), []
    for step, episodes in enumerate(steps, 1):
        again = Decisions()
        again.load_state_dict(json.loads(json.dumps(decisions.state_dict())))
        decisions = again
        mine = named(episodes)[4 * ranks.rank : 4 * ranks.rank + 4 if ranks.num_ranks > 1 else None]
        decisions.add(STAGE, step, mine, {"desk": Returns}, 1.0, ranks)
        lines.append([*decisions.messages({**METRICS, "train/entropy": 1 / step}, CONFIG)])
    return lines, decisions.state_dict()


def test_a_policy_that_falls_to_one_action_is_named_within_five_steps_and_once():
    lines, state = told(*[SPREAD] * 3, *[ALIKE] * 9)
    (first,) = [number for number, of in enumerate(lines, 1) if of]
    assert first - 3 <= 5
    (line,) = lines[first - 1]
    says(
        line,
        "desk, return tasks",
        "since step 4 the policy acts alike, but its tasks have 2 branches: refund(...) in 100 %",
    )
    says(
        line, "(50 % at first), and 50 % succeed", "entropy 1 -> 0.17, 75 % of the domain's groups"
    )
    says(line, "lower learning_rate (0.0003)", "rule_share 0.3", "entropy_coef (0.005)", "beta (0)")
    assert state["decisions"]["said"] == ["desk"]


def test_a_policy_that_acts_alike_from_the_start_is_told_to_spread():
    lines, _ = told(*[ALIKE] * 9)
    assert [bool(of) for of in lines] == [False, False, True, *[False] * 6]
    says(lines[2][0], "desk, return tasks: since step 1 the policy acts alike", "100 % at first")
    says(lines[2][0], "give demonstrations of the other actions", "or raise temperature (1)")
    assert "learning_rate" not in lines[2][0]


def entropies(*values, solved=False, trained=8.0):
    """The lines after steps with these entropies, with a resume before each."""
    lines, decisions = list[str](), Decisions()
    for step, entropy in enumerate(values, 1):
        again = Decisions()
        again.load_state_dict(json.loads(json.dumps(decisions.state_dict())))
        decisions = again
        decisions.add(STAGE, step, named(of_step("", solved=solved)), {"desk": Returns}, 1.0, ALONE)
        metrics = {"train/entropy": entropy, "train/trained_episodes": trained}
        lines += [f"{step} {line}" for line in decisions.messages(metrics, CONFIG)]
    return lines


def test_an_entropy_that_collapses_is_told_once_while_it_happens():
    (line,) = entropies(0.5, 0.2, 0.04, 0.03, 0.02, 0.01, 0.01, 0.01)
    says(line, "5 entropy collapsed: 0.5 at the stage's start, 0.02 now", "0 % of the last epi")
    says(line, "lower learning_rate (0.0003)", "more entropy_coef (0.005)")
    assert entropies(0.5, 0.2, 0.04, 0.06, 0.02, 0.01) == []
    assert entropies(0.5, 0.04, 0.03, 0.02, 0.01, solved=True) == []  # there is nothing to try
    assert entropies(0.5, 0.0, 0.0, 0.0, 0.0, trained=0.0) == []  # of no episode


@pytest.mark.parametrize(
    "steps",
    [
        [SPREAD] * 9,
        [of_step("refund", branches=[""], solved=False)] * 9,  # no branches, and nothing fell
        [*[SPREAD] * 3, *[of_step("refund", branches=["refund"])] * 6],  # the tasks ask for one
        [*[SPREAD] * 3, *[of_step("refund", solved=True)] * 6],  # solved
        [*[SPREAD] * 3, *[of_step(*["refund"] * 7, "refuse")] * 6],  # 88 %
        [*[SPREAD] * 3, *[of_step("")] * 6],  # no action: the domain is dead
        [*[of_step("refund", "refund", "")] * 3, *[ALIKE] * 6],  # its first actions were alike
        [*[SPREAD] * 3, ALIKE, ALIKE, SPREAD, ALIKE, ALIKE],
        [*[SPREAD] * 3, *[ALIKE[:2]] * 4],  # too few tasks
    ],
)
def test_healthy_policies_are_not_named(steps):
    assert not any(told(*steps)[0])


def test_left_out_episodes_and_other_domains_do_not_count():
    left = [episode("refund", "refuse", n, left_out="reset") for n in range(8)]
    others = [episode("refund", "refuse", n, domain="other") for n in range(8)]
    assert told(*[SPREAD] * 3, *[SPREAD + left + others] * 9) == told(*[SPREAD] * 12)


def tallies(*_):
    ranks = Ranks(*_ranks(), 30)
    return told(*[SPREAD] * 3, *[ALIKE] * 4, ranks=ranks)


def _ranks():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def test_two_ranks_find_what_one_finds():
    alone = told(*[SPREAD] * 3, *[ALIKE] * 4)
    assert play_ranks(tallies, 2) == [alone, alone]


SCHEMAS = tool_schemas(Returns)


def decided(*messages, schemas=SCHEMAS, names_branch=True):
    asked = {"role": "user", "content": "order R7, late or worn"}
    return decision_of([asked, *messages], schemas, names_branch)


def test_a_decision_is_what_the_policy_chose_and_not_what_it_read():
    assert decided(say("Done.")) == decided(call("get_order", order="R7")) == ""
    look = call("get_order", order="R7"), {"role": "tool", "content": "late R9"}
    assert decided(*look, call("refund", order="R9")) == "refund(...)"
    assert decided(*look, call("refund", order="R8")) == "refund(R8)"
    assert decided(*look, call("refund", order="R9"), names_branch=False) == "refund(R9)"
    both = call("refuse", order="R7", reason="late"), call("refund", order="R7")
    assert decided(*look, *both) == "refuse(..., late), then refund(...)"
    assert decided(say(" 42 "), schemas=[]) == "42"
    assert decided(say("x" * 61), schemas=[]) == ""


class Oracle:
    """Pays for heads in three of four tasks, else for tails; nothing tells the tasks apart."""

    def reset(self, id: str, **row: object) -> None:
        number = int(id.partition("-")[2])
        self.right, self.final_message = "heads" if number % 4 else "tails", ""

    def get_reward(self) -> float:
        return float(self.final_message == self.right)


def generate_tasks(seed: int, n: int, split: str, difficulty: str) -> list[Task]:
    return [make_task(f"{split}-{i}", "heads or tails", domain="oracle") for i in range(n)]


def played(folder: str, *flags: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        assert main([*flags, "--output-dir", folder]) == 0
    return said.getvalue()


def test_a_run_that_falls_to_one_answer_says_so(tmp_path: Path):
    prompt = list(make_task(request="heads or tails").prompt)
    lines = [{"messages": [*prompt, say(word)]} for word in ("heads", "tails")]
    shown = tmp_path / "said.jsonl"
    shown.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--domains", "oracle", "--environments", f"{{oracle: {__name__}:Oracle}}"]
    flags += ["--demonstrations", f"{{oracle: {shown}}}", "--warm-start-steps", "60"]
    flags += ["--warm-start-batch-size", "4", "--num-generations", "4", "--tasks-per-step", "8"]
    flags += ["--tasks-per-domain", "80", "--eval-tasks-per-domain", "1", "--eval-trials", "1"]
    flags += ["--validation-steps", "0", "--report-to", "none", "--max-turns", "1"]
    flags += ["--max-steps", "14", "--learning-rate", "1e-3"]
    (said,) = play_ranks(played, 1, str(tmp_path / "out"), *flags)
    (line,) = [line for line in said.splitlines() if "acts alike" in line]
    says(
        line,
        "warning: step",
        "oracle: since step",
        "acts alike: heads in 9",
        "learning_rate (0.001)",
    )
