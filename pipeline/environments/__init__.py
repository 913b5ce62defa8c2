"""The names that a domain's module may import; `domains.py` describes a domain's module."""

from pipeline.environments.discovery import tool_schemas as tool_schemas
from pipeline.environments.domains import Domain as Domain
from pipeline.environments.domains import load_domains as load_domains
from pipeline.environments.experts import Agent as Agent
from pipeline.environments.experts import Expert as Expert
from pipeline.environments.experts import run_expert as run_expert
from pipeline.environments.faults import Outage as Outage
from pipeline.environments.tools import ToolError as ToolError
from pipeline.environments.tools import User as User
from pipeline.environments.tools import call_tool as call_tool
