"""Demonstrations for the warm start: JSONL files of conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.data.tasks import MAX_CHARACTERS, ROLES, Message, call_problem
from pipeline.errors import UserError
from pipeline.files.untrusted import lines_of, one_line, open_file, parse_json, shown


def read_demonstrations(path: Path) -> list[tuple[list[Message], list[dict[str, Any]]]]:
    """Conversations of a JSONL file, `{"messages": [...], "tools": [...]}`.

    UserError names the faulty line.
    """
    found = []
    try:
        with open_file(path) as file:
            for number, line in lines_of(file, str(path)):
                if text := line.decode().strip():
                    found.append(_demonstration(text, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"warm_start.data: {path} cannot be read ({one_line(str(error))}); check the path"
        ) from None
    if not found:
        raise UserError(f"{path}: holds no demonstrations; give one JSON object per line")
    return found


def _demonstration(text: str, where: str) -> tuple[list[Message], list[dict[str, Any]]]:
    try:
        row = parse_json(text)
    except ValueError as error:
        raise UserError(
            f"{where}: not JSON ({getattr(error, 'msg', error)}); mend the line"
        ) from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise UserError(f"{where}: messages: give a list of objects with role and content")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise UserError(
            f"{where}: a demonstration starts with a request and holds an assistant message"
        )
    if unknown := [role for role in roles if role not in ROLES]:
        raise UserError(
            f"{where}: got the role {shown(unknown[0])}; give one of {', '.join(ROLES)}"
        )
    if problem := next(filter(None, map(call_problem, messages)), ""):
        raise UserError(f"{where}: {problem}")
    if sum(len(message["content"]) for message in messages) > MAX_CHARACTERS:
        raise UserError(f"{where}: more than {MAX_CHARACTERS} characters; shorten it")
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: tools: got {shown(tools)}; give a list of JSON schemas")
    return messages, tools


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
