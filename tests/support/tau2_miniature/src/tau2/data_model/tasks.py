from enum import StrEnum

from pydantic import BaseModel


class RewardType(StrEnum):
    DB = "DB"
    ENV_ASSERTION = "ENV_ASSERTION"
    NL_ASSERTION = "NL_ASSERTION"
    ACTION = "ACTION"
    COMMUNICATE = "COMMUNICATE"


class Action(BaseModel):
    name: str
    arguments: dict
    requestor: str = "assistant"
    compare_args: list[str] | None = None

    def compare_with_tool_call(self, call) -> bool:
        keys = call.arguments if self.compare_args is None else self.compare_args
        same = all(self.arguments.get(k, self) == call.arguments.get(k, call) for k in keys)
        return self.name == call.name and same


class EnvFunctionCall(BaseModel):
    env_type: str
    func_name: str
    arguments: dict


class EnvAssertion(EnvFunctionCall):
    assert_value: bool = True


class EvaluationCriteria(BaseModel):
    actions: list[Action] | None = None
    env_assertions: list[EnvAssertion] | None = None
    communicate_info: list[str] | None = None
    nl_assertions: list[str] | None = None
    reward_basis: list[RewardType]


class InitialState(BaseModel):
    initialization_data: dict | None = None
    initialization_actions: list[EnvFunctionCall] | None = None
    message_history: list | None = None


class Task(BaseModel):
    id: str
    user_scenario: dict
    ticket: str | None = None
    initial_state: InitialState | None = None
    evaluation_criteria: EvaluationCriteria | None = None
