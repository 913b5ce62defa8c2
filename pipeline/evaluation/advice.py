"""Advice: domains in which GRPO cannot learn, falls of success, and policies that act alike.

Each part compares figures of a run with limits, and says in one line what was found and what to
change. The parts are the start report, dead domains, standstill, falls, and decisions.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import sqrt
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

from pipeline.common.untrusted import masked
from pipeline.common.untrusted import shown as shown_text
from pipeline.config.settings import Config, EvaluationSettings
from pipeline.data.curriculum import Stage
from pipeline.data.tasks import Message
from pipeline.distributed.ranks import Ranks
from pipeline.environments.domains import Domain
from pipeline.evaluation.transfer import Z95, mean_over_tasks, pass_at_k, rate, successes_of
from pipeline.rollout.trajectory import FAILED, EpisodeRecord, StopReason, Trajectory, succeeded

STILL_STEPS = 10  # number of steps with signal that tell whether the reward rises
STILL_RATE = 1e-7  # a lower peak of the learning rate hardly moves a weight
MAX_ANSWER = 120  # largest number of characters of an answer in a line
DEAD_STEPS = 10  # number of steps in a row without a gradient that makes a domain dead
ADVICE = {  # how an episode ended -> what to do
    StopReason.COMPLETED: "check {rewards}, or {demonstrate} that succeed",
    StopReason.MAX_TURNS: "raise max_turns, or {demonstrate} that succeed",
    StopReason.MAX_TOKENS: "raise max_tokens_per_turn and max_tokens, or shorten tool results",
    StopReason.MALFORMED_CALL: "{demonstrate} of the tools' calls",
    StopReason.REPEATED_CALL: "raise max_repeated_calls, or give demonstrations without repeats",
    StopReason.ENVIRONMENT_ERROR: "mend the environment",
    StopReason.AGENT_ERROR: "mend the agent",
}
TAUGHT = "give the warm start demonstrations"
UNTAUGHT = "add a warm start (--warm-start-steps) with demonstrations"
RANDOM = "the model's weights are random; give a warm start (--warm-start-steps)"
LOOKUPS = ("find", "get")  # prefixes of the names of tools that change nothing
COPIED = "..."  # stands for an argument that the policy has read in the conversation
NOTHING = ""  # the decision of an episode whose policy has called no tool that changes something
NUM_STEPS = 3  # steps with tasks of a family at the stage's start, and the last ones
MIN_TASKS = 6  # fewer tasks of a family in these steps tell nothing
SPREAD = 0.8
ALIKE = 0.95
SOLVED = 0.9  # largest share at first, least share now, least success
COLLAPSED = 0.1  # of the entropy at the stage's start
MIN_BRANCH = 0.1  # least share of the tasks' second most frequent branch
ENTROPY = ""  # stands in `said` for the entropy, which is of all domains
MOST_CHARACTERS = 60  # of an answer that counts as a decision

Tally: TypeAlias = dict[str, Any]  # a family's episodes of one step
Evaluation = Mapping[str, Any]  # an entry of `evaluations` in `results.json`


def advice(config: Config) -> str:
    """Return what to change, with the present values."""
    grpo = config.grpo
    warm_start = config.warm_start
    broader = f"a broader warm start (warm_start.rule_share {warm_start.rule_share:g}), "
    return (
        f"lower learning_rate ({grpo.learning_rate:g}), or try "
        f"{broader if warm_start.steps else ''}more entropy_coef ({grpo.entropy_coef:g}), "
        f"beta ({grpo.beta:g}) or tasks_per_step ({config.rollout.tasks_per_step})"
    )


def commonest_end(reasons: Counter[StopReason], whose: str, config: Config) -> str:
    """Return how most episodes ended, and what to do then."""
    reason = max(StopReason, key=reasons.__getitem__)
    share = 100 * reasons[reason] / max(1, reasons.total())
    steps = config.warm_start.steps
    remedy = ADVICE[reason].format(
        demonstrate=TAUGHT if config.is_supervised else UNTAUGHT,
        rewards="the reward functions" if config.data.reward_funcs else "get_reward",
    )
    if reason not in FAILED:
        is_random = config.model.model == "tiny" and not config.is_supervised
        more = f"; or raise warm_start.steps ({steps})" if steps else ""
        remedy = RANDOM if is_random else remedy + more
    return f"{share:.0f} % of {whose} episodes ended with {reason}: {remedy}"


# The start report
#
# What GRPO can learn from in each domain, before it has learned. GRPO compares the episodes of a
# group, so a group has signal if its rewards are not all equal. The report takes the last
# evaluation before GRPO and the groups of the first training step, which the policy before GRPO has
# played. `start_report_tasks` adds groups for a firmer estimate.


class Group(NamedTuple):
    """A group of episodes of one task."""

    domain: str
    task_id: str
    rewards: list[float]  # of the episodes that training does not leave out
    stop_reasons: list[StopReason]  # of all episodes
    answer: str = ""  # what the model wrote last in the first episode


def groups_of(episodes: Sequence[EpisodeRecord], size: int) -> list[Group]:
    """Return the groups of episodes that stand group by group, `size` episodes each."""
    return [
        Group(
            domain=group[0].domain,
            task_id=group[0].task_id,
            rewards=[episode.reward for episode in group if not episode.left_out],
            stop_reasons=[episode.stop_reason for episode in group],
            answer=_answer(group[0]),
        )
        for group in (episodes[i : i + size] for i in range(0, len(episodes), size))
    ]


def gathered_groups(groups: Sequence[Group], ranks: Ranks) -> list[Group]:
    """Return the groups of all ranks in an order that does not depend on the ranks."""
    return sorted(chain(*ranks.all_gather_objects(groups, "start report")))


def _answer(episode: EpisodeRecord) -> str:
    """Return the beginning of the last message of the model in an episode, or ""."""
    messages = getattr(episode, "messages", ())
    for message in (m for m in reversed(messages) if m["role"] == "assistant"):
        calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
        return masked(" ".join([message.get("content") or "", *calls])).strip()[:MAX_ANSWER]
    return ""


def start_report(
    groups: Sequence[Group],
    evaluation: Evaluation | None,
    config: Config,
    baselines: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the content of the start report: numbers for each domain, and lines of advice.

    Rates are [value, low, high], or None without tasks. pass@1 and pass@G, where G is
    `num_generations`, are means over the groups; pass@G counts groups without left-out episodes.
    The `evaluation` is the last one before GRPO, if there was one.
    """
    domains: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    size = config.rollout.num_generations
    threshold = config.evaluation.success_threshold
    trained = config.curriculum.order or config.data.domains
    for domain in config.data.domains:
        own = [group for group in groups if group.domain == domain]
        counts = [
            (sum(succeeded(reward, threshold) for reward in group.rewards), len(group.rewards))
            for group in own
        ]
        best = max(baselines.get(domain, {}).items(), key=lambda of: of[1], default=None)
        domains[domain] = {
            "held_out": evaluation and rate(evaluation, domain, "mean", threshold),
            "pass@1": mean_over_tasks([c / n for c, n in counts if n], domain),
            f"pass@{size}": mean_over_tasks(
                [pass_at_k(c, n, size) for c, n in counts if n >= size], domain
            ),
            "groups": len(own),
            "groups_with_signal": sum(len({*group.rewards}) > 1 for group in own),
            "baseline": best and list(best),
        }
        if domain in trained and not domains[domain]["groups_with_signal"]:
            trials = evaluation["success"][domain]["tasks"] if evaluation else {}
            pass_at_size = (domains[domain][f"pass@{size}"] or [None])[0]
            lines += _advice(domain, own, [*trials.values()], config, pass_at_size)
    return {
        "after": evaluation and evaluation["after"],
        "num_generations": size,
        "domains": domains,
        "lines": lines,
    }


