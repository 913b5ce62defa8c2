"""Advice: where nothing can be learned, what fell, and policies that fall to one action.

Each is named once, with what to change; healthy runs are not named.
"""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import pytest
from accelerate import Accelerator

from pipeline.config.settings import Config, EvaluationSettings
from pipeline.data.curriculum import Stage
from pipeline.distributed.ranks import Ranks
from pipeline.environments import Domain
from pipeline.environments.discovery import tool_schemas
from pipeline.evaluation import advice
from pipeline.evaluation.advice import (
    DEAD_STEPS,
    ActionCollapse,
    StandStill,
    count_dead_steps,
    dead_domains,
    decision_of,
    fallen_domains,
    gathered_groups,
    groups_of,
    lost_domains,
    start_report,
)
from pipeline.report.write import start_block
from pipeline.rollout.trajectory import EpisodeRecord, StopReason
from pipeline.run import main
from scripts.proofs.grid import make_trajectory
from scripts.proofs.ranks import play_ranks
from scripts.proofs.runs import without_report
from tests.support.coin import COIN
from tests.support.helpers import ALONE, call, say
from tests.support.messages import says


def resumed(state):
    """The same after a checkpoint."""
    return json.loads(json.dumps(state))


def ran(dead_steps: int, folder: str, *flags: str) -> tuple[int, str]:
    """Exit code and output of a run in a forked process, where so many steps make it dead."""
    advice.DEAD_STEPS = dead_steps
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main([*flags, "--output-dir", folder], end=without_report)
    return code, said.getvalue()


# The start report

BASELINES = {"airline": {"nothing": 0.0, "every_tool": 0.25}}


def config_of(**curriculum):
    return Config.model_validate(
        {
            "data": {"domains": ["airline", "retail"]},
            "rollout": {"num_generations": 4},
            "curriculum": curriculum,
        }
    )


def episodes(domain, task, *rewards, reason=StopReason.COMPLETED, left_out=""):
    return [
        EpisodeRecord(domain=domain, task_id=task, reward=r, stop_reason=reason, left_out=left_out)
        for r in rewards
    ]


def evaluated(**rewards):
    """An evaluation with these rewards of the trials of each task."""
    success = {
        domain: {"tasks": {f"t{i}": of for i, of in enumerate(tasks)}, "greedy": 0.0}
        for domain, tasks in rewards.items()
    }
    return {"after": "warm_start", "step": 0, "success": success}


def report(played, settings=None, baselines=BASELINES, **rewards):
    held_out = {"airline": [[0, 0]] * 4, "retail": [[1, 0]] * 4, **rewards}
    groups = gathered_groups(groups_of(played, 4), ALONE)
    return start_report(groups, evaluated(**held_out), settings or config_of(), baselines)


def test_rates_come_from_the_groups_and_the_evaluation():
    played = [
        *episodes("airline", "a", 1, 0, 0, 0),
        *episodes("airline", "b", 0, 0, 0, 0),
        *episodes("retail", "a", 1, 1, 1, 1),
    ]
    found = report(played)
    airline, retail = found["domains"]["airline"], found["domains"]["retail"]
    assert (airline["pass@1"][0], airline["pass@4"][0]) == (0.125, 0.5)
    assert (airline["groups"], airline["groups_with_signal"]) == (2, 1)
    assert airline["held_out"][0] == 0 and airline["held_out"][2] > 0.3  # Wilson's interval
    assert airline["baseline"] == ["every_tool", 0.25] and retail["baseline"] is None
    assert (retail["pass@1"], retail["held_out"][0]) == ([1.0, None, None], 0.5)
    assert found["lines"] == []  # held-out trials of retail differ
    assert start_block(found).splitlines() == [
        "start of GRPO    held-out pass@1             pass@1             pass@4  with signal"
        "    best baseline",
        "airline        0.00 [0.00, 0.49]  0.12 [0.00, 0.25]  0.50 [0.00, 1.00]       1 of 2"
        "  0.25 every tool",
        "retail         0.50 [0.50, 0.50]               1.00               1.00       0 of 1"
        "                -",
        "held-out: after the warm start; then: groups of the first step; "
        "in brackets: 95 % intervals",
    ]


