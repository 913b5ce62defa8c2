"""An expert for τ²-bench's telecom in solo mode: it looks, decides, repairs and looks again.

The expert follows the benchmark's workflow of technical support and reads only the results of
tools. With `rule_share` below 1, the expert repairs a fault that it sees with probability
`rule_share`, repairs needlessly with probability NEEDLESS, and skips a look with probability
SKIPPED. Such demonstrations leave something for GRPO to learn.
"""

import re
from typing import Any

from pipeline.environments.experts import Agent

NEEDLESS = 0.05
SKIPPED = 0.1
TODAY = "2025-02-25"  # the benchmark's date, which its policy states
PHONE_NUMBER = re.compile(r"\d{3}-\d{3}-\d{4}")
LINE = "L1002"  # the line of the benchmark's one customer
SUMMARY = "I cannot fix the issue."


class _Work:
    """The expert's work on one ticket."""

    def __init__(self, agent: Agent, ticket: str, kind: str) -> None:
        self.call = agent.call
        self._agent = agent
        self.kind = kind
        self.is_abroad = "abroad" in ticket
        number = PHONE_NUMBER.search(ticket)
        customer = self.call("get_customer_by_phone", phone_number=number[0] if number else "")
        self.customer = str(customer["customer_id"])
        lines: list[str] = customer["line_ids"]
        self.line = LINE if LINE in lines else lines[0]

    def repairs(self, is_needed: bool) -> bool:
        share = self._agent.rule_share
        needless = NEEDLESS if share < 1 else 0.0
        return self._agent.random.random() < (share if is_needed else needless)

    def looks(self) -> bool:
        return self._agent.rule_share >= 1 or self._agent.random.random() >= SKIPPED

    def check(self, tool: str, sign: str, *repairs: str, **arguments: Any) -> None:
        """Look with a tool; where its answer has the `sign` of a fault, call the tools `repairs`.

        `arguments` are those of the first repair.
        """
        if self.looks() and self.repairs(sign in str(self.call(tool))):
            self.call(repairs[0], **arguments)
            for repair in repairs[1:]:
                self.call(repair)


def expert(agent: Agent, goal: Any) -> str:
    """Work on the ticket `goal["ticket"]` of the kind `goal["kind"]`, up to the call of `done`."""
    work = _Work(agent, goal["ticket"], goal["kind"])
    if not _solves(work):
        agent.call("transfer_to_human_agents", summary=SUMMARY)
    agent.call("done")
    return ""


def _solves(work: _Work) -> bool:
    """Return whether the problem is solved; if not, the customer needs a human agent."""
    call = work.call
    text = str(work.call("check_network_status"))
    network = dict(line.split(": ", 1) for line in text.split("\n") if ": " in line)
    if work.repairs(network.get("Airplane Mode") == "ON"):
        call("toggle_airplane_mode")
    sim = network.get("SIM Card Status", "")
    if work.repairs(sim == "missing"):
        call("reseat_sim_card")
        if work.kind == "service":
            sim = "locked" if "locked" in str(call("check_sim_status")) else "active"
    if work.kind == "service":
        return not (sim.startswith("locked") and work.repairs(True)) and _has_service(work)
    if work.repairs(network.get("Mobile Data Enabled") == "No"):
        call("toggle_data")
    if work.is_abroad:
        if work.repairs(network.get("Data Roaming Enabled") == "No"):
            call("toggle_roaming")
        line = call("get_details_by_id", id=work.line)
        if work.repairs(not line["roaming_enabled"]):
            call("enable_roaming", customer_id=work.customer, line_id=work.line)
    if work.looks():
        use = call("get_data_usage", customer_id=work.customer, line_id=work.line)
        limit = float(use["data_limit_gb"]) + float(use["data_refueling_gb"])
        if work.repairs(float(use["data_used_gb"]) >= limit):
            call("refuel_data", customer_id=work.customer, line_id=work.line, gb_amount=2.0)
    work.check(
        "check_network_mode_preference",
        "2g_only",
        "set_network_mode_preference",
        mode="4g_5g_preferred",
    )
    return _has_fast_data(work) if work.kind == "mobile_data" else _sends_mms(work)


def _has_fast_data(work: _Work) -> bool:
    work.check("check_data_restriction_status", "is ON", "toggle_data_saver_mode")
    work.check("check_vpn_status", "is ON", "disconnect_vpn")
    return "Excellent" in str(work.call("run_speed_test"))


def _sends_mms(work: _Work) -> bool:
    call = work.call
    work.check("check_wifi_calling_status", "turned ON", "toggle_wifi_calling")
    if work.looks():
        granted = str(call("check_app_permissions", app_name="messaging"))
        for permission in ("sms", "storage"):
            if work.repairs(permission not in granted):
                call("grant_app_permission", app_name="messaging", permission=permission)
    work.check("check_apn_settings", "Not Set", "reset_apn_settings", "reboot_device")
    return "can send" in str(call("can_send_mms"))


def _has_service(work: _Work) -> bool:
    call = work.call
    work.check("check_apn_settings", "broken", "reset_apn_settings", "reboot_device")
    if work.looks():
        line = call("get_details_by_id", id=work.line)
        is_suspended = line["status"] == "Suspended"
        if is_suspended and line["contract_end_date"] < TODAY and work.repairs(True):
            return False
        if is_suspended and work.repairs(True):
            _pay_bill(work)
            call("resume_line", customer_id=work.customer, line_id=work.line)
            call("reboot_device")
    bar = str(call("check_status_bar"))
    return "No Signal" not in bar and "Airplane" not in bar


def _pay_bill(work: _Work) -> None:
    bills = work.call("get_bills_for_customer", customer_id=work.customer)
    overdue = [bill["bill_id"] for bill in bills if bill["status"] == "Overdue"]
    if overdue:
        work.call("send_payment_request", customer_id=work.customer, bill_id=overdue[0])
        work.call("make_payment")