def _advice(
    domain: str,
    groups: Sequence[Group],
    tasks: Sequence[Sequence[float]],
    config: Config,
    pass_at_size: float | None,
) -> Iterator[str]:
    """Yield why GRPO cannot learn in a domain whose `groups` have no signal, and what to do.

    `tasks` are the rewards of the trials of each held-out task. Nothing is yielded if these rewards
    show that groups of other tasks would have signal.
    """
    size = config.rollout.num_generations
    threshold = config.evaluation.success_threshold
    trials = [succeeded(reward, threshold) for of in tasks for reward in of]
    # One trial per task does not show whether the trials of a task differ.
    differ = len(tasks) == len(trials) and 0 < sum(trials) < len(trials)
    if differ or any(len({*of}) > 1 for of in tasks) or (any(trials) and not groups):
        return
    if not groups:
        none = f"none of {len(trials)} held-out trials succeeds, and " if trials else ""
        yield (
            f"{domain}: {none}the first step has no group of {domain}; "
            "--start-report-tasks 8 plays groups before the first step"
        )
        return
    shown = "-" if pass_at_size is None else f"{pass_at_size:.2f}"
    count = "the only group" if len(groups) == 1 else f"none of {len(groups)} groups"
    has = "has no signal" if len(groups) == 1 else "has signal"
    what = f"{domain}: {count} {has} and pass@{size} is {shown}: GRPO has nothing to compare"
    reasons = Counter(reason for group in groups for reason in group.stop_reasons)
    remedies = [
        (
            pass_at_size == 1,
            f"the policy solves these tasks: take harder tasks, or leave {domain} out",
        ),
        (pass_at_size, "the episodes of a task end alike: raise temperature or num_generations"),
        (True, commonest_end(reasons, "the", config)),
    ]
    answer = next(filter(None, (group.answer for group in groups)), "")
    example = f"; an answer begins {shown_text(answer)}" if answer else ""
    yield f"{what}; {next(remedy for holds, remedy in remedies if holds)}{example}"


