"""Domains in which nothing is learned, and domains that lost what the warm start gave them."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

from pipeline.config.settings import Config, EvaluationSettings
from pipeline.data.curriculum import Stage
from pipeline.distributed.ranks import Ranks
from pipeline.evaluation import dead_domains
from pipeline.evaluation.dead_domains import DEAD_STEPS, DeadDomains, fallen_domains, lost_domains
from pipeline.rollout.trajectory import RunRecord, StopReason
from pipeline.run import main
from scripts.proofs.ranks import play_ranks
from tests.support.coin import COIN
from tests.support.messages import says

ALONE = Ranks(0, 1, 5)
AIRLINE = Stage(index=0, name="airline", own=("airline",), difficulty="easy", groups={"airline": 2})
RETAIL = Stage(index=1, name="retail", own=("retail",), difficulty="easy", groups={"retail": 2})
RECORDS = [
    *(RunRecord(domain="retail", task_id="t", stop_reason=StopReason.MALFORMED_CALL),) * 3,
    RunRecord(domain="retail", task_id="t"),
    *(RunRecord(domain="airline", task_id="t", stop_reason=StopReason.MAX_TURNS),) * 9,
]


def step(equal, solved=0.0, domain="retail"):
    return {
        f"rollout/frac_reward_zero_std/{domain}": equal,
        f"rollout/all_solved/{domain}": solved,
    }


def told(*steps):
    """The messages after each of the steps in stage retail."""
    dead, lines = DeadDomains(), []
    for metrics in steps:
        again = DeadDomains()  # as after a resume
        again.load_state_dict(json.loads(json.dumps(dead.state_dict())))
        dead = again
        dead.add(RETAIL, metrics)
        lines.append(dead.messages(RETAIL, RECORDS, ALONE))
    return lines


def test_a_domain_is_named_after_some_steps_in_a_row_with_equal_rewards():
    *before, (line,) = told(*[step(1.0)] * DEAD_STEPS)
    assert before == [[]] * (DEAD_STEPS - 1)
    says(line, "retail: all groups of 10 steps in a row", "stage retail learns nothing")
    says(line, "75 % of its episodes ended with malformed_call: give the warm start")
    again = told(*[step(1.0)] * 2 * DEAD_STEPS)
    assert [bool(lines) for lines in again].count(True) == 2


def test_steps_that_learn_or_have_no_groups_or_solve_all_are_not_dead():
    dead = [step(1.0)] * (DEAD_STEPS - 1)
    assert not any(told(*dead, step(0.9), *dead))
    assert not any(told(*dead, step(1.0, solved=1.0), *dead))
    assert not any(told(*[step(1.0, domain="airline")] * DEAD_STEPS))  # only replayed here
    assert any(told(*dead, {}, {}, step(1.0)))  # steps without groups of it do not count


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
        assert lost_domains(evaluations, [AIRLINE, RETAIL], settings) == []
    assert lost_domains([start, warm, lost], [RETAIL, RETAIL], settings) == []  # seen before
    few = [entry("warm_start", [1, 0]), entry("airline", [0, 0])]
    assert lost_domains(few, [AIRLINE, RETAIL], settings) == []  # the interval includes 0


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
    says(fallen_domains(history, stage, best)[0], "--checkpoint best has the best policy")
    assert fallen_domains([*history, validation(20, 1)], stage, settings) == []  # said before
    assert fallen_domains(history[:3], stage, settings) == []
    assert fallen_domains([*history[:3], validation(16, 3)], stage, settings) == []  # half is left
    assert fallen_domains([validation(8, 2), validation(12, 0)], stage, settings) == []  # +-0.26
    other = {"step": 16, "success": {"retail": {"new": 0.0}}}  # of a run that was overridden
    assert fallen_domains([*history[:3], other], stage, settings) == []
    elsewhere = [{**v, "success": {"airline": v["success"]["retail"]}} for v in history]
    assert fallen_domains(elsewhere, stage, settings) == []  # not a domain of this stage


def stopped(folder: str, *flags: str) -> tuple[int, str]:
    """Exit code and standard error of a run in which two steps are enough to be dead."""
    dead_domains.DEAD_STEPS = 2  # in a forked process
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([*flags, "--output-dir", folder])
    return code, said.getvalue()


def test_a_run_may_end_at_a_dead_domain_with_a_checkpoint(tmp_path: Path):
    folder = tmp_path / "out"
    flags = [*COIN, "--warm-start-steps", "0", "--max-steps", "3", "--save-steps", "0"]
    flags += ["--max-tokens-per-turn", "4", "--max-turns", "1", "--report-to", "none"]
    flags += ["--stop-on-dead-domain"]  # an untrained model never says heads
    ((code, said),) = play_ranks(stopped, 1, str(folder), *flags)
    assert code == 1
    line = said.splitlines()[-1]
    says(line, "error: stop_on_dead_domain: step 2: coin: all groups", "ended with max_tokens")
    assert "Traceback" not in said
    state = json.loads((folder / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["dead_steps"] == {"coin": 0}
