"""An agent as a program without a client library: it calls tools and asks the customer."""

import json
import os
import sys
import urllib.request
from typing import Any


def post(path: str, body: Any) -> Any:
    url = os.environ["OPENAI_BASE_URL"] + path
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def main() -> None:
    task = json.loads(sys.stdin.readline())
    messages = task["prompt"]
    while True:
        body = {"model": "policy", "messages": messages, "tools": task["tools"]}
        message = post("/chat/completions", body)["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            function = call["function"]
            answer = post("/tools/" + function["name"], json.loads(function["arguments"]))
            result = {"role": "tool", "tool_call_id": call["id"], "content": answer["content"]}
            messages.append(result)
        if not message.get("tool_calls"):
            said = post("/reply", {"content": message["content"]})["content"]
            if said is None:
                print(message["content"])
                return
            messages.append({"role": "user", "content": said})


main()