# Dead domains


def count_dead_steps(
    dead_steps: dict[str, int], stage: Stage, metrics: Mapping[str, float]
) -> None:
    """Count, for each domain, the steps in a row whose groups all had equal rewards.

    Only steps of a domain's own stage with groups of the domain count. A step in which all episodes
    succeeded is not dead. `metrics` are those of a step, of all ranks, so the counts are equal on
    all ranks.
    """
    for domain in stage.own:
        share = metrics.get(f"rollout/frac_reward_zero_std/{domain}")
        if share is not None:
            is_dead = share == 1 and metrics[f"rollout/all_solved/{domain}"] < 1
            dead_steps[domain] = dead_steps.get(domain, 0) + 1 if is_dead else 0


def dead_domains(
    dead_steps: dict[str, int],
    stage: Stage,
    records: Iterable[EpisodeRecord],
    ranks: Ranks,
    config: Config,
) -> list[str]:
    """Return a message for each dead domain, whose count then begins anew.

    `records` are this rank's episodes of the stage. Ranks communicate only if a domain is dead.
    """
    lines = []
    for domain in [domain for domain, count in dead_steps.items() if count >= DEAD_STEPS]:
        dead_steps[domain] = 0
        reasons = [record.stop_reason for record in records if record.domain == domain]
        gathered = ranks.all_gather_objects(Counter(reasons), "stop reasons")
        ends = commonest_end(sum(gathered, Counter[StopReason]()), "its", config)
        lines.append(
            f"{domain}: all groups of {DEAD_STEPS} steps in a row had equal rewards, so stage "
            f"{stage.name} learns nothing; {ends}"
        )
    return lines


# A policy that does not move


