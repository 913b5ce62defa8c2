"""Demonstrations for the warm start: JSONL files of conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.data.rows import json_lines
from pipeline.data.tasks import Message, messages_problem
from pipeline.errors import UserError
from pipeline.files.untrusted import one_line, shown


def read_demonstrations(path: Path) -> list[tuple[list[Message], list[dict[str, Any]]]]:
    """Conversations of a JSONL file, `{"messages": [...], "tools": [...]}`.

    UserError names the faulty line.
    """
    demonstrations = []
    try:
        for where, _, _, row in json_lines(path):
            if problem := _problem(row):
                raise UserError(f"{where}: {problem}")
            demonstrations.append((row["messages"], row.get("tools") or []))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"warm_start.data: {path} cannot be read ({one_line(str(error))}); check the path"
        ) from None
    if not demonstrations:
        raise UserError(f"{path}: holds no demonstrations; give one JSON object per line")
    return demonstrations


def _problem(row: Any) -> str:
    """What is wrong with a row; empty if nothing is."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if problem := messages_problem(messages):
        return f"messages: {problem}"
    roles = [message["role"] for message in row["messages"]]
    if "assistant" not in roles or roles[0] == "assistant":
        return "a demonstration starts with a request and holds an assistant message"
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return f"tools: got {shown(tools)}; give a list of JSON schemas"
    return ""