def test_without_an_evaluation_before_grpo_the_groups_alone_count():
    played = [*episodes("airline", "a", 1, 0, 0, 0), *episodes("retail", "a", 0, 0, 0, 0)]
    found = start_report(groups_of(played, 4), None, config_of(), BASELINES)
    assert (found["after"], found["domains"]["airline"]["held_out"]) == (None, None)
    assert "held-out: " not in start_block(found)
    says(found["lines"][0], "retail: the only group has no signal")


def test_left_out_episodes_count_in_no_rate_and_their_groups_not_in_pass_at_the_group_size():
    failed = episodes("airline", "a", 0, reason=StopReason.ENVIRONMENT_ERROR, left_out="reset")
    played = [*episodes("airline", "a", 1, 1, 0), *failed, *episodes("airline", "b", 0, 0, 0, 1)]
    airline = report(played)["domains"]["airline"]
    assert airline["pass@1"][0] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert airline["pass@4"] == [1.0, None, None]
    all_failed = report(failed * 4)
    assert all_failed["domains"]["airline"]["pass@1"] is None
    says(all_failed["lines"][0], "airline", "pass@4 is -", "environment_error: mend the environ")


@pytest.mark.parametrize(
    ("groups", "trials", "words"),
    [
        ([[0] * 4] * 3, [[0, 0]], ["none of 3 groups has signal and pass@4 is 0.00", "max_turns"]),
        ([[0.5] * 4], [[0.5, 0.5]], ["the only group has no signal and pass@4 is 0.00"]),
        ([[1] * 4] * 2, [[1, 1]], ["pass@4 is 1.00", "take harder tasks, or leave airline out"]),
        ([[1] * 4, [0] * 4], [[1, 1], [0, 0]], ["pass@4 is 0.50", "raise temperature or num_gen"]),
        ([[1] * 4, [0] * 4], [[1], [0]], []),  # one trial cannot show whether trials differ
        ([[0] * 4] * 3, [[0, 0], [0, 1]], []),
        ([[0] * 4, [0, 1, 0, 0]], [[0, 0]], []),
        ([], [[0, 0]], ["none of 2 held-out trials succeeds", "--start-report-tasks 8"]),
        ([], [[1, 1]], []),
    ],
)
def test_one_line_says_that_nothing_can_be_learned_and_what_to_do(groups, trials, words):
    played = [
        episode
        for i, of in enumerate(groups)
        for episode in episodes("airline", f"a{i}", *of, reason=StopReason.MAX_TURNS)
    ]
    lines = report(played, airline=trials)["lines"]
    assert len(lines) == bool(words)
    says("".join(lines), *words, *(["airline: "] if words else []))


def test_a_domain_that_no_stage_trains_has_no_line():
    found = report([], config_of(order=["retail"]))
    assert found["lines"] == [] and found["domains"]["airline"]["pass@1"] is None


# Dead domains and falls

AIRLINE = Stage(index=0, name="airline", own=("airline",), difficulty="easy", groups={"airline": 2})
RETAIL = Stage(index=1, name="retail", own=("retail",), difficulty="easy", groups={"retail": 2})
RECORDS = [
    *(EpisodeRecord(domain="retail", task_id="t", stop_reason=StopReason.MALFORMED_CALL),) * 3,
    EpisodeRecord(domain="retail", task_id="t"),
    *(EpisodeRecord(domain="airline", task_id="t", stop_reason=StopReason.MAX_TURNS),) * 9,
]


def dead_step(equal, solved=0.0, domain="retail"):
    return {
        f"rollout/frac_reward_zero_std/{domain}": equal,
        f"rollout/all_solved/{domain}": solved,
    }


@pytest.mark.parametrize(
    ("settings", "reason", "told"),
    [
        ({"warm_start": {"steps": 0}}, "max_tokens", "the model's weights are random; give a warm"),
        (
            {"warm_start": {"steps": 15}},
            "max_tokens",
            "tool results; or raise warm_start.steps (15)",
        ),
        (
            {"model": {"model": "m"}, "warm_start": {"steps": 0}},
            "malformed_call",
            "malformed_call: add a warm start (--warm-start-steps) with demonstrations of the",
        ),
        (
            {"data": {"domains": ["retail"], "reward_funcs": ["m:f"]}},
            "completed",
            "completed: check the reward functions, or give the warm start demonstrations",
        ),
    ],
)
def test_advice_fits_the_run_and_shows_an_answer(settings, reason, told):
    config = Config.model_validate(
        {"data": {"domains": ["retail"]}, "rollout": {"num_generations": 2}, **settings}
    )
    key = {"domain": "retail", "stop_reason": StopReason(reason)}
    said = [{"role": "user", "content": "no"}, say("blip\nBearer s3cret0123456789 " + 99 * "x")]
    groups = groups_of([make_trajectory(messages=said, **key) for _ in range(2)], 2)
    (line,) = start_report(groups, None, config, {})["lines"]
    says(line, told, "; an answer begins 'blip")
    assert "\n" not in line and "s3cret" not in line and len(line) < 600


