"""The names that a module of a domain imports; `domains.py` describes such a module."""

from pipeline.environments.domains import Domain, load_domains
from pipeline.environments.experts import Agent, Expert, run_expert
from pipeline.environments.faults import Outage
from pipeline.environments.tools import ToolError, User, call_tool, tool_schemas

__all__ = [
    "Agent",
    "Domain",
    "Expert",
    "Outage",
    "ToolError",
    "User",
    "call_tool",
    "load_domains",
    "run_expert",
    "tool_schemas",
]
