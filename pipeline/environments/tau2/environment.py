"""Episodes of τ²-bench: the checkout's tools on a database of the episode, and exact rewards.

The reward is the product over the task's `reward_basis`, by the rules of the official evaluator
(`tau2.evaluator`). The official evaluator replays the recorded calls on new databases; an episode
here is scored on its own live database, which is the same by construction.

The oddities of the official rules are the same here; `docs/tau2.md` lists them.
"""

import ast
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from pipeline.common.errors import UserError
from pipeline.common.untrusted import one_line
from pipeline.environments.faults import Outage
from pipeline.environments.language_models.customers import Scenario, ScriptedCustomer, spoken
from pipeline.environments.tau2.simulations import MAX_ERRORS, Messages, conversation
from pipeline.environments.tau2.world import STOPPED, World, changes_of

JUDGE_FILE = "src/tau2/evaluator/evaluator_nl_assertions.py"
JUDGE_PARTS = ("trajectory_str", "system_prompt", "user_prompt")
ATTEMPTS = 3  # questions to the judge about one episode until an answer can be read


def parts_of(task: Any, has_judge: bool = False) -> list[str]:
    """Return the parts of a task's reward that need no judge.

    Without a judge, COMMUNICATE stands in for NL_ASSERTION.
    """
    criteria = task.evaluation_criteria
    basis = {part.value for part in criteria.reward_basis} if criteria is not None else set()
    if "NL_ASSERTION" in basis and criteria.nl_assertions and not has_judge:
        basis.add("COMMUNICATE")
    return [part for part in ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE") if part in basis]


class Tau2Environment:
    """An episode. `domain.py` makes a subclass for each domain, with `world` and `schemas`."""

    uses_random_state = has_judge = False
    world: ClassVar[World]
    schemas: ClassVar[list[dict[str, Any]]]
    reward_parts: ClassVar[dict[str, str]] = {
        "graded": "the episode ended by itself, with fewer than 10 errors of tools",
        "DB": "the database equals that after the gold actions",
        "ENV_ASSERTION": "all assertions about line and phone hold",
        "ACTION": "every gold action was called",
        "COMMUNICATE": "the model told the customer every expected text",
    }

    stop_reason = ""
    messages: tuple[dict[str, Any], ...] | list[dict[str, Any]] = ()

    def reset(self, payload: str, **row: Any) -> None:
        task_id = json.loads(payload)["id"]
        self.done = False
        self._num_errors = 0
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._task = self.world.task(task_id)
        self._environment = self.world.start(self._task)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        if name == "done" and self.world.is_solo:
            self.done = True
            return STOPPED, False
        self._calls.append((name, arguments))
        text, is_error = self.world.call(self._environment, name, arguments)
        self._num_errors += is_error
        self.done = self._num_errors >= MAX_ERRORS
        return text, is_error

    def get_reward(self) -> float:
        self._take_back_calls_beside_done()
        self.reward_breakdown: dict[str, float] = {"graded": float(self._is_graded)}
        self.difference: dict[str, list[str]] = {}
        if not self._is_graded:
            return 0.0
        criteria = self._task.evaluation_criteria
        reward = 1.0
        for part in parts_of(self._task, self.has_judge):
            self.reward_breakdown[part] = float(getattr(self, f"_{part.lower()}")(criteria))
            reward *= self.reward_breakdown[part]
        return reward

    @property
    def _is_graded(self) -> bool:
        if self._num_errors >= MAX_ERRORS:
            return False
        return self.done if self.world.is_solo else self.stop_reason == "completed"

    def _take_back_calls_beside_done(self) -> None:
        results = list(takewhile(lambda message: message["role"] == "tool", self.messages[::-1]))
        written = self.messages[-len(results) - 1 : len(self.messages) - len(results)]
        names = [call["function"]["name"] for m in written for call in m.get("tool_calls") or ()]
        count = sum(message["name"] != "done" for message in results)
        if self.world.is_solo and count and "done" in names:
            self._calls = self._calls[:-count]
            self.done = True
            self._environment = start = self.world.start(self._task)
            self._num_errors = sum(self.world.call(start, *call)[1] for call in self._calls)

    def _db(self, criteria: Any) -> bool:
        if criteria.actions is None and criteria.env_assertions is None:
            return True
        ours = changes_of(self._environment.tools.db)
        gold = self.world.gold_state(self._task)
        for place in sorted(ours.keys() | gold.keys()):
            mine = ours.get(place, "unchanged")
            theirs = gold.get(place, "unchanged")
            if mine != theirs:
                self.difference["/".join(place)] = [mine or "deleted", theirs or "deleted"]
        return ours == gold

    def _env_assertion(self, criteria: Any) -> bool:
        failed = [a for a in criteria.env_assertions or () if not self._holds(a)]
        for assertion in failed:
            expected = f"{assertion.assert_value} for {assertion.arguments}"
            self.difference[assertion.func_name] = [str(not assertion.assert_value), expected]
        return not failed

    def _holds(self, assertion: Any) -> bool:
        try:
            check = self._environment.run_env_assertion
            return bool(check(assertion, raise_assertion_error=False))
        except Exception:  # tools store any argument, such as a number for the phone's APN settings
            return False

    def _action(self, criteria: Any) -> bool:
        calls = [self.world.package.ToolCall(name=n, arguments=a) for n, a in self._calls]
        missing = [
            action
            for action in criteria.actions or ()
            if not any(action.compare_with_tool_call(call) for call in calls)
        ]
        self.difference |= {a.name: ["not called", f"called with {a.arguments}"] for a in missing}
        return not missing

    def _communicate(self, criteria: Any) -> bool:
        messages = [
            m["content"] for m in self.messages if m["role"] == "assistant" and m["content"]
        ]
        texts = [spoken(text).lower().replace(",", "") for text in messages]
        missing = [
            info
            for info in criteria.communicate_info or ()
            if not any(info.lower() in text for text in texts)
        ]
        self.difference |= {f"said {info!r}": ["no", "yes"] for info in missing}
        return not missing


class TalkingEnvironment(Tau2Environment):
    """An episode with a customer who talks. The customer ends the episode.

    The customer is a ScriptedCustomer until other code replaces `user`, by the `scenario`. The
    customer's own tools are those of the phone, in telecom.
    """

    def reset(self, payload: str, **row: Any) -> str:  # type: ignore[override]
        super().reset(payload, **row)
        self.user = ScriptedCustomer(self.world.checkout.instructions(self._task.id))
        return self.user.first_words

    @property
    def scenario(self) -> Scenario:
        checkout = self.world.checkout
        return Scenario(
            system=checkout.customer_prompt(str(self._task.user_scenario)),
            greeting=checkout.greeting,
            schemas=self.world.customer_schemas,
            call=self.call_of_customer,
        )

    def call_of_customer(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        self._calls.append((name, arguments))
        return self.world.call(self._environment, name, arguments, "user")


class JudgedEnvironment(Tau2Environment):
    """An episode with the official reward; a run sets `judge` to `LanguageModel.ask`.

    The judge is a language model that decides whether assertions about an episode hold. The prompt
    and its form are the benchmark's own, read from the checkout. An answer that cannot be read is
    asked for again; the official evaluator fails there. The judge is asked last, and only if all
    other parts are 1, as the reward is their product. Without a judge, as in the trial of the tasks
    before a run, its part is left out.
    """

    has_judge = True
    judge: ClassVar[Callable[..., Awaitable[dict[str, Any]]] | None] = None
    reward_parts: ClassVar[dict[str, str]] = {
        **Tau2Environment.reward_parts,
        "NL_ASSERTION": "the judge finds that every assertion about the episode holds",
    }

    async def get_reward(self) -> float:  # type: ignore[override]
        """Return the reward. Raises Outage if the judge cannot be reached or understood."""
        reward = super().get_reward()
        assertions = assertions_of(self.world.checkout.tasks[self._task.id])
        if not (reward and assertions and self.judge is not None):
            return reward
        customer = getattr(getattr(self, "user", None), "model_messages", ())
        messages = conversation(self.messages, customer, self.world.is_solo)
        if messages[-1]["role"] != "user":
            messages.append({"role": "user", "content": STOPPED})
        prompt = judge_prompt(self.world.checkout.path, messages, assertions)
        verdicts = await self._verdicts(prompt, len(assertions))
        for text, (holds, why) in zip(assertions, verdicts, strict=True):
            if not holds:
                self.difference[text] = [f"not met: {why}", "met"]
        self.reward_breakdown["NL_ASSERTION"] = part = float(all(holds for holds, _ in verdicts))
        return reward * part

    async def _verdicts(self, prompt: Messages, count: int) -> list[tuple[bool, str]]:
        assert self.judge is not None
        for seed in range(ATTEMPTS):
            answer = (await self.judge(prompt, seed=seed))["content"]
            if len(verdicts := verdicts_of(answer)) == count:
                return verdicts
        shown = one_line(answer)
        raise Outage(f"judge: no verdict on {count} assertions in {ATTEMPTS} answers: {shown}")


def assertions_of(task: dict[str, Any]) -> list[str]:
    """Return the assertions that a task's reward needs, as the data file has them."""
    criteria = task["evaluation_criteria"] or {}
    needs = "NL_ASSERTION" in criteria.get("reward_basis", ())
    return list(criteria.get("nl_assertions") or ()) if needs else []


def verdicts_of(answer: str) -> list[tuple[bool, str]]:
    """Return (holds, reasoning) for each result in a judge's answer; [] if it cannot be read.

    The answer is JSON, also within a fence of Markdown.
    """
    fenced = re.search(r"```(?:json)?\s*(\{.*\})\s*```", answer, flags=re.DOTALL)
    try:
        results = json.loads(fenced[1] if fenced else answer)["results"]
        found = [(result["metExpectation"], str(result["reasoning"])) for result in results]
    except (ValueError, LookupError, TypeError):
        return []
    return found if all(isinstance(holds, bool) for holds, _ in found) else []


def judge_prompt(path: Path, messages: Messages, assertions: Sequence[str]) -> Messages:
    """Return the official question about an episode. Raises UserError if the file is another."""
    trajectory = [SimpleNamespace(role=m["role"], content=m["content"]) for m in messages]
    names: dict[str, Any] = {"trajectory": trajectory, "nl_assertions": list(assertions)}
    exec(_assignments(path), names)
    system = names["system_prompt"]
    user = names["user_prompt"]
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


@cache
def _assignments(path: Path) -> Any:
    """Return the code that makes the prompts, without importing the official evaluator."""
    file = path / JUDGE_FILE
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"tau2: {file} cannot be read ({one_line(str(error))})") from None
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            assigned = [node for node in function.body if isinstance(node, ast.Assign)]
            made = {ast.unparse(node.targets[0]): node for node in assigned}
            if made.keys() >= {*JUDGE_PARTS}:
                body: list[ast.stmt] = [made[name] for name in JUDGE_PARTS]
                return compile(ast.Module(body=body, type_ignores=[]), str(file), "exec")
    names = ", ".join(JUDGE_PARTS)
    raise UserError(f"tau2: {file} has no function with {names}; check out another commit")
