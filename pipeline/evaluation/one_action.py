"""Find policies that know one action only, and policies that no longer try anything new."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from pipeline.config.settings import Config
from pipeline.data.curriculum import Stage
from pipeline.data.tasks import Message
from pipeline.distributed.ranks import Ranks
from pipeline.environments.tools import tool_schemas
from pipeline.evaluation.transfer_metrics import succeeded
from pipeline.rollout.trajectory import Trajectory

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


class Decisions:
    """Compares what a policy decides now with what it decided in a stage's first steps.

    A decision is the sequence of an episode's calls that change something, with the arguments that
    the policy chose: those with an `enum`, and those that stand nowhere earlier in the
    conversation. If the domain's tasks name no `branch`, all arguments count. In a domain without
    tools, a short answer is a decision. Only the own domains of a stage count, and all tallies are
    equal on all ranks.
    """

    def __init__(self) -> None:
        self.families: dict[str, dict[str, list[Tally]]] = {}  # domain/family -> first, last
        self.first_entropy: float | None = None
        self.last_entropies: list[float] = []
        self.said: list[str] = []  # domains that had their message in this stage, or ENTROPY

    def state_dict(self) -> dict[str, Any]:
        entropies = {"entropy": self.first_entropy, "entropies": self.last_entropies}
        found = {"families": self.families, "said": self.said, **entropies}
        return {"decisions": json.loads(json.dumps(found))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state.get("decisions", {})
        self.families = found.get("families", {})
        self.said = found.get("said", [])
        self.first_entropy = found.get("entropy")
        self.last_entropies = found.get("entropies", [])

    def add(
        self,
        stage: Stage,
        step: int,
        episodes: Iterable[Trajectory],
        environments: Mapping[str, type[Any]],
        threshold: float,
        ranks: Ranks,
    ) -> None:
        """Count the decisions of a step's episodes, which are this rank's."""
        mine = Counter[tuple[str, str, str, bool, bool]]()
        for t in episodes:
            if t.domain in stage.own and not t.left_out:
                schemas = tool_schemas(environments[t.domain])
                decision = decision_of(t.messages, schemas, names_branch=bool(t.branch))
                solved = succeeded(t.reward, threshold)
                is_task = t.trial == 0
                mine[f"{t.domain}/{t.family}", t.branch, decision, solved, is_task] += 1
        gathered = sum(ranks.all_gather_objects(mine, "decisions"), Counter[Any]())
        found = defaultdict[str, list[Any]](list)
        for family, *episode in sorted(gathered.elements()):
            found[family].append(episode)
        for family, of in found.items():
            branches, decisions, solved, tasks = zip(*of, strict=True)
            tally = {"step": step, "tasks": sum(tasks), "solved": sum(solved)}
            tally |= {"branches": Counter(branches), "decisions": Counter(decisions)}
            kept = self.families.setdefault(family, {"first": [], "last": []})
            kept["first"] = [*kept["first"], tally][:NUM_STEPS]
            kept["last"] = [*kept["last"], tally][-NUM_STEPS:]

    def messages(self, metrics: Mapping[str, float], config: Config) -> Iterator[str]:
        """Yield a message for each domain with a family that is decided alike, once per stage.

        Another message, once per stage, tells that the entropy has collapsed. It may fall while
        episodes succeed.
        """
        entropy = metrics.get("train/entropy", 0.0)
        if self.first_entropy is None:
            self.first_entropy = entropy
        if metrics.get("train/trained_episodes"):
            self.last_entropies = [*self.last_entropies, entropy][-NUM_STEPS:]
        is_low = max(self.last_entropies, default=1.0) < COLLAPSED * self.first_entropy
        if is_low and len(self.last_entropies) == NUM_STEPS and ENTROPY not in self.said:
            last = [tally for kept in self.families.values() for tally in kept["last"]]
            num_episodes = sum(sum(tally["decisions"].values()) for tally in last)
            solved = sum(tally["solved"] for tally in last) / max(1, num_episodes)
            if solved < SOLVED:
                self.said.append(ENTROPY)
                yield (
                    f"entropy collapsed: {self.first_entropy:.2g} at the stage's start, "
                    f"{entropy:.2g} now, so the policy tries hardly anything new, but only "
                    f"{100 * solved:.0f} % of the last episodes succeed; {advice(config)}"
                )
        for name, kept in sorted(self.families.items()):
            domain, _, family = name.partition("/")
            if domain not in self.said and (found := decided_alike(kept["first"], kept["last"])):
                self.said.append(domain)
                equal = metrics.get(f"rollout/frac_reward_zero_std/{domain}", 0.0)
                yield (
                    f"{domain}{f', {family} tasks' if family else ''}: {found.said}; entropy "
                    f"{self.first_entropy:.2g} -> {entropy:.2g}, {100 * equal:.0f} % of the "
                    f"domain's groups have equal rewards; "
                    f"{spread_advice(config) if found.from_the_start else advice(config)}"
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

    said: str
    from_the_start: bool


def decided_alike(first: Sequence[Tally], last: Sequence[Tally]) -> Alike | None:
    """Return how a family's decisions are one in the `last` steps, or None.

    A family whose tasks name branches may have been decided alike from the start. Without branches,
    equal decisions may be right, so the decisions of the `first` steps must have been spread.
    """
    begun, now, branches = (
        _pooled(of, what)
        for of, what in ((first, "decisions"), (last, "decisions"), (last, "branches"))
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
    said = (
        f"since step {last[0]['step']} the policy acts alike{but}: {action} in "
        f"{100 * share:.0f} % of the episodes ({100 * at_first:.0f} % at first), and "
        f"{100 * solved:.0f} % succeed"
    )
    return Alike(said, from_the_start)


def _pooled(tallies: Sequence[Tally], what: str) -> Counter[str]:
    return sum((Counter(tally[what]) for tally in tallies), Counter())


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


def spread_advice(config: Config) -> str:
    """Return what to change where the policy has never acted in two ways."""
    broader = "demonstrations of the other actions for the warm start"
    return f"give {broader}, or raise temperature ({config.rollout.temperature:g})"