class StandStill:
    """Looks for steps with signal in which neither the weights nor the reward move.

    AdamW changes a weight by about the learning rate in a step, however small the gradient is. The
    peak rate counts: at the end of a schedule, a policy may stand still because it has learned.
    """

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._is_said = False

    def message(self, metrics: Mapping[str, float], peak: float) -> str:
        """Count a step; return a message once, after STILL_STEPS steps that moved nothing."""
        reward = metrics.get("reward/mean")
        if metrics.get("train/trained_episodes") and reward is not None:
            self._rewards.append(reward)
        if self._is_said or peak >= STILL_RATE or len(self._rewards) < STILL_STEPS:
            return ""
        halves = self._rewards[: STILL_STEPS // 2], self._rewards[STILL_STEPS // 2 :]
        self._rewards = []
        first, last = map(fmean, halves)
        if last - first > Z95 * sqrt(sum(stdev(of) ** 2 / len(of) for of in halves)):
            return ""
        self._is_said = True
        return (
            f"{STILL_STEPS} steps had groups with signal, but the mean reward stands still "
            f"({first:.2f} -> {last:.2f}): the peak of the learning rate is {peak:g}, and a step "
            "moves no weight by much more; raise learning_rate"
        )


# Falls of success


class Fall(NamedTuple):
    """A success rate that fell: before and now, and the paired change with its interval."""

    before: float
    now: float
    change: str


def fall(before: Mapping[str, float], now: Mapping[str, float]) -> Fall | None:
    """Return how the success of the same tasks fell, or None.

    It fell if more than half of the success before is gone, and the 95 % interval of the paired
    change over tasks excludes 0. A run that goes on with `override` may have other tasks.
    """
    if before.keys() != now.keys():
        return None
    changes = [now[task] - success for task, success in before.items()]
    spread = Z95 * stdev(changes) / sqrt(len(changes)) if len(changes) > 1 else 0.0
    change = fmean(changes)
    was = fmean(before.values())
    is_now = fmean(now.values())
    if is_now >= was / 2 or change + spread >= 0:
        return None
    interval = f"[{change - spread:+.2f}, {change + spread:+.2f}]"
    return Fall(was, is_now, f"change {change:+.2f} {interval}")


def lost_domains(
    evaluations: Sequence[Mapping[str, Any]], stages: Sequence[Stage], settings: EvaluationSettings
) -> Iterator[str]:
    """Yield a message for each domain whose success fell before its own stage, the last stage."""
    names = {"warm_start": "the warm start", "rft": "rejection fine-tuning"}
    trained = [entry for entry in evaluations if entry["after"] in names][-1:]
    earlier = {domain for stage in stages[:-1] for domain in stage.own}
    for domain in stages[-1].own if trained else ():
        before, now = (
            successes_of(entry["success"][domain]["tasks"], settings.success_threshold)
            for entry in (trained[0], evaluations[-1])
        )
        found = fall(before, now)
        if found and domain not in earlier:
            yield (
                f"{domain}: success fell from {found.before:.2f} after "
                f"{names[trained[0]['after']]} to {found.now:.2f} before its own stage "
                f"({found.change}); raise `preview`, put it "
                "earlier in `order`, or train all domains together (curriculum mixed)"
            )


def fallen_domains(
    validations: Sequence[Mapping[str, Any]], stage: Stage, config: Config
) -> Iterator[str]:
    """Yield a message for each of a stage's domains whose success fell while GRPO trained it.

    The newest validation is compared with the stage's best one before it. A domain is named once in
    a stage.
    """
    threshold = config.evaluation.success_threshold
    for domain in stage.own:
        of_stage = [v for v in validations if stage.has(v) and domain in v["success"]]
        history = [
            {task: succeeded(reward, threshold) for task, reward in v["success"][domain].items()}
            for v in of_stage
        ]
        rates = [fmean(solved.values()) for solved in history]
        best = [rates.index(max(rates[:n])) for n in range(1, len(history))]
        falls = [fall(history[b], now) for b, now in zip(best, history[1:], strict=True)]
        if falls and (found := falls[-1]) and not any(falls[:-1]):
            step = of_stage[best[-1]]["step"]
            kept = "--checkpoint best has" if config.run.keep_best else "--keep-best would keep"
            yield (
                f"{domain}: validation success fell from {found.before:.2f} at step {step} "
                f"to {found.now:.2f} ({found.change}); {advice(config)}; {kept} the best policy"
            )


# Decisions


@dataclass
class ActionCollapse:
    """Compares what a policy decides now with what it decided in a stage's first steps.

    A decision is the sequence of an episode's calls that change something, with the arguments that
    the policy chose: those with an `enum`, and those that stand nowhere earlier in the
    conversation. If the domain's tasks name no `branch`, all arguments count. In a domain without
    tools, a short answer is a decision. Only the own domains of a stage count, and all tallies are
    equal on all ranks. `TrainState` keeps the fields as `decisions`.
    """

    # domain/family -> tallies of the first and of the last steps
    families: dict[str, dict[str, list[Tally]]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # domains that had their message, or ENTROPY
    entropy: float | None = None  # at the stage's start
    entropies: list[float] = field(default_factory=list)  # of the last steps

    def add(
        self,
        stage: Stage,
        step: int,
        episodes: Iterable[Trajectory],
        domains: Mapping[str, Domain],
        threshold: float,
        ranks: Ranks,
    ) -> None:
        """Count the decisions of a step's episodes, which are this rank's."""
        mine = Counter[tuple[str, str, str, bool, bool]]()
        for t in episodes:
            if t.domain in stage.own and not t.left_out:
                schemas = domains[t.domain].tools
                decision = decision_of(t.messages, schemas, names_branch=bool(t.branch))
                solved = succeeded(t.reward, threshold)
                mine[f"{t.domain}/{t.family}", t.branch, decision, solved, t.trial == 0] += 1
        gathered = sum(ranks.all_gather_objects(mine, "decisions"), Counter[Any]())
        for family, of in groupby(sorted(gathered.elements()), key=itemgetter(0)):
            _, branches, decisions, solved, tasks = zip(*of, strict=True)
            tally: Tally = {"step": step, "tasks": sum(tasks), "solved": sum(solved)}
            tally |= {"branches": dict(Counter(branches)), "decisions": dict(Counter(decisions))}
            kept = self.families.setdefault(family, {"first": [], "last": []})
            kept["first"] = [*kept["first"], tally][:NUM_STEPS]
            kept["last"] = [*kept["last"], tally][-NUM_STEPS:]

    def messages(self, metrics: Mapping[str, float], config: Config) -> Iterator[str]:
        """Yield a message for each domain with a family that is decided alike, once per stage.

        Another message, once per stage, tells that the entropy has collapsed. It may fall while
        episodes succeed.
        """
        entropy = metrics.get("train/entropy", 0.0)
        if self.entropy is None and "train/entropy" in metrics:
            self.entropy = entropy
        if metrics.get("train/trained_episodes"):
            self.entropies = [*self.entropies, entropy][-NUM_STEPS:]
        begun = self.entropy or 0.0
        is_low = max(self.entropies, default=1.0) < COLLAPSED * begun
        if is_low and len(self.entropies) == NUM_STEPS and ENTROPY not in self.said:
            last = [tally for kept in self.families.values() for tally in kept["last"]]
            num_episodes = sum(sum(tally["decisions"].values()) for tally in last)
            solved = sum(tally["solved"] for tally in last) / max(1, num_episodes)
            if solved < SOLVED:
                self.said.append(ENTROPY)
                yield (
                    f"entropy collapsed: {begun:.2g} at the stage's start, "
                    f"{entropy:.2g} now, so the policy tries hardly anything new, but only "
                    f"{100 * solved:.0f} % of the last episodes succeed; {advice(config)}"
                )
        for name, kept in sorted(self.families.items()):
            domain, _, family = name.partition("/")
            if domain not in self.said and (alike := decided_alike(kept["first"], kept["last"])):
                self.said.append(domain)
                equal = metrics.get(f"rollout/frac_reward_zero_std/{domain}", 0.0)
                remedy = advice(config)
                if alike.from_the_start:
                    remedy = (
                        "give demonstrations of the other actions for the warm start, "
                        f"or raise temperature ({config.rollout.temperature:g})"
                    )
                yield (
                    f"{domain}{f', {family} tasks' if family else ''}: {alike.words}; entropy "
                    f"{begun:.2g} -> {entropy:.2g}, {100 * equal:.0f} % of the "
                    f"domain's groups have equal rewards; {remedy}"
                )


def decision_of(
    messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]], names_branch: bool
) -> str:
    """Return the decision of an episode as a text, or NOTHING."""
    if not schemas:
        answer = str(messages[-1]["content"]).strip()
        return answer if len(answer) <= MOST_CHARACTERS else NOTHING
    enums = {
        (schema["function"]["name"], name)
        for schema in schemas
        for name, of in schema["function"].get("parameters", {}).get("properties", {}).items()
        if "enum" in of
    }
    done = list[str]()
    read = ""
    for message in messages:
        for call in message.get("tool_calls") or ():
            tool = call["function"]["name"]
            arguments = call["function"]["arguments"]
            if not tool.startswith(LOOKUPS):
                chosen = (
                    COPIED if names_branch and (tool, k) not in enums and str(v) in read else str(v)
                    for k, v in arguments.items()
                )
                done.append(f"{tool}({', '.join(chosen)})")
        if message["role"] != "assistant":
            read += f"{message['content']}\n"
    return ", then ".join(done)


