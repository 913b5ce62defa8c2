"""Train with language models as customers, behind a real server, through kills and outages.

    python scripts/proofs/llm_customer.py --tau2 CHECKOUT

A real server (`transformers serve`, or vLLM with `--vllm PYTHON`) serves a tiny random model. A
proxy between the runs and the server counts the calls and makes faults. Proven is:

- temperature and seed arrive: equal answers at temperature 0, other answers for other seeds at 1;
- a run of τ²-bench's airline that is killed and resumed `--kills` times ends with the same SHA-256
  sums (parameters, metrics.jsonl) as the undisturbed run, and asks for no answer that was on disk;
- the proxy answers 429 for `--busy` seconds, is gone for ten seconds, and comes back: the run ends
  as the undisturbed one, with one line for each event;
- the server plays the agent (`evaluate --agent-url`) on the same tasks.

`transformers serve` needs fastapi, openai and uvicorn: `pip install "transformers[serving]"`. The
exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.environments.language_models.language_model import key_of
from scripts.bench.common import finish_run, machine, parser_of, start_run, write_json
from scripts.proofs.chaos import digests, family, ranks_of, send, still_alive
from scripts.proofs.ranks import free_port
from tests.support.endpoint import ChatServer, serving

SERVE = "from transformers.cli.transformers import main; main()"
NAME = "customer"  # the model's name at the server
SHORT = {"max_tokens": 16}  # a random model does not stop by itself
GONE_S = 10.0
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}
"""
RUN = "--config tau2_three_smoke --domains airline --max-steps 4 --save-steps 1 "
RUN += "--tasks-per-step 4 --num-generations 4 --max-turns 4 --eval-tasks-per-domain 8 "
RUN += "--eval-trials 1 --report-to none --deterministic --customer-model " + NAME
LINES = ("does not answer", "answers again")


class Proxy(ChatServer):
    """Forwards calls to the real server at `url`, and counts them by the key of their answer."""

    real = ""

    def forward(self, body: dict[str, Any]) -> dict[str, Any]:
        found = post(f"{self.real}/v1/chat/completions", {**body, **SHORT})
        message: dict[str, Any] = found["choices"][0]["message"]
        return {name: of for name, of in message.items() if of}

    def asked(self) -> list[str]:
        with self.lock:
            return [key_of_body(json.loads(text)) for text in self.paid.elements()]


def post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)


def key_of_body(body: dict[str, Any]) -> str:
    """The key under which a run keeps the answer to a call."""
    names = ("model", "temperature", "seed", "messages")
    return key_of(*(body[name] for name in names), body.get("tools", []))


def keys_on_disk(run: Path) -> set[str]:
    lines = [
        line
        for path in (run / "customers").glob("*.jsonl")
        for line in path.read_bytes().rpartition(b"\n")[0].splitlines()
    ]
    return {json.loads(line)["key"] for line in lines}


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tau2", type=Path, required=True, help="checkout of tau2-bench")
    parser.add_argument("--vllm", type=Path, help="Python with vLLM, to serve with vLLM")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--busy", type=float, default=60.0, help="seconds of status 429")
    parser.add_argument("--num-gpus", type=int, default=2, help="ranks")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="llm-customer-") as temporary:
        folder = Path(temporary)
        make_model(folder / NAME)
        with served(folder / NAME, options.vllm) as real:
            figures, faults = prove(folder, real, options)
    print("\n".join(f"{name:<44}{value}" for name, value in figures.items()))
    where = machine() | {
        "num_ranks": options.num_gpus,
        "server": "vLLM" if options.vllm else "transformers serve",
    }
    print("  ".join(f"{name} {value}" for name, value in where.items()))
    print("\n".join(faults))
    write_json(options.json, figures, where, vars(options))
    return int(bool(faults))


