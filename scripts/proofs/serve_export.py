"""Export a run's checkpoint, serve the folder with `transformers serve`, and ask for a message.

    python scripts/proofs/serve_export.py --run runs/NAME

The served text must equal the greedy message of the run's own rollout, for the first messages of
several held-out tasks of each domain. The server needs fastapi, openai and uvicorn:
`pip install "transformers[serving]"`. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

START_S = 300  # seconds for the start of the server
SERVE = "from transformers.cli.transformers import main; main()"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run")
    parser.add_argument("--tasks", type=int, default=8, help="tasks of each domain")
    options = parser.parse_args(argv)
    from pipeline.checkpoints.transcripts import sampled_turns
    from pipeline.commands.chat import chat_of, load_rollout
    from pipeline.environments.domains import load_domains
    from pipeline.environments.tools import tool_schemas
    from pipeline.export.checkpoint import open_checkpoint
    from pipeline.export.folder import export
    from pipeline.preflight.tasks import task_sets
    from pipeline.rollout.rollout import RolloutRequest

    checkpoint, num_equal, num_asked = open_checkpoint(options.run), 0, 0
    limits = checkpoint.config.rollout
    with TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        export(checkpoint, out, merge=True)
        with served(out) as url:
            for name, domain in load_domains(checkpoint.config.data).items():
                tasks = task_sets(checkpoint.config, domain).held_out[: options.tasks]
                rollout = load_rollout(checkpoint, domain, chat_of(checkpoint, domain), limits)
                requests = [RolloutRequest(task=task, trial=0, key=0) for task in tasks]
                for trajectory in rollout(requests, greedy=True):
                    end = next(
                        i for i, m in enumerate(trajectory.messages) if m["role"] == "assistant"
                    )
                    ours = sampled_turns(trajectory)[0][0]
                    text = rollout.chat.tokenizer.decode(ours, skip_special_tokens=True)
                    asked = {
                        "model": str(out),
                        "messages": trajectory.messages[:end],
                        "tools": tool_schemas(domain.environment),
                        "max_tokens": limits.max_tokens_per_turn,
                        "temperature": 0.0,
                        "stream": False,
                    }
                    found = post(f"{url}/v1/chat/completions", asked)["choices"][0]["message"]
                    is_equal = same(found, text, trajectory.messages[end])
                    num_equal, num_asked = num_equal + is_equal, num_asked + 1
                    if not is_equal or num_asked == 1:
                        print(f"{name}/{trajectory.task_id}\n  ours:   {text!r}\n  served: {found}")
    print(f"{num_equal} of {num_asked} first messages of {checkpoint} are equal")
    return int(num_equal < num_asked)


def same(found: dict[str, Any], text: str, message: dict[str, Any]) -> bool:
    """Return whether a served message has our text, or our parsed content and tool calls."""
    if found.get("content") == text:
        return True
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in found.get("tool_calls") or ()
    ]
    own = [call["function"] for call in message.get("tool_calls") or ()]
    is_called = calls == [(call["name"], call["arguments"]) for call in own]
    return is_called and (found.get("content") or "") == message["content"]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a model's folder, and yield the address of the server."""
    port = free_port()
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([sys.executable, "-c", SERVE, *words], env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(START_S):
            if server.poll() is not None:
                sys.exit(f"transformers serve ended with exit code {server.returncode}")
            try:
                with urlopen(f"{url}/health"):
                    break
            except URLError:
                time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
