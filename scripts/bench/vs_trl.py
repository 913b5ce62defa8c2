"""Compare our trainer with `trl.GRPOTrainer` (`environment_factory`) on the same tasks.

    python scripts/bench/vs_trl.py --json vs_trl.json

Both trainers start from the same warm-started model and run their own loops in their own processes.
Units of both alternate: one trainer waits while the other works. Each ratio compares two
consecutive units. Equal for both: the tasks of each step (tasks without a user), group size, turns
per episode, tokens per turn, temperature 1, fp32 (bf16 on CUDA), threads, loss dapo with equal
clips, no KL, no entropy bonus, AdamW with equal learning rate, clip norm, zero-std groups kept,
padded tokens per micro-batch.

- step: whole optimizer steps. TRL uses the fastest of `--trl-settings`, each written as
  per_device_train_batch_size:steps_per_generation.
- sampling: episodes of four tool turns with given messages. Both trainers do all the work of
  sampling, and then use the given tokens: ours in `RowSampler.sample_tokens`, TRL in a logits
  processor. Each episode calls a look-up of its domain four times, then says "Done.". The episodes
  of a group differ from the third call on. Our sampler computes a common prefix once.
- update: one update on the trajectories of one step. TRL gets the trajectories from a
  `rollout_func`, whose time is not counted.
- memory: peak memory minus memory after the imports. New processes run two steps with given
  messages on a 60 M model.
- curve: rewards of `--curve-steps` steps from the same model; only if named in `--parts`.

With `--model FOLDER --sums N`, the tasks are single-turn sums with an exact answer, of at most N
sampled tokens: a real model in its own conversation, without tools. Our micro-batches then have our
own default size, and `--parts step` compares processor seconds, because other processes may run:

    python scripts/bench/vs_trl.py --model FOLDER --sums 12 --parts step --ranks 1 --steps 3 \\
        --tasks-per-step 8 --trl-settings 64:1 16:4

With `--vllm`, ours samples with vLLM (in the environment of scripts/proofs/setup_vllm.sh), and TRL
with `generate`: on CPUs, TRL 1.16's own colocated vLLM fails at its first transfer of weights.

After a transfer, TRL samples one more message, and TRL does not answer a malformed call. If the
numbers of tokens per episode differ, compare the row of sampled tokens per second.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

from common import machine, parser_with_device, write_json
from sums_task import write_sums
from turns import PLAIN_RUN, Side, Work, complete, in_turns, make_model, random_model

PARTS = ("step", "sampling", "update", "memory", "curve")
TARGETS = {"step": 4.0, "sampling": 6.0, "update": 2.0}  # least ratios on one rank
MEMORY_TARGET = 0.6  # largest ratio to TRL's
MEMORY_SHAPE = {  # a Qwen3 of 60 M parameters
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 11},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32768},
}
# Pairs of gradient_accumulation_steps and steps_per_generation; small batches need less padding.
SWEEP = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 8), (24, 1), (24, 3), (24, 24))
CURVE_END = 10  # number of last steps whose mean reward is the end of a curve
QUANTITIES = (  # key, label, and the better direction
    ("s", "s", "less"),
    ("sample_s", "  of it sampling, s", "less"),
    ("rest_s", "  of it the rest, s", "less"),
    ("cpu_s", "  processor time of all ranks, s", "less"),
    ("episodes", "  episodes", ""),
    ("episodes_per_s", "  episodes/s", "more"),
    ("tokens_per_s", "  sampled tokens/s", "more"),
    ("tokens_per_episode", "  sampled tokens an episode", ""),
    ("reward", "  mean reward", ""),
    ("peak_mb", "  peak above imports, MB", "less"),
    ("whole_mb", "  peak, MB", "less"),
)
OURS = "our_side.py"
TRL = "trl_side.py"
Facts = dict[str, float]


def main(argv: list[str]) -> int:
    options = read(argv)
    where = machine(options.device)
    with TemporaryDirectory(prefix="vs-trl-") as folder:
        bench = Bench(options=options, folder=Path(folder))
        if options.parts != ["memory"]:  # which makes a model of its own
            bench.model = options.model or make_model(options, bench.folder)
        row("measured", "ours", "TRL", "ratio (range)", "target")
        row("---", "--:", "--:", "---", "---")
        for part in (part for part in PARTS if part in options.parts):
            for num_ranks in options.ranks if part not in ("memory", "curve") else [1]:
                getattr(bench, part)(num_ranks)
    settings = {**vars(options), **bench.chosen}
    write_json(options.json, bench.figures, where, settings)
    return 0


def read(argv: list[str]) -> argparse.Namespace:
    parser = parser_with_device(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:-1]))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=7, help="pairs of units that are measured")
    parser.add_argument("--tasks-per-step", type=int, default=24)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--model", help="a warm-started folder; missing: it is made first")
    parser.add_argument("--warm-start-steps", type=int, default=440, help="where it is made")
    parser.add_argument("--trl-settings", nargs="+", help="batch:steps_per_generation of the sweep")
    parser.add_argument("--microbatch-tokens", type=int, default=0, help="of ours; 0: TRL's")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="on both sides")
    parser.add_argument("--memory-tasks", type=int, default=4, help="groups of a step of memory")
    parser.add_argument("--memory-batch", type=int, default=8, help="episodes of its micro-batch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the curve")
    parser.add_argument("--curve-steps", type=int, default=40)
    parser.add_argument("--sums", type=int, default=0, help="sums of so many sampled tokens")
    parser.add_argument("--vllm", action="store_true", help="with --sums: ours samples with vLLM")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--layers", type=int, help="of random models, in place of the shape's")
    parser.add_argument("--vocab-size", type=int, help="of random models")
    options = parser.parse_args(argv)
    if options.shape != "tiny" and "curve" in options.parts:
        parser.error("curve: random weights learn nothing; leave --shape out")
    if options.shape != "tiny" and options.model is not None:
        parser.error("--model: has a shape of its own; leave --shape out")
    if options.vllm and not options.sums:
        parser.error("--vllm: needs --sums, because given messages need the own sampler")
    if options.sums and (options.model is None or {*options.parts} - {"step", "curve"}):
        parser.error("--sums: needs --model FOLDER, and has --parts step and curve")
    episodes = options.tasks_per_step * options.num_generations
    if any(options.tasks_per_step % n for n in options.ranks):
        parser.error("--tasks-per-step: every rank must play as many groups")
    if options.trl_settings is None:
        pairs = [(episodes // a, s) for a, s in SWEEP if episodes % a == 0]
        pairs = [(b, s) for b, s in pairs if b * s % options.num_generations == 0]
        options.trl_settings = [f"{b}:{s}" for b, s in pairs]
    return options


@dataclass(kw_only=True)
class Bench:
    """The parts of the benchmark, their results, and the settings chosen for TRL."""

    options: argparse.Namespace
    folder: Path
    model: str = ""
    figures: Facts = field(default_factory=dict)
    chosen: dict[str, Any] = field(default_factory=dict)
    numbers: Any = field(default_factory=count)

    def side(self, script: str, kind: str, num_ranks: int = 1, **more: Any) -> Side:
        """Start a side. `more` holds fields of Work, and flags of our pipeline under `flags`."""
        options = self.options
        name = f"{next(self.numbers)}-{script.removesuffix('.py')}"
        num_units = more.pop("num_units", options.steps + 1)
        values = {
            "model": self.model,
            "tasks-per-step": options.tasks_per_step,
            "num-generations": options.num_generations,
            "num-gpus": num_ranks,
            "max-steps": num_units + 1,
            "output-dir": self.folder / name,
            "learning-rate": options.learning_rate,
            **more.pop("flags", {}),
        }
        flags = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        domains = ["airline", "retail", "telecom"][: int(values["tasks-per-step"])]
        flags += [
            *(*PLAIN_RUN, "--entropy-coef", "0", "--no-drop-zero-std-groups"),
            *(["--gradient-checkpointing"] * options.gradient_checkpointing),
            *(["--sampler", "vllm"] * options.vllm),
            *(self.flags_of_sums() if options.sums else ["--domains", ",".join(domains)]),
        ]
        forced = more.pop("forced", options.shape != "tiny")
        fields = {"kind": kind, "num_units": num_units, "forced": forced, **more}
        work = Work(flags=flags, device=options.device, **fields)
        return Side(script, work, num_ranks, options.threads, self.folder / f"{name}.log")

    def flags_of_sums(self) -> list[str]:
        path = write_sums(self.folder / "sums.jsonl")
        most = self.options.sums
        return [
            *("--domains", "sums", "--tasks", f"{{sums: {path}}}"),
            *("--reward-funcs", "sums_task:correct", "--max-turns", "1"),
            *("--max-tokens-per-turn", str(most), "--max-tokens", str(most + 96)),
            *("--mixed-precision", "no" if self.options.device == "cpu" else "bf16"),
        ]

    def trl_settings(self, what: str, num_ranks: int) -> dict[str, int]:
        """TRL's fastest batch for steps ("seconds"), sampling ("sample_s") or updates ("rest_s").

        Batches are measured once, on one rank. On more ranks a batch that is too large is reduced.
        """
        if not self.chosen:
            self.chosen = {"sweep": {each: {} for each in self.options.trl_settings}}
            if len(self.options.trl_settings) > 1:
                self.chosen["sweep"] = {s: self.try_out(s) for s in self.options.trl_settings}
        sweep = self.chosen["sweep"]
        best = min(sweep, key=lambda setting: sweep[setting].get(what, 0.0))
        self.chosen[f"trl_{what}"] = best
        return self.settings_of(best, num_ranks)

    def settings_of(self, setting: str, num_ranks: int = 1) -> dict[str, int]:
        batch, at_once = map(int, setting.split(":"))
        episodes = self.options.tasks_per_step * self.options.num_generations
        here = episodes // num_ranks
        cut = batch if here % batch == 0 else here
        at_once = max(1, at_once * (here // cut) // (episodes // batch))
        return {"batch": cut, "steps_per_generation": at_once}

    def try_out(self, setting: str) -> Facts:
        """Measure two steps with a setting of TRL after a warm-up step; return the faster step."""
        with self.side(TRL, "step", num_units=3, **self.settings_of(setting)) as side:
            side.wait()
            found = [complete(side.unit(), "step") for _ in range(2)]
        kinds = ("seconds", "sample_s", "rest_s", "cpu_s", "padded_tokens", "peak_mb")
        best = {kind: min(facts[kind] for facts in found) for kind in kinds}
        best["whole_mb"] = max(facts["whole_mb"] for facts in found)
        said = f"step {best['seconds']:.2f} s, {best['cpu_s']:.2f} CPU s"
        print(f"TRL {setting}: {said}, {best['whole_mb']:.0f} MB", file=sys.stderr, flush=True)
        return best

    def step(self, num_ranks: int) -> None:
        compared = "cpu_s" if self.options.sums else "seconds"
        settings = self.trl_settings(compared, num_ranks)
        with self.side(TRL, "step", num_ranks, **settings) as theirs:
            padded = int(theirs.wait()["padded_tokens"])
            budget = self.options.microbatch_tokens or (0 if self.options.sums else padded)
            flags = {"max-tokens-per-microbatch": budget} if budget else {}
            with self.side(OURS, "step", num_ranks, flags=flags) as ours:
                ours.wait()
                self.compare("step", num_ranks, ours, theirs)

    def sampling(self, num_ranks: int) -> None:
        settings = self.trl_settings("sample_s", num_ranks)
        with (
            self.side(TRL, "sampling", num_ranks, forced=True, **settings) as theirs,
            self.side(OURS, "sampling", num_ranks, forced=True) as ours,
        ):
            theirs.wait()
            ours.wait()
            self.compare("sampling", num_ranks, ours, theirs)

    def update(self, num_ranks: int) -> None:
        more: dict[str, Any] = {**self.trl_settings("rest_s", num_ranks)}
        # The same episodes are used repeatedly, so the policy must not change.
        more |= {"exchange": str(self.folder), "flags": {"learning-rate": 1e-9}}
        more["microbatch_tokens"] = self.options.microbatch_tokens
        with self.side(OURS, "update", num_ranks, **more) as ours:
            ours.wait()  # Our side has written its trajectories.
            with self.side(TRL, "update", num_ranks, **more) as theirs:
                theirs.wait()
                self.compare("update", num_ranks, ours, theirs)

    def memory(self, num_ranks: int) -> None:
        options, episodes = self.options, self.options.memory_tasks * 8
        model = random_model(self.folder / "memory", options, "qwen3-0.6b", **MEMORY_SHAPE)
        flags = {"model": model, "tasks-per-step": options.memory_tasks, "num-generations": 8}
        all_at_once = episodes // options.memory_batch
        settings = {"batch": options.memory_batch, "steps_per_generation": all_at_once}
        last = {}
        for script in (TRL, OURS):
            more: dict[str, Any] = {"flags": flags, "forced": True, "num_units": 2}
            with self.side(script, "step", **{**settings, **more}) as side:
                side.wait()
                last[script] = side.unit()
            flags = {**flags, "max-tokens-per-microbatch": int(last[TRL]["padded_tokens"])}
        ours = last[OURS]
        theirs = last[TRL]
        assert ours["tokens"] == theirs["tokens"], "other work on the two sides"
        ratio = ours["peak_mb"] / theirs["peak_mb"]
        self.figures |= {"memory_vs_trl": ratio, "memory_mb_ours": ours["peak_mb"]}
        self.figures |= {"memory_mb_trl": theirs["peak_mb"]}
        target = f"<= {MEMORY_TARGET}" + ", missed" * (ratio > MEMORY_TARGET)
        row("memory: peak, MB", ours["peak_mb"], theirs["peak_mb"], f"{ratio:.2f}", target)

    def curve(self, num_ranks: int) -> None:
        num_steps = self.options.curve_steps
        settings = self.trl_settings("seconds", num_ranks)
        rewards: dict[str, list[list[float]]] = {
            OURS: [],
            TRL: [],
        }  # by side, seed, step
        for seed in self.options.seeds:
            for script, curves in rewards.items():
                more: dict[str, Any] = {"flags": {"seed": seed}, "num_units": num_steps}
                with self.side(script, "step", **{**settings, **more}) as side:
                    done = [side.wait(), *(side.unit() for _ in range(num_steps - 1))]
                curves.append([facts["reward"] / facts["episodes"] for facts in done])
        self.chosen["curves"] = rewards
        for first in range(0, num_steps, CURVE_END):
            part = slice(first, first + CURVE_END)
            means = [fmean(fmean(c[part]) for c in curves) for curves in rewards.values()]
            row(f"curve: reward from step {first + 1}", means[0], means[1])
        ends = [[fmean(c[-CURVE_END:]) for c in curves] for curves in rewards.values()]
        ours, theirs = map(fmean, ends)
        error = math.hypot(*(stdev(e) / len(e) ** 0.5 if len(e) > 1 else 0.0 for e in ends))
        self.figures |= {"curve_ours": ours, "curve_trl": theirs, "curve_standard_error": error}
        verdict = "within 2 errors" + ("" if abs(ours - theirs) <= 2 * error else ", missed")
        difference = f"{ours - theirs:+.3f} ± {error:.3f}"
        label = f"curve: last {CURVE_END} steps, {len(ends[0])} seeds"
        row(label, ours, theirs, difference, verdict)

    def compare(self, name: str, num_ranks: int, ours: Side, theirs: Side) -> None:
        """Measure both sides alternately, and print the medians of each quantity."""
        pairs = in_turns(ours, theirs, self.options.steps, name)
        if name != "step":
            assert all(a["tokens"] == b["tokens"] for a, b in pairs), "other work on the two sides"
        suffix = "" if num_ranks == 1 else f"_{num_ranks}_ranks"
        for key, label, kind in QUANTITIES:
            if name != "step" and key in ("sample_s", "rest_s"):
                continue
            mine, its = (median(pair[side][key] for pair in pairs) for side in (0, 1))
            self.figures |= {f"{name}_{key}_ours{suffix}": mine, f"{name}_{key}_trl{suffix}": its}
            remark = shown = ""
            if kind:
                better = [b[key] / a[key] if kind == "less" else a[key] / b[key] for a, b in pairs]
                ratio = median(better)
                shown = f"{ratio:.2f} ({min(better):.2f} to {max(better):.2f})"
            if key == "s":
                self.figures[f"{name}_vs_trl{suffix}"] = ratio
                label = f"{name}, {num_ranks} rank{'s' * (num_ranks > 1)}: {label}"
                missed = ", missed" if ratio < TARGETS[name] else ""
                remark = "" if num_ranks > 1 else f">= {TARGETS[name]}{missed}"
            if key == "tokens_per_s":
                self.figures[f"{name}_vs_trl_per_token{suffix}"] = ratio
            if key == "tokens_per_episode" and abs(its / mine - 1) > 0.03:
                remark = f"TRL's {its / mine - 1:+.0%}"
            row(label, mine, its, shown, remark)


def row(label: str, ours: Any, theirs: Any, ratio: str = "", target: str = "") -> None:
    """Format a line of the table."""
    cells = [cell if isinstance(cell, str) else f"{cell:.4g}" for cell in (ours, theirs)]
    line = f"| {label:<38} | {cells[0]:>8} | {cells[1]:>8} | {ratio:<22} | {target:<16} |"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