def still(rate, rewards, **further):
    stands = StandStill()
    keys = {"train/learning_rate": 0.1 * rate, "train/trained_episodes": 8, **further}
    return [stands.message({**keys, "reward/mean": reward}, rate) for reward in rewards]


def test_steps_with_signal_that_move_nothing_are_told_once():
    *before, line = still(1e-8, [0.3, 0.4] * 5)
    assert before == [""] * 9
    says(
        line,
        "10 steps had groups with signal",
        "stands still (0.34 -> 0.36)",
        "learning rate is 1e-08",
    )
    assert [bool(of) for of in still(1e-8, [0.3, 0.4] * 20)].count(True) == 1
    assert not any(still(1e-8, [0.1 * n for n in range(10)]))  # it rises
    # A usual rate of a large model, which is at a tenth of it at the end.
    assert not any(still(5e-7, [0.3, 0.4] * 20))
    assert not any(still(1e-8, [0.3, 0.4] * 20, **{"train/trained_episodes": 0}))  # no signal


def dead_after(*steps):
    """The messages after each of the steps in stage retail."""
    dead, lines = {}, []
    for metrics in steps:
        dead = resumed(dead)
        count_dead_steps(dead, RETAIL, metrics)
        lines.append(dead_domains(dead, RETAIL, RECORDS, ALONE, config_of()))
    return lines


def test_a_domain_is_named_after_some_steps_in_a_row_with_equal_rewards():
    *before, (line,) = dead_after(*[dead_step(1.0)] * DEAD_STEPS)
    assert before == [[]] * (DEAD_STEPS - 1)
    says(line, "retail: all groups of 10 steps in a row", "stage retail learns nothing")
    says(line, "75 % of its episodes ended with malformed_call: give the warm start")
    again = dead_after(*[dead_step(1.0)] * 2 * DEAD_STEPS)
    assert [bool(lines) for lines in again].count(True) == 2


def test_steps_that_learn_or_have_no_groups_or_solve_all_are_not_dead():
    dead = [dead_step(1.0)] * (DEAD_STEPS - 1)
    assert not any(dead_after(*dead, dead_step(0.9), *dead))
    assert not any(dead_after(*dead, dead_step(1.0, solved=1.0), *dead))
    assert not any(
        dead_after(*[dead_step(1.0, domain="airline")] * DEAD_STEPS)
    )  # only replayed here
    assert any(dead_after(*dead, {}, {}, dead_step(1.0)))  # steps without groups of it do not count


def entry(after, rewards):
    tasks = {f"t{i}": [reward] for i, reward in enumerate(rewards)}
    return {"after": after, "success": {"retail": {"tasks": tasks}}}


def test_a_domain_that_lost_its_success_before_its_own_stage_is_named():
    settings = EvaluationSettings()
    start, warm = entry("start", [0] * 10), entry("warm_start", [1] * 6 + [0] * 4)
    lost, half = entry("airline", [1] + [0] * 9), entry("airline", [1] * 3 + [0] * 7)
    (line,) = lost_domains([start, warm, lost], [AIRLINE, RETAIL], settings)
    says(
        line, "retail: success fell from 0.60 after the warm start to 0.10", "-0.50 [-0.83, -0.17]"
    )
    after_rft = [start, entry("warm_start", [0] * 10), {**warm, "after": "rft"}, lost]
    (line,) = lost_domains(after_rft, [AIRLINE, RETAIL], settings)
    says(line, "retail: success fell from 0.60 after rejection fine-tuning to 0.10")
    for evaluations in ([start, warm, half], [start, lost], [start, warm]):
        assert [*lost_domains(evaluations, [AIRLINE, RETAIL], settings)] == []
    assert [*lost_domains([start, warm, lost], [RETAIL, RETAIL], settings)] == []  # seen before
    few = [entry("warm_start", [1, 0]), entry("airline", [0, 0])]
    assert [*lost_domains(few, [AIRLINE, RETAIL], settings)] == []  # the interval includes 0


