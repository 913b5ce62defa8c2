"""Toolkits and environments with the names that an adapter of tau2 needs, as small as can be."""

import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from tau2.data_model.message import ToolMessage


def folder_of(domain: str) -> Path:
    return Path(os.environ["TAU2_DATA_DIR"]) / "tau2" / "domains" / domain


def is_tool(mutates: bool = False):
    def mark(function):
        function.__tool__, function.__mutates_state__ = True, mutates
        return function

    return mark


@dataclass
class Tool:
    name: str
    function: object

    @property
    def openai_schema(self) -> dict:
        names = {key: {"type": "string"} for key in inspect.signature(self.function).parameters}
        parameters = {"type": "object", "properties": names}
        about = {"name": self.name, "description": self.function.__doc__, "parameters": parameters}
        return {"type": "function", "function": about}


class ToolKit:
    def __init__(self, db: BaseModel) -> None:
        self.db = db

    def has_tool(self, name: str) -> bool:
        return hasattr(getattr(type(self), name, None), "__tool__")

    def tool_mutates_state(self, name: str) -> bool:
        return getattr(self, name).__mutates_state__

    def get_tools(self) -> dict[str, Tool]:
        names = [name for name in dir(type(self)) if self.has_tool(name)]
        return {name: Tool(name, getattr(self, name)) for name in names}


class Environment:
    solo_mode = False

    def __init__(self, domain_name: str, policy: str, tools, user_tools=None) -> None:
        self.domain_name, self.policy = domain_name, policy
        self.tools, self.user_tools = tools, user_tools

    def sync_tools(self) -> None:
        if self.user_tools is not None:  # the phone has a network while its line is paid
            paid = all(line.paid for line in self.tools.db.lines.values())
            self.user_tools.db.phone.network = paid

    def run_env_function_call(self, call):
        kit = self.user_tools if call.env_type == "user" else self.tools
        result = getattr(kit, call.func_name)(**call.arguments)
        self.sync_tools()
        return result

    def run_env_assertion(self, assertion, raise_assertion_error: bool = True) -> bool:
        met = self.run_env_function_call(assertion) == assertion.assert_value
        assert met or not raise_assertion_error
        return met

    def get_response(self, call) -> ToolMessage:
        try:
            kits = [kit for kit in (self.user_tools, self.tools) if kit is not None]
            if not self.solo_mode:
                kits = [self.user_tools if call.requestor == "user" else self.tools]
            kit = next((kit for kit in kits if kit.has_tool(call.name)), None)
            if kit is None:
                raise ValueError(f"Tool '{call.name}' not found.")
            result = getattr(kit, call.name)(**call.arguments)
            self.sync_tools()
        except Exception as error:
            return ToolMessage(content=f"Error: {error}", error=True)
        if isinstance(result, BaseModel):
            result = result.model_dump()
        content = result if isinstance(result, str) else json.dumps(result)
        return ToolMessage(content=content, error=False)
