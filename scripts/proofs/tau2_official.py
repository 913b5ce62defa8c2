"""Play cases on the official tau2 environment and score each case with the official evaluator.

    PYTHON312 scripts/proofs/tau2_official.py CASES RESULTS

PYTHON312 is a Python in which the checkout is installed (`pip install -e CHECKOUT`). This file
imports the standard library and tau2 alone. `scripts/proofs/tau2_conformance.py` starts it.

A line of CASES is {"domain", "task", "messages"}: the assistant's messages, each with "content"
(text or null) and "calls" (a list of {"name", "arguments"}). Calls run as in the official
orchestrator: all calls of a message, then the check for 10 errors. In telecom (solo mode) a message
with a call of `done` ends the episode and its other calls are dropped; a message without a call is
the agent's error. In airline and retail the customer ends the episode after the first message
without a call. A case whose messages run out before is cut, as by a limit of turns.

A line of RESULTS is {"reward", "parts", "texts", "errors", "end", "seconds", "failure"}: the reward
of `evaluate_simulation`, each part by itself, the text of each tool result, the number of errors,
the termination reason, the evaluator's CPU seconds, and its exception or null. A language model
judges NL_ASSERTION, so the task is evaluated with another `reward_basis`: COMMUNICATE stands for
NL_ASSERTION where `nl_assertions` and `communicate_info` exist, and otherwise NL_ASSERTION is left
out.

Parsing telecom's TOML files and describing the tools takes most of an episode's time. A case with
"timed" runs the official code as it is; the other cases copy what was parsed once, reuse the
descriptions, of which the evaluator reads the names alone, and do without garbage collection.
"""

# ruff: noqa: E402
import copy
import functools
import gc
import json
import os
import sys
import time

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise litellm downloads a file at import

from loguru import logger

logger.remove()

from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.data_model.tasks import RewardType
from tau2.domains.telecom.user_data_model import PerformanceLevel, VpnDetails
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.environment import db as databases
from tau2.environment import toolkit
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE
from tau2.registry import registry

STOP = "###STOP###"
MAX_ERRORS = 10
NOW = "2025-01-01T00:00:00"
load_file, as_tool = databases.load_file, toolkit.as_tool
parsed_once = functools.cache(load_file)
described = {}  # {function: description}


def load_quickly(path):
    return copy.deepcopy(parsed_once(path)) if str(path).endswith(".toml") else load_file(path)


def describe_quickly(method):
    key = method.__func__
    if key not in described:
        described[key] = as_tool(method)
    return described[key]


def tasks_of(domain):
    """Return {id: task} with bases that need no language model."""
    found = {}
    for task in registry.get_tasks_loader(domain)(None):
        criteria = task.evaluation_criteria
        if RewardType.NL_ASSERTION in criteria.reward_basis:
            kept = [part for part in criteria.reward_basis if part != RewardType.NL_ASSERTION]
            judged = criteria.nl_assertions and criteria.communicate_info
            if judged and RewardType.COMMUNICATE not in kept:
                kept.append(RewardType.COMMUNICATE)
            criteria.reward_basis = kept
        found[task.id] = task
    return found


def reset_shared_objects():
    """Give the class a new VpnDetails, because earlier cases of the process altered the old one."""
    TelecomUserTools.default_vpn_details = VpnDetails(
        server_address="192.168.1.1",
        protocol="OpenVPN",
        server_performance=PerformanceLevel.EXCELLENT,
    )


def play(domain, task, messages):
    """Return the trajectory, the termination reason, the tool results' texts and the errors."""
    solo = domain == "telecom"
    environment = registry.get_env_constructor(domain)(solo_mode=solo)
    state = task.initial_state
    environment.set_state(
        initialization_data=state.initialization_data if state else None,
        initialization_actions=state.initialization_actions if state else None,
        message_history=[],
    )
    environment.sync_tools()
    trajectory, texts, errors = [], [], 0
    if not solo:
        ticket = UserMessage(role="user", content="the ticket", timestamp=NOW)
        trajectory = [DEFAULT_FIRST_AGENT_MESSAGE.model_copy(deep=True), ticket]
    for message in messages:
        calls, content = message["calls"], message["content"]
        if solo and any(call["name"] == "done" for call in calls):
            trajectory.append(AssistantMessage(role="assistant", content=STOP))
            return trajectory, TerminationReason.AGENT_STOP, texts, errors
        if not calls:
            trajectory.append(AssistantMessage(role="assistant", content=content))
            if solo:
                return trajectory, TerminationReason.AGENT_ERROR, texts, errors
            trajectory.append(UserMessage(role="user", content=STOP))
            return trajectory, TerminationReason.USER_STOP, texts, errors
        made = [
            ToolCall(id=f"{len(texts) + number}", requestor="assistant", **call)
            for number, call in enumerate(calls)
        ]
        trajectory.append(AssistantMessage(role="assistant", content=content, tool_calls=made))
        for call in made:
            result = environment.get_response(call)
            errors += result.error
            texts.append(result.content)
            trajectory.append(result)
        environment.sync_tools()
        if errors >= MAX_ERRORS:
            return trajectory, TerminationReason.TOO_MANY_ERRORS, texts, errors
    return trajectory, TerminationReason.MAX_STEPS, texts, errors


def parts_of(info):
    parts = {}
    if info.db_check is not None:
        parts["DB"] = info.db_check.db_reward
    if info.env_assertions is not None:
        parts["ENV_ASSERTION"] = float(all(check.met for check in info.env_assertions))
    if info.action_checks is not None:
        parts["ACTION"] = float(all(check.action_match for check in info.action_checks))
    if info.communicate_checks is not None:
        parts["COMMUNICATE"] = float(all(check.met for check in info.communicate_checks))
    return parts


def scored(case, tasks):
    reset_shared_objects()
    timed = case.get("timed")
    gc.enable() if timed else gc.disable()
    databases.load_file = load_file if timed else load_quickly
    toolkit.as_tool = as_tool if timed else describe_quickly
    task = tasks[case["task"]]
    trajectory, reason, texts, errors = play(case["domain"], task, case["messages"])
    run = SimulationRun(
        id="case",
        task_id=task.id,
        start_time=NOW,
        end_time=NOW,
        duration=0.0,
        termination_reason=reason,
        messages=trajectory,
    )
    begun, failure, reward, parts = time.process_time(), None, None, {}
    try:
        info = evaluate_simulation(
            simulation=run,
            task=task,
            evaluation_type=EvaluationType.ALL,
            solo_mode=case["domain"] == "telecom",
            domain=case["domain"],
        )
        reward, parts = info.reward, parts_of(info)
    except Exception as error:  # an assertion fails on the state, or the replay has other results
        failure = f"{type(error).__name__}: {error}"
    return {
        "reward": reward,
        "parts": parts,
        "texts": texts,
        "errors": errors,
        "end": reason.value,
        "seconds": time.process_time() - begun,
        "failure": failure,
    }


def main(cases, results):
    tasks = {}
    with open(cases, encoding="utf-8") as lines, open(results, "w", encoding="utf-8") as out:
        for number, line in enumerate(lines):
            if number % 50 == 0:
                gc.collect()
            case = json.loads(line)
            domain = case["domain"]
            if domain not in tasks:
                tasks[domain] = tasks_of(domain)
            out.write(json.dumps(scored(case, tasks[domain])) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
