"""Agents of ten client libraries and languages, unchanged but for address and key; one table.

    python scripts/proofs/agents.py

The script makes an environment of its own beside this one (`--environment FOLDER`, half a minute),
with the client libraries, and goes on in it. Node and curl must be installed. Proven is:

- each agent of `agents_clients.py` plays with a scripted policy: one tool call, then the right
  answer, in one sequence (smolagents writes its past anew: two), and each answer of the server is
  valid by the types of OpenAI's and Anthropic's clients;
- each agent trains: GRPO steps of a tiny model with all agents in one run;
- an agent of the OpenAI SDK in the embedded airline has the same episodes and weights as the loop
  with `policy.message`, on 1 and 2 ranks, killed and resumed;
- clients that rewrite their history, ask three times at once, give up and ask again draw the same;
- the same rollout eight times has the same bits with `--deterministic`;
- the CPU time of a request (`scripts/bench/address.py`).

With `--record FOLDER`, the requests of the first part are written for the tests. The exit code is 1
if a row of the table is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.pop(0)  # this folder: a client's package is called `agents`, too
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.common import ROOT, finish_run, machine, parser_of, start_run, write_json
from scripts.proofs import agents_clients
from scripts.proofs.agents_clients import AGENTS, QUESTION, SYSTEM, Agent, Script, loop_of
from scripts.proofs.agents_recording import Exchange, fault_of, recording

PACKAGES = (
    *("openai", "anthropic", "litellm", "openai-agents", "smolagents", "langchain-openai"),
    *("langgraph", "pydantic-ai-slim[openai]", "aiohttp>=3.11,<4", "httpx"),
)
ENVIRONMENT = ROOT / "runs" / "agents-environment"
CLOSE = 1e-5  # nats, of log-probabilities where sums are rounded otherwise
SHORT = (
    "--tasks-per-step 4 --num-generations 6 --max-steps 3 --save-steps 1 --learning-rate 1e-5 "
    "--eval-tasks-per-domain 4 --eval-trials 1 --validation-steps 0 --warm-start-steps 0 "
    "--report-to none --domains desk --max-error-rate 0"
)
TASKS, GROUP = 4, 8  # of a rollout in this process
LOOPS = "scripts.proofs.agents_airline"
TRAINED = "scripts.proofs.agents_clients:play"


class Row(NamedTuple):
    """A line of the table."""

    what: str
    found: str
    holds: bool


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--model", type=Path, help="warm start of the airline (default: makes one)")
    parser.add_argument("--record", type=Path, help="write the agents' requests here")
    options = parser.parse_args(argv)
    enter(options.environment.resolve(), argv)
    where = machine()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="agents-") as temporary:
        folder = Path(temporary)
        if options.model is None and {"airline", "odd", "cost"} & {*options.parts}:
            from scripts.bench.address import warm_start

            options.model = warm_start(folder)
        print("| what | found | |\n| --- | --- | --- |", flush=True)
        for part in options.parts:
            begun = time.monotonic()
            for row in PARTS[part](folder, options):
                figures[row.what] = float(row.holds)
                held = "holds" if row.holds else "MISSED"
                print(f"| {row.what} | {row.found} | {held} |", flush=True)
            figures[f"{part}: seconds"] = round(time.monotonic() - begun)
    print("  ".join(f"{name} {value}" for name, value in (where | versions()).items()))
    print("  ".join(f"{name} {value:g}" for name, value in figures.items() if "seconds" in name))
    write_json(options.json, figures, where | versions(), vars(options))
    return int(not all(figures.values()))


# The environment


def enter(folder: Path, argv: Sequence[str]) -> None:
    """Make the environment if there is none, and start this script again in its Python."""
    python = folder / "bin" / "python"
    if Path(sys.prefix).resolve() == folder:
        return
    if not (folder / "made").is_file():
        begun = time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        [purelib] = (folder / "lib").glob("python*/site-packages")
        # What is installed here, such as torch, is there, too, behind the environment's own.
        lines = [f"import sys; sys.path.append({path!r})" for path in site.getsitepackages()]
        (purelib / "outer.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES], check=True, stderr=subprocess.DEVNULL)
        (folder / "made").touch()
        print(f"made {folder} in {time.monotonic() - begun:.0f} s", flush=True)
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    os.execv(python, [str(python), str(Path(__file__).resolve()), *argv])


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = [package.partition("[")[0].partition(">")[0] for package in PACKAGES]
    return {name: version(name) for name in names}


# Each agent plays


def play_scripted(folder: Path, options: Any) -> Iterator[Row]:
    """Each agent with a scripted policy; then again, with its requests and answers kept."""
    for agent in AGENTS.values():
        begun = time.monotonic()
        episode = scripted(agent)
        wanted = (1.0, 2, agent.sequences, "")
        found = (episode.reward, episode.num_turns, len(episode.sequences), episode.error)
        exchanges = list[Exchange]()
        scripted(agent, loop_of(agent, partial(recording, exchanges)))
        faults = list(filter(None, map(fault_of, exchanges)))
        causes = ", ".join(one.begun_by for one in episode.further)
        seconds = time.monotonic() - begun
        text = f"{agent.dialect}; {found[1]} turns, {found[2]} sequence{'s' * (found[2] > 1)}"
        text += f" ({causes})" * bool(causes) + f", {seconds:.1f} s"
        text += f"; wanted {wanted}, got {found}" * (found != wanted) + "; ".join(["", *faults])
        if options.record is not None:
            write_recording(agent, options.record, [one.recorded() for one in exchanges])
        yield Row(f"{agent.name} plays", text, found == wanted and not faults and bool(exchanges))


def scripted(agent: Agent, loop: Any = None, script: Script = ()) -> Any:
    """The episode of an agent whose policy says the script."""
    from pipeline.config.settings import RolloutSettings
    from pipeline.environments import Domain
    from pipeline.rollout.rollout import RolloutRequest
    from tests.support.helpers import make_task, rollout_of

    chat, sampler = told_by(script or agent.script)
    limits = RolloutSettings(max_turns=4, max_tokens_per_turn=256, max_tokens=4096, call_timeout=60)
    domains = {"desk": Domain(name="desk", loop=loop or loop_of(agent))}
    rollout = rollout_of(sampler, chat, domains, limits)
    [episode] = rollout([RolloutRequest(task=make_task(), trial=0, key=0)])
    return episode


def told_by(script: Script) -> tuple[Any, Any]:
    """A chat, and a sampler that says a script, in whichever conversation is asked for."""
    from pipeline.models.chat.template import Chat
    from pipeline.rollout.trajectory import Sampled
    from tests.support.helpers import ScriptedSampler

    chat = Chat(tokenizer())
    left = list(script)

    class Told(ScriptedSampler):
        def _say(self, key: int, room: int) -> Sampled:
            ids = chat.message_ids(left.pop(0))
            self.contexts[key] += ids
            return Sampled(ids=ids, logprobs=[-0.5] * len(ids), finished=True)

    return chat, Told({})


def tokenizer() -> Any:
    """A tokenizer with a token for each word of the agents."""
    from pipeline.environments import Domain
    from pipeline.models.tiny import tiny_tokenizer

    texts = [SYSTEM["content"], QUESTION, json.dumps([agent.script for agent in AGENTS.values()])]
    words = {word for text in texts for word in text.replace("\\n", " ").replace('"', " ").split()}
    return tiny_tokenizer([Domain(name="desk", words=lambda: [*words, "red"])])


def write_recording(agent: Agent, folder: Path, requests: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"script": agent.script, "sequences": agent.sequences, "requests": requests}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / f"{agent.name}.json").write_text(text + "\n", encoding="utf-8")


# Each agent trains


LENGTHS = (
    "--warm-start-steps 0 --validation-steps 0 --eval-tasks-per-domain 2 --eval-trials 1 "
    "--num-generations 6 --max-turns 4 --max-tokens-per-turn 256 --max-tokens 4096 --num-gpus 1 "
    "--learning-rate 1e-3 --report-to none"
)
PROGRAMS = {
    "curl": f"bash {agents_clients.PROGRAMS}/agent.sh",
    "node": f"node {agents_clients.PROGRAMS}/agent.js",
    "python": f"{sys.executable} {agents_clients.PROGRAMS}/global_client.py",
}


def train_all(folder: Path, options: Any) -> Iterator[Row]:
    """Runs from a model that knows two answers of each agent.

    In the first, the tasks go through the agents. In the second, programs play in processes.
    """
    teach(folder / "taught")
    count = len(AGENTS)
    flags = [
        *f"--domains clients --tasks-per-domain {count} --tasks-per-step {count}".split(),
        *("--max-steps", "2", "--environments", f"{{clients: {TRAINED}}}"),
    ]
    found = trained(flags, folder / "clients")
    for name in AGENTS:
        yield trained_row(f"{name} trains", found[name], 12)
    flags = ["--domains", ",".join(PROGRAMS), "--agents", json.dumps(PROGRAMS)]
    flags += ["--tasks", json.dumps({name: write_tasks(folder, name) for name in PROGRAMS})]
    flags += ["--reward-funcs", "scripts.proofs.agents_clients:is_blue", "--curriculum", "mixed"]
    flags += ["--max-steps", "2", "--tasks-per-step", str(len(PROGRAMS))]
    found = trained(flags, folder / "programs")
    for name in PROGRAMS:
        yield trained_row(f"{name} trains in processes of its own", found[name], 6)


def trained(flags: Sequence[str], folder: Path) -> dict[str, list[Any]]:
    """Make a run; return the episodes of its steps by the first word of their tasks."""
    model = folder.with_name("taught")
    given = [*LENGTHS.split(), "--model", str(model), "--output-dir", str(folder)]
    finish([*given, *flags], folder.with_suffix(".log"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    norms = [row["train/grad_norm"] for row in map(json.loads, lines) if "train/grad_norm" in row]
    if not norms or min(norms) == 0:
        raise RuntimeError(f"{folder.name}: gradient norms {norms}")
    found = defaultdict[str, list[Any]](list)
    for name, episodes in exact(folder).items():
        for task, trial, sequences, end in episodes if "evaluation" not in name else ():
            found[task.partition("/")[0]].append((name, trial, sequences, end))
    return found


def write_tasks(folder: Path, name: str) -> str:
    """Write tasks of a program to a file, and return its path."""
    rows = [
        {"id": f"{name}/{number}", "prompt": QUESTION, "question": QUESTION} for number in range(20)
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def trained_row(what: str, episodes: Sequence[Any], least: int) -> Row:
    rewards = defaultdict[str, set[float]](set)
    for step, _, _, (reward, *_) in episodes:
        rewards[step].add(reward)
    errors = [end[3] for *_, end in episodes if end[3]]
    mixed = sum(len(of) > 1 for of in rewards.values())
    tokens = sum(sum(map(sum, (s[2] for s in sequences))) for _, _, sequences, _ in episodes)
    text = f"{len(episodes)} episodes, {tokens} sampled tokens, {mixed} of {len(rewards)} groups"
    text += " have an advantage" + f"; {len(errors)} errors: {errors[:1]}" * bool(errors)
    return Row(what, text, len(episodes) >= least and mixed > 0 and not errors)


def teach(folder: Path) -> None:
    """Save a tiny model that plays each script, and says "red" instead of "blue" half the time."""
    import torch

    from pipeline.models.tiny import tiny_model

    sequences = {}
    for agent in AGENTS.values():
        text = json.dumps(agent.script)
        for script in (text, text.replace("blue", "red")):
            for one in scripted(agent, script=tuple(json.loads(script))).sequences:
                sequences[tuple(one.ids)] = [False] * len(one.prompt_ids) + one.loss_mask
    loaded = tokenizer()
    model = tiny_model(loaded, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = sorted(sequences.items(), key=lambda pair: len(pair[0]))
    batches = [padded(rows[start : start + 4]) for start in range(0, len(rows), 4)]
    torch.set_num_threads(os.cpu_count() or 1)
    for _ in range(40):
        for ids, mask in batches:
            logits = model(ids[:, :-1]).logits[mask[:, 1:]]
            loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    loaded.save_pretrained(folder)


def padded(rows: Sequence[Any]) -> tuple[Any, Any]:
    """Token ids and masks of sequences, [B, T], with zeros behind the shorter ones."""
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([[*of, *[0] * (longest - len(of))] for of, _ in rows])
    mask = torch.tensor([[*of, *[False] * (longest - len(of))] for _, of in rows])
    return ids, mask


# Runs of the airline


def compare_runs(folder: Path, options: Any) -> Iterator[Row]:
    """Runs with the SDK against runs with `policy.message`."""
    from scripts.proofs.same import compared

    for ranks in (1, 2):
        for is_exact in (True, False):
            name = f"{'deterministic' if is_exact else 'default'}, {ranks} rank{'s' * (ranks > 1)}"
            flags = [*SHORT.split(), "--model", str(options.model), "--num-gpus", str(ranks)]
            flags += ["--deterministic"] * is_exact
            runs = {"direct": "play_direct", "served": "play"}
            runs |= {"killed": "play"} if is_exact else {}
            for run, loop in runs.items():
                here = folder / f"{ranks}-{is_exact}-{run}"
                domains = f"{{desk: {LOOPS}:{loop}}}"
                own = [*flags, "--environments", domains, "--output-dir", str(here)]
                if run == "killed":
                    kill(own, here)
                    own += ["--resume-from-checkpoint", "latest"]
                finish(own, here.with_suffix(".log"))
            first = folder / f"{ranks}-{is_exact}-direct"
            for run in [*runs][1:]:
                other = folder / f"{ranks}-{is_exact}-{run}"
                what = f"OpenAI SDK{' killed and resumed' * (run == 'killed')}: {name}"
                if is_exact:
                    differing = [
                        line for line in compared(first, other) if "trajectories" not in line
                    ]
                    yield compared_row(what, exact(first), exact(other), differing)
                else:
                    yield close_row(what, exact(first), exact(other))


def modules() -> str:
    """Return where modules are found: here, and as this process finds them."""
    return f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"


def kill(flags: Sequence[str], folder: Path) -> None:
    """Start a run, and kill all its processes in its second step."""
    import signal

    from scripts.proofs.chaos import LIMIT_S, family, saved_step, send, still_alive

    run = start_run(flags, folder.with_suffix(".log"), script=ENTRY, PYTHONPATH=modules())
    while run.poll() is None and not saved_step(folder):
        time.sleep(0.05)
    assert run.poll() is None, "the run has ended before its kill"
    everyone = family(run.pid)
    send(signal.SIGKILL, everyone)
    assert not still_alive(everyone, LIMIT_S)


ENTRY = ROOT / "scripts" / "proofs" / "agents_run.py"


def finish(flags: Sequence[str], log: Path) -> None:
    finish_run(flags, log, script=ENTRY, PYTHONPATH=modules())


def exact(run: Path) -> dict[str, list[Any]]:
    """The episodes of a run by stage and step, of all ranks."""
    found = defaultdict[str, list[Any]](list)
    for path in sorted(run.with_name(f"{run.name}.exact").glob("*.jsonl")):
        name = path.name.partition("-rank-")[0]
        found[name] += map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {name: sorted(episodes, key=lambda e: e[:2]) for name, episodes in found.items()}


def compared_row(
    what: str,
    first: dict[str, list[Any]],
    other: dict[str, list[Any]],
    differing: list[str] | None = None,
) -> Row:
    """Compare all bits of episodes; `differing` has what else differs, if that was compared."""
    pairs = [pair for name in first for pair in zip(first[name], other[name], strict=True)]
    equal = sum(one == two for one, two in pairs)
    text = f"{equal} of {len(pairs)} episodes equal bit by bit"
    if differing is not None:
        files = f"differ: {differing[:3]}" if differing else "byte-equal"
        text += f"; weights, optimizer and metrics {files}"
    return Row(what, text, equal == len(pairs) > 0 and not differing)


def close_row(what: str, first: dict[str, list[Any]], other: dict[str, list[Any]]) -> Row:
    pairs = [pair for name in first for pair in zip(first[name], other[name], strict=True)]
    draws = [[without_logprobs(one) for one in pair] for pair in pairs]
    equal = sum(one == two for one, two in draws)
    gap = max((gap_of(one, two) for one, two in pairs), default=1.0)
    text = f"{equal} of {len(pairs)} episodes have equal ids and rewards; log-probabilities differ "
    return Row(what, text + f"by {gap:.1e} at most", equal == len(pairs) > 0 and gap <= CLOSE)


def without_logprobs(episode: Any) -> Any:
    task, trial, sequences, end = episode
    return [task, trial, [[*one[:3], one[4]] for one in sequences], end]


def gap_of(one: Any, two: Any) -> float:
    """The largest difference of log-probabilities of two episodes with equal ids."""
    pairs = [pair for a, b in zip(one[2], two[2], strict=False) for pair in zip(a[3], b[3])]  # noqa: B905
    return max((abs(a - b) for a, b in pairs), default=0.0)


# Clients that behave badly, and rollouts that are played again


def play_odd(folder: Path, options: Any) -> Iterator[Row]:
    """Rollouts in this process against those with `policy.message`."""
    from scripts.proofs import agents_airline as loops

    ways: list[tuple[str, Any, Any, int]] = [
        ("the SDK", loops.play_direct, loops.play, 0),
        ("keys, arguments, ids, results rewritten", loops.play_direct, loops.play_rewriting, 0),
        ("three requests at once", loops.play_at_once_direct, loops.play_at_once, 0),
        ("retries of the SDK after 0.5 s", loops.play_direct, loops.play_impatient, 6),
        ("retries without a header", loops.play_direct, loops.play_impatient_raw, 6),
        ("cancelled requests", loops.play_direct, loops.play_cancelling, 1),
    ]
    for is_exact in (True, False):
        for name, direct, served, num_slow in ways:
            loops.tally.clear()
            first, wanted = rolled(options.model, direct, is_exact, 0)
            # The sampler waits until each episode that plays at once has given up twice.
            least = 3 * (GROUP if is_exact else TASKS * GROUP) if num_slow == 1 else 0
            other, count = rolled(options.model, served, is_exact, num_slow, least)
            what = f"{name}: {'deterministic' if is_exact else 'default'}"
            row = compared_row(what, first, other) if is_exact else close_row(what, first, other)
            text = f"{row.found}; {count} messages sampled, {wanted} wanted"
            num_requests = loops.tally["requests"]
            text += f", {num_requests} requests" * bool(num_slow)
            is_tried = num_requests > wanted or not num_slow
            yield Row(what, text, row.holds and is_tried and count == wanted)
    for name, loop in (("policy.message", loops.play_direct), ("the SDK", loops.play)):
        played = [rolled(options.model, loop, True, 0)[0]["rollout"] for _ in range(8)]
        equal = sum(all(one == other[i] for other in played) for i, one in enumerate(played[0]))
        text = f"{equal} of {len(played[0])} episodes have the same bits each time"
        yield Row(f"eight times, {name}: deterministic", text, equal == len(played[0]))


def rolled(
    model: Path, loop: Any, is_exact: bool, num_slow: int, least_requests: int = 0
) -> tuple[dict[str, list[Any]], int]:
    """The episodes of a rollout, and the number of messages that were sampled."""
    import torch

    from scripts.bench.address import requests, rollout_of
    from scripts.proofs.agents_airline import tally
    from scripts.proofs.agents_run import told

    torch.set_num_threads(1)
    rollout = rollout_of(model, loop, is_exact)
    sampler: Any = rollout.policy.sampler  # type: ignore[attr-defined]
    sampler.num_slow = num_slow
    sampler.is_held = lambda: tally["requests"] < least_requests
    episodes = rollout(requests(TASKS, GROUP))
    return {"rollout": [told(episode) for episode in episodes]}, sampler.num_messages


# The cost


def measure_cost(folder: Path, options: Any) -> Iterator[Row]:
    from scripts.bench.address import JUDGED, MOST_MS, measure

    figures = measure(options.model, [JUDGED], 5)
    ms, alone = (figures[f"{JUDGED}/{way}/ms"] for way in ("address", "policy.message"))
    text = f"{ms:.2f} ms of server and policy.message, {alone:.2f} ms of policy.message alone; "
    text += f"bound {MOST_MS} ms"
    yield Row(f"CPU of a request, {JUDGED} episodes", text, ms <= MOST_MS)


PARTS: dict[str, Callable[[Path, Any], Iterator[Row]]] = {
    "clients": play_scripted,
    "training": train_all,
    "airline": compare_runs,
    "odd": play_odd,
    "cost": measure_cost,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
