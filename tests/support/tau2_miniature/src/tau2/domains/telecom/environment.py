"""Lines of a customer, and the customer's phone, whose `default_vpn_details` is a trap."""

import tomllib

from pydantic import BaseModel
from tau2.environment.environment import Environment, ToolKit, folder_of, is_tool


class Line(BaseModel):
    paid: bool = True
    roaming: bool = True


class TelecomDB(BaseModel):
    lines: dict[str, Line]


class VpnDetails(BaseModel):
    performance: str = "excellent"


class Phone(BaseModel):
    network: bool = True
    airplane_mode: bool = False
    sim_locked: bool = False
    vpn: VpnDetails | None = None
    apn: dict = {}


class PhoneDB(BaseModel):
    phone: Phone


class TelecomTools(ToolKit):
    def suspend(self, line_id: str) -> None:
        self.db.lines[line_id].paid = False

    @is_tool()
    def get_line(self, line_id: str) -> Line:
        """Look a line up."""
        return self.db.lines[line_id]

    @is_tool(mutates=True)
    def resume_line(self, line_id: str) -> str:
        """Resume a suspended line."""
        self.db.lines[line_id].paid = True
        return "Resumed."

    @is_tool()
    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfer the customer to a human agent."""
        return "Transfer successful"


class PhoneTools(ToolKit):
    default_vpn_details = VpnDetails()  # one object of the class

    def turn_airplane_mode_on(self) -> None:
        self.db.phone.airplane_mode = True

    def lock_sim(self) -> None:
        self.db.phone.sim_locked = True

    def break_vpn(self) -> None:
        self.connect_vpn()
        self.db.phone.vpn.performance = "poor"

    @is_tool(mutates=True)
    def connect_vpn(self) -> str:
        """Connect the VPN."""
        self.db.phone.vpn = self.default_vpn_details
        return f"Connected: {self.db.phone.vpn.performance}"

    @is_tool(mutates=True)
    def disconnect_vpn(self) -> str:
        """Disconnect the VPN."""
        self.db.phone.vpn = None
        return "Disconnected."

    @is_tool(mutates=True)
    def toggle_airplane_mode(self) -> str:
        """Switch the airplane mode."""
        self.db.phone.airplane_mode = not self.db.phone.airplane_mode
        return f"Airplane mode: {self.db.phone.airplane_mode}"

    @is_tool(mutates=True)
    def set_apn(self, apn: dict) -> str:
        """Set the access point."""
        self.db.phone.apn = apn
        return "Set."

    def assert_works(self, expected: bool) -> bool:
        phone = self.db.phone
        slow = phone.vpn is not None and phone.vpn.performance == "poor"
        proxy = phone.apn.get("proxy")  # fails if `set_apn` got a number
        works = phone.network and not (phone.airplane_mode or phone.sim_locked or slow or proxy)
        return works == expected


def get_environment(solo_mode: bool = False, policy_type: str = "manual") -> Environment:
    folder = folder_of("telecom")
    solo = "_solo" if solo_mode else ""
    files = (f"main_policy{solo}.md", f"tech_support_{policy_type}{solo}.md")
    policy = "\n".join((folder / file).read_text(encoding="utf-8") for file in files)
    db, user_db = (
        tomllib.loads((folder / file).read_text(encoding="utf-8"))
        for file in ("db.toml", "user_db.toml")
    )
    tools = TelecomTools(TelecomDB.model_validate(db))
    user_tools = PhoneTools(PhoneDB.model_validate(user_db))
    environment = Environment("telecom", policy, tools, user_tools)
    environment.solo_mode = solo_mode
    return environment