def validation(step, *solved, domain="retail"):
    """A validation of ten tasks; each of `solved` says how many of them succeed."""
    rewards = {f"t{i}": float(i < solved[0]) for i in range(10)}
    return {"step": step, "success": {domain: rewards}}


def test_a_domain_whose_success_falls_while_it_is_trained_is_named_once():
    stage = dataclasses.replace(RETAIL, first_step=8)
    settings = Config.model_validate({"grpo": {"learning_rate": 1e-3}})
    history = [validation(0, 10), validation(8, 2), validation(12, 5), validation(16, 1)]
    (line,) = fallen_domains(history, stage, settings)
    says(line, "retail: validation success fell from 0.50 at step 12 to 0.10")
    says(
        line, "(change -0.40 [-0.72, -0.08]); lower learning_rate (0.001)", "--keep-best would keep"
    )
    best = settings.model_copy(update={"run": settings.run.model_copy(update={"keep_best": True})})
    says(next(fallen_domains(history, stage, best)), "--checkpoint best has the best policy")
    assert [*fallen_domains([*history, validation(20, 1)], stage, settings)] == []  # said before
    assert [*fallen_domains(history[:3], stage, settings)] == []
    assert [
        *fallen_domains([*history[:3], validation(16, 3)], stage, settings)
    ] == []  # half is left
    assert [*fallen_domains([validation(8, 2), validation(12, 0)], stage, settings)] == []  # +-0.26
    other = {"step": 16, "success": {"retail": {"new": 0.0}}}  # of a run that was overridden
    assert [*fallen_domains([*history[:3], other], stage, settings)] == []
    elsewhere = [{**v, "success": {"airline": v["success"]["retail"]}} for v in history]
    assert [*fallen_domains(elsewhere, stage, settings)] == []  # not a domain of this stage


@pytest.mark.whole_run
def test_a_run_may_end_at_a_dead_domain_with_a_checkpoint(tmp_path: Path):
    folder = tmp_path / "out"
    flags = [*COIN, "--warm-start-steps", "0", "--max-steps", "3", "--save-steps", "0"]
    flags += ["--max-tokens-per-turn", "4", "--max-turns", "1", "--report-to", "none"]
    flags += ["--stop-on-dead-domain"]  # an untrained model never says heads
    ((code, said),) = play_ranks(ran, 1, 2, str(folder), *flags)
    assert code == 1
    line = said.splitlines()[-1]
    says(line, "error: stop_on_dead_domain: step 2: coin: all groups", "ended with max_tokens")
    assert "Traceback" not in said
    state = json.loads((folder / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["dead_steps"] == {"coin": 0}


# Decisions

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


DESK = Domain(name="desk", environment=Returns)


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
    decisions, lines = ActionCollapse(), []
    for step, episodes in enumerate(steps, 1):
        decisions = ActionCollapse(**resumed(vars(decisions)))
        mine = named(episodes)[4 * ranks.rank : 4 * ranks.rank + 4 if ranks.num_ranks > 1 else None]
        decisions.add(STAGE, step, mine, {"desk": DESK}, 1.0, ranks)
        lines.append([*decisions.messages({**METRICS, "train/entropy": 1 / step}, CONFIG)])
    return lines, vars(decisions)


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
    assert state["said"] == ["desk"]


def test_a_policy_that_acts_alike_from_the_start_is_told_to_spread():
    lines, _ = told(*[ALIKE] * 9)
    assert [bool(of) for of in lines] == [False, False, True, *[False] * 6]
    says(lines[2][0], "desk, return tasks: since step 1 the policy acts alike", "100 % at first")
    says(lines[2][0], "give demonstrations of the other actions", "or raise temperature (1)")
    assert "learning_rate" not in lines[2][0]


def entropies(*values, solved=False, trained=8.0):
    """The lines after steps with these entropies, with a resume before each."""
    lines, decisions = list[str](), ActionCollapse()
    for step, entropy in enumerate(values, 1):
        decisions = ActionCollapse(**resumed(vars(decisions)))
        decisions.add(STAGE, step, named(of_step("", solved=solved)), {"desk": DESK}, 1.0, ALONE)
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


def tallies():
    accelerator = Accelerator()
    ranks = Ranks(accelerator.process_index, accelerator.num_processes, 30)
    return told(*[SPREAD] * 3, *[ALIKE] * 4, ranks=ranks)


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