def prove(folder: Path, real: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    faults = temperature_faults(real)
    flags = [*RUN.split(), "--tau2", str(options.tau2), "--num-gpus", str(options.num_gpus)]
    with proxy(real) as server:
        flags += ["--customer-url", server.url]
        port = server.server_port
        begun = time.perf_counter()
        finish(flags, folder / "undisturbed")
        figures: dict[str, Any] = {"undisturbed: seconds": round(time.perf_counter() - begun)}
        paid = server.asked()
        figures["undisturbed: calls, different calls"] = f"{len(paid)}, {len(set(paid))}"
        expected = digests(folder / "undisturbed")
        server.paid.clear()
        figures |= killed(flags, folder / "killed", server, len(paid), options.kills, faults)
        faults += differences("killed", expected, digests(folder / "killed"))
    figures |= disturbed(flags, folder / "disturbed", real, port, options.busy, faults)
    faults += differences("disturbed", expected, digests(folder / "disturbed"))
    figures |= agent(folder / "undisturbed", folder / "agent", real, faults)
    return figures, faults


def differences(run: str, expected: dict[str, str], found: dict[str, str]) -> list[str]:
    return [f"{run}: {what} differ" for what, of in expected.items() if found.get(what) != of]


def temperature_faults(real: str) -> list[str]:
    """Ask one question at two temperatures with several seeds."""

    def answers(temperature: float, seeds: Sequence[int]) -> list[str]:
        asked = {"model": NAME, "messages": [{"role": "user", "content": "Hello."}], **SHORT}
        bodies = [{**asked, "temperature": temperature, "seed": seed} for seed in seeds]
        found = [post(f"{real}/v1/chat/completions", body) for body in bodies]
        return [of["choices"][0]["message"]["content"] for of in found]

    greedy = answers(0.0, range(5))
    sampled = answers(1.0, [*range(5), *range(5)])
    print(f"temperature 0: {greedy[0]!r}\ntemperature 1: {sampled[0]!r}", flush=True)
    faults = [] if len(set(greedy)) == 1 else ["temperature 0: answers differ"]
    faults += [] if len(set(sampled[:5])) == 5 else ["temperature 1: equal answers"]
    return faults + (
        [] if sampled[:5] == sampled[5:] else ["temperature 1: the seed has no effect"]
    )


def finish(flags: Sequence[str], run: Path) -> str:
    """Make a whole run in a folder, and return its output."""
    return finish_run([*flags, "--output-dir", str(run)], run.with_suffix(".log"))


def killed(
    flags: Sequence[str], run: Path, server: Proxy, total: int, kills: int, faults: list[str]
) -> dict[str, Any]:
    """Kill a run after equal shares of its calls, resume it each time, and let it end."""
    flags = [*flags, "--resume-from-checkpoint", "auto"]
    saved = set[str]()
    twice = 0
    lost = 0
    for number in range(1, kills + 1):
        process = start_run([*flags, "--output-dir", str(run)], run.with_suffix(".log"))
        while process.poll() is None and sum(server.paid.values()) < total // (kills + 1):
            time.sleep(0.01)
        if process.poll() is not None:
            faults.append(f"kill {number}: the run had ended with exit code {process.returncode}")
            return {}
        every = family(process.pid)
        ranks = ranks_of(every[0])
        send(signal.SIGKILL, ranks if number % 2 else ranks[:1])
        faults += [f"kill {number}: process {p.pid} is alive" for p in still_alive(every, 60.0)]
        process.wait()
        asked = server.asked()
        twice += len([key for key in asked if key in saved])
        saved = keys_on_disk(run)
        lost += len({*asked} - saved)
        server.paid.clear()
        print(f"kill {number}: {len(saved)} answers on disk", flush=True)
    finish(flags, run)
    twice += len([key for key in server.asked() if key in saved])
    if twice:
        faults.append(f"{twice} answers that were on disk were asked for again")
    return {
        "killed: kills": kills,
        "killed: answers on disk asked for again": twice,
        "killed: answers on their way at a kill": lost,
    }


def disturbed(
    flags: Sequence[str], run: Path, real: str, port: int, busy_s: float, faults: list[str]
) -> dict[str, Any]:
    """Make a run whose endpoint is busy, then gone, then back."""
    flags = [*flags, "--call-timeout", str(6 * busy_s)]
    output: list[str] = []
    thread = threading.Thread(target=lambda: output.append(finish(flags, run)))
    with proxy(real, port) as server:
        thread.start()
        while thread.is_alive() and sum(server.paid.values()) < 20:
            time.sleep(0.02)
        with server.lock:
            server.faults += [429] * 1_000_000
        time.sleep(busy_s)
    time.sleep(GONE_S)
    with proxy(real, port):
        thread.join()
    if not output:
        faults.append("disturbed: the run has failed; its log:")
        faults.append(run.with_suffix(".log").read_text()[-3000:])
        return {}
    found = {name: output[0].count(name) for name in LINES}
    if set(found.values()) != {1}:
        faults.append(f"disturbed: not one line for each event: {found}")
    shown = [line for line in output[0].splitlines() if line.startswith("customer: ")]
    print("\n".join(shown), flush=True)
    return {f"disturbed: lines '{name}'": count for name, count in found.items()}


def agent(run: Path, out: Path, real: str, faults: list[str]) -> dict[str, Any]:
    """Let the served model be the agent on the held-out tasks of a run."""
    with proxy(real) as server:
        words = f"--agent-url {server.url} --agent-model {NAME} --customer-url {server.url} "
        words += f"--output-dir {out} --report-to none"
        command = [sys.executable, "-m", "pipeline", "evaluate", str(run), *words.split()]
        played = subprocess.run(command, capture_output=True, text=True, check=False)
    if played.returncode:
        faults.append(f"agent: exit code {played.returncode}: {played.stderr[-2000:]}")
        return {}
    entry = json.loads((out / "results.json").read_text())["agents"][NAME]
    if "failed" in entry:
        faults.append(f"agent: {entry['failed']}")
    found = entry.get("success", {})
    return {f"agent: success in {domain}": of["mean"] for domain, of in found.items()}


@contextmanager
def proxy(real: str, port: int = 0) -> Iterator[Proxy]:
    with serving(lambda body: server.forward(body), port, Proxy) as server:
        assert isinstance(server, Proxy)
        server.real = real
        yield server


def make_model(folder: Path) -> None:
    """Write a tiny random model that answers with words.

    `transformers serve` samples, at a temperature above 0, only with `do_sample` in the folder.
    """
    import torch

    from pipeline.models.lora import quiet
    from pipeline.models.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=1)
    model.config.max_position_embeddings = 32768
    tokenizer.chat_template = TEMPLATE.strip()
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with torch.no_grad(), quiet():
        silent = [*range(256), *tokenizer.all_special_ids, *tokenizer.added_tokens_encoder.values()]
        model.get_input_embeddings().weight[silent] = 0
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def served(folder: Path, vllm: Path | None) -> Iterator[str]:
    """Serve a model's folder under the name NAME, and yield the server's address."""
    port = free_port()
    words = ["--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if vllm is None:
        command = [sys.executable, "-c", SERVE, "serve", NAME, *words, "--device", "cpu"]
    else:
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [str(vllm.parent / "vllm"), "serve", str(folder), "--served-model-name", NAME]
        command += ["--dtype", "float32", "--max-model-len", "32768", "--enforce-eager", *words]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    log = folder.with_suffix(".server.log").open("w")
    server = subprocess.Popen(
        command, cwd=folder.parent, env=env, stdout=log, stderr=log, start_new_session=True
    )
    try:
        for _ in range(300):
            if server.poll() is not None:
                sys.exit(f"the server ended: {Path(log.name).read_text()[-3000:]}")
            with suppress(URLError, ConnectionError), urlopen(f"http://127.0.0.1:{port}/health"):
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        log.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
