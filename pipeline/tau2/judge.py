"""Rewards that need a judge: a language model decides whether assertions about an episode hold.

The prompt and its form are the benchmark's own (`tau2/evaluator/evaluator_nl_assertions.py`), read
from the checkout at run time. An answer that cannot be read is asked for again; the official
evaluator fails there.
"""

import ast
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from pipeline.environments.faults import Outage
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line
from pipeline.tau2.environment import STOPPED, Tau2Environment
from pipeline.tau2.simulations import Messages, conversation

FILE = "src/tau2/evaluator/evaluator_nl_assertions.py"
PARTS = ("trajectory_str", "system_prompt", "user_prompt")
ATTEMPTS = 3  # questions about one episode until an answer can be read


class JudgedEnvironment(Tau2Environment):
    """An episode with the official reward; a run sets `judge` to `LanguageModel.ask`.

    The judge is asked last, and only if all other parts are 1, as the reward is their product.
    Without a judge, as in the trial of the tasks before a run, its part is left out.
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
            if len(found := verdicts_of(answer)) == count:
                return found
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
    try:
        tree = ast.parse((path / FILE).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"tau2: {path / FILE} cannot be read ({one_line(str(error))})") from None
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    for function in functions:
        found: dict[str, ast.stmt] = {
            target.id: node
            for node in function.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id in PARTS
        }
        if len(found) == len(PARTS):
            body = [found[name] for name in PARTS]
            return compile(ast.Module(body=body, type_ignores=[]), str(path / FILE), "exec")
    what = f"has no function with {', '.join(PARTS)}"
    raise UserError(f"tau2: {path / FILE} {what}; check out another commit")