class Alike(NamedTuple):
    """How a family is decided alike: in words, and whether that was so at the stage's start."""

    words: str
    from_the_start: bool


def decided_alike(first: Sequence[Tally], last: Sequence[Tally]) -> Alike | None:
    """Return how a family's decisions are one in the `last` steps, or None.

    A family whose tasks name branches may have been decided alike from the start. Without branches,
    equal decisions may be right, so the decisions of the `first` steps must have been spread.
    """
    begun, now, branches = (
        sum((Counter(tally[key]) for tally in tallies), Counter[str]())
        for tallies, key in ((first, "decisions"), (last, "decisions"), (last, "branches"))
    )
    action, count = max(now.items(), key=lambda of: (of[1], of[0]))
    share = count / now.total()
    solved = sum(tally["solved"] for tally in last) / now.total()
    has_branches = "" not in branches
    asked = sorted(branches.values())[-2:-1] if has_branches else [now.total()]
    from_the_start = has_branches and begun[action] >= ALIKE * begun.total()
    del begun[NOTHING]
    at_first = begun[action] / max(1, begun.total())
    is_spread_at_first = 0 < max(begun.values(), default=0) <= SPREAD * begun.total()
    is_alike = (
        len(last) == NUM_STEPS
        and sum(tally["tasks"] for tally in last) >= MIN_TASKS
        and asked
        and asked[0] >= MIN_BRANCH * now.total()
        and action != NOTHING
        and (is_spread_at_first or from_the_start)
        and share >= ALIKE
        and solved < SOLVED
    )
    if not is_alike:
        return None
    but = f", but its tasks have {len(branches)} branches" if has_branches else ""
    words = (
        f"since step {last[0]['step']} the policy acts alike{but}: {action} in "
        f"{100 * share:.0f} % of the episodes ({100 * at_first:.0f} % at first), and "
        f"{100 * solved:.0f} % succeed"
    )
    return Alike(words, from_the_start)
