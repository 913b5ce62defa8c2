"""A server of tools (MCP over standard input and output) that needs no package."""

import json
import os
import subprocess
import sys
import time

# The first argument: what is wrong with the server. The second: a file, without which `pay` lacks.
WRONG = sys.argv[1] if len(sys.argv) > 1 else ""
ITEM = {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "item": ITEM},
    "$defs": {"Item": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
PAGES = {None: ("note", "fail", "die"), "2": ("refuse", "draw", "chat", "sleep")}
if len(sys.argv) < 3 or os.path.exists(sys.argv[2]):
    PAGES["2"] += ("pay",)
notes = []


def result_of(method, params):
    if method == "initialize":
        about = {"name": "desk", "version": "3"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list" and WRONG == "empty":
        return {"tools": []}
    if method == "tools/list":
        cursor = params.get("cursor")
        names = PAGES[cursor]
        tools = [{"name": n, "description": f"{n}!", "inputSchema": PARAMETERS} for n in names]
        return {"tools": tools} | ({} if cursor else {"nextCursor": "2"})
    content = [{"type": "text", "text": text} for text in called(params["name"], params)]
    if params["name"] == "draw":
        content.append({"type": "image", "data": "AAAA", "mimeType": "image/png"})
    return {"content": content, "isError": params["name"] == "fail"}


def called(name, params):
    notes.append(params.get("arguments", {}).get("text"))
    if name == "die":
        print("the till burns", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "chat":
        print("blah " * 200_000, file=sys.stderr, flush=True)
    if name == "sleep":
        time.sleep(60)
    return [f"{len(notes)}: {notes[-1]}", str(os.getpid())] if name == "note" else [name]


def main():
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        answer = {"jsonrpc": "2.0", "id": message["id"]}
        if message.get("params", {}).get("name") == "refuse":
            answer["error"] = {"code": -32602, "message": "no such item"}
        else:
            answer["result"] = result_of(message["method"], message.get("params") or {})
        print(json.dumps(answer), flush=True)


if WRONG == "broken":
    raise KeyError("no till")
if WRONG == "stubborn":
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", "of-stubborn"])
if WRONG != "silent":
    main()
if WRONG in ("silent", "stubborn"):
    time.sleep(60)
