"""A miniature of a checkout of sierra-research/tau2-bench: same shape, own code and data.

`src/` has the code, and `write` writes the data files beside a copy of the code.
"""

import json
import shutil
from pathlib import Path
from typing import Any

ORDERS = {
    "o1": {"user_id": "ada", "items": ["lamp"], "total": 1500.0},
    "o2": {"user_id": "ada", "items": ["desk", "chair"], "total": 80.0, "status": "delivered"},
    "o3": {"user_id": "bob", "items": [], "total": 0.0},
}
SHOP = {
    "users": {n: {"name": n.title(), "address": f"1 {n} road"} for n in ("ada", "bob")},
    "orders": ORDERS,
}
TRANSFER = ("transfer_to_human_agents", {"summary": "asked"})
CANCEL, FAIL = ("cancel_order", {"order_id": "o1"}), ("cancel_order", {"order_id": "o2"})
MOVE = ("change_address", {"user_id": "bob", "address": "42 Elm"})
BUY = ("new_order", {"user_id": "bob", "items": ["lamp", "desk"]})
LOOK, DELETE = ("get_order", {"order_id": "o1"}), ("delete_order", {"order_id": "o3"})
PLANE, VPN, SIM, LINE = (
    ("airplane_mode_on", "turn_airplane_mode_on", ("toggle_airplane_mode", {})),
    ("bad_vpn", "break_vpn", ("disconnect_vpn", {})),
    ("lock_sim_card_pin", "lock_sim", TRANSFER),
    ("overdue_bill_suspension", "suspend", ("resume_line", {"line_id": "L1"})),
)
Calls = tuple[tuple[str, dict[str, Any]], ...]


def shop_task(number: int, basis: str, calls: Calls, **criteria: Any) -> dict[str, Any]:
    actions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    known = {"actions": actions, "reward_basis": ["DB", basis], **criteria}
    instructions = {"reason_for_call": f"Reason {number}", "task_instructions": "Be brief."}
    instructions |= {"known_info": "You are Ada and your id is ada."} if number > 2 else {}
    return {
        "id": str(number),
        "user_scenario": {"instructions": instructions},
        "evaluation_criteria": known,
    }


def phone_task(kind: str, *faults: tuple[str, str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    solvable = SIM not in faults
    starts = [
        {
            "env_type": "assistant" if fault is LINE else "user",
            "func_name": fault[1],
            "arguments": {"line_id": "L1"} if fault is LINE else {},
        }
        for fault in faults
    ]
    works = {"env_type": "user", "func_name": "assert_works", "arguments": {"expected": solvable}}
    actions = [
        {
            "name": fault[2][0],
            "arguments": fault[2][1],
            "requestor": "assistant" if fault is LINE else "user",
        }
        for fault in faults
    ]
    transfer = {"name": TRANSFER[0], "arguments": {}, "compare_args": []}
    return {
        "id": f"[{kind}_issue]{'|'.join(fault[0] for fault in faults)}[PERSONA:None]",
        "user_scenario": {"instructions": {"task_instructions": "They want it to work."}},
        "ticket": "The phone does not work.",
        "initial_state": {"initialization_actions": starts},
        "evaluation_criteria": {
            "actions": actions if solvable else [transfer],
            "env_assertions": [works],
            "reward_basis": ["ENV_ASSERTION"] + ["ACTION"] * (not solvable),
        },
    }


TASKS = {
    "airline": [
        shop_task(0, "COMMUNICATE", ()),
        shop_task(1, "COMMUNICATE", (LOOK, CANCEL)),
        shop_task(2, "COMMUNICATE", (TRANSFER,)),
        shop_task(3, "COMMUNICATE", (LOOK,), communicate_info=["1500", "Lamp"]),
        shop_task(4, "COMMUNICATE", (BUY, DELETE)),
    ],
    "retail": [
        shop_task(0, "NL_ASSERTION", (MOVE,), nl_assertions=["Tells it."], communicate_info=["42"]),
        shop_task(1, "NL_ASSERTION", (FAIL, BUY)),  # the first gold call fails by design
        shop_task(2, "NL_ASSERTION", (), nl_assertions=["Refuses."]),
        shop_task(3, "NL_ASSERTION", (BUY, CANCEL, MOVE), communicate_info=["20.0"]),
    ],
    "telecom": [
        phone_task("mms", PLANE, VPN),
        phone_task("mobile_data", VPN),
        phone_task("mms", PLANE, VPN, LINE),
        phone_task("service", LINE),
        phone_task("service", PLANE, SIM),
        phone_task("service", PLANE, LINE),
    ],
}
TEST = {"airline": (2, 4), "retail": (2, 3), "telecom": (0, 4)}


def write(path: Path) -> Path:
    """Write the checkout into the new folder `path`; return `path`."""
    source = Path(__file__).parent / "src"
    shutil.copytree(source, path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for tools in ("", "_tools"):
        guidelines = path / "data/tau2/user_simulator" / f"simulation_guidelines{tools}.md"
        guidelines.parent.mkdir(parents=True, exist_ok=True)
        guidelines.write_text(f"# Play a customer{tools}.\n<PERSONA_GUIDELINES>", encoding="utf-8")
    for name, tasks in TASKS.items():
        folder = path / "data" / "tau2" / "domains" / name
        folder.mkdir(parents=True)
        ids = [task["id"] for task in tasks]
        test = [ids[number] for number in TEST[name]]
        splits = {"train": [i for i in ids if i not in test], "test": test, "base": ids}
        files = {"tasks.json": tasks, "split_tasks.json": splits, "db.json": SHOP}
        texts = {file: json.dumps(value) for file, value in files.items()}
        texts["policy.md"] = "Follow the rules."
        if name == "telecom":
            texts["split_tasks.json"] = json.dumps({**splits, "train": ids[1:3], "full": ids})
            texts |= {"db.toml": "[lines.L1]\npaid = true\n", "user_db.toml": "[phone.apn]\n"}
            texts |= {"main_policy_solo.md": "Help.", "tech_support_workflow_solo.md": "Look."}
            texts |= {"main_policy.md": "Help by talking.", "tech_support_manual.md": "Ask."}
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    return path
