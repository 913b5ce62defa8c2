"""A customer-service agent in OpenAI's SDK: `serve` is the agent, and a run trains it as it is.

pip install openai aiohttp
python pipeline/run.py --config smollm2_orders --agents '{orders: examples.openai_agent:play}' \
    --num-gpus 2

It plays any domain that has an environment, such as airline. As a program of its own, it has a
process for each episode: --agents '{orders: "python examples/openai_agent.py"}'
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from openai import OpenAI

Text = Callable[[str], str | None]
MODEL = os.environ.get("MODEL", "policy")  # a run takes any name


def serve(
    client: OpenAI, messages: list[Any], tools: Any, call: Callable[[str, str], str], reply: Text
) -> str:
    """Let the model call tools and talk to the customer; return the last message."""
    while True:
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message)
        for wanted in message.tool_calls or []:
            result = call(wanted.function.name, wanted.function.arguments)
            messages.append({"role": "tool", "tool_call_id": wanted.id, "content": result})
        if not message.tool_calls:
            said = reply(message.content or "")
            if said is None:  # the customer has gone
                return message.content or ""
            messages.append({"role": "user", "content": said})


# The door of a run: it has the tools and the customer of the domain.

CLIENT = OpenAI(base_url="http://unused", api_key="unused")  # one for all episodes: it takes 30 ms


def play(policy: Any, task: Any) -> str:
    def call(name: str, arguments: str) -> str:
        return policy.wait(policy.call(name, arguments))["content"]

    def reply(text: str) -> str | None:
        return policy.wait(policy.reply(text))

    client = CLIENT.with_options(base_url=policy.base_url, api_key=policy.api_key)
    return serve(client, list(task.prompt), policy.tools, call, reply)


# The door of a process: the task comes as a line of JSON, and the address is in OPENAI_BASE_URL.


def post(path: str, body: str) -> Any:
    with urlopen(f"{os.environ['OPENAI_BASE_URL']}/{path}", body.encode()) as response:
        return json.load(response)["content"]


def main() -> None:
    def call(name: str, arguments: str) -> str:
        return post(f"tools/{quote(name, safe='')}", arguments)

    def reply(text: str) -> str | None:
        return post("reply", json.dumps({"content": text}))

    task = json.loads(sys.stdin.readline())
    print(serve(OpenAI(), task["prompt"], task["tools"], call, reply))


if __name__ == "__main__":
    main()
