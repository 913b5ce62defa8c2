"""An environment of several turns of verifiers v0, whose user asks once more."""

import verifiers as vf
from datasets import Dataset


class Asked(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        print("asks again")  # on the standard output
        return [{"role": "user", "content": "Are you sure?"}]


def short(completion) -> float:
    return 1 / (1 + len(completion[-1].content or ""))


def load_environment() -> vf.Environment:
    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(40)]
    return Asked(
        dataset=Dataset.from_list(rows[:30]),
        eval_dataset=Dataset.from_list(rows[30:]),
        max_turns=2,
        rubric=vf.Rubric(funcs=[short]),
    )
