"""The tools of airline and retail: users with addresses, and orders."""

import json

from pydantic import BaseModel
from tau2.environment.environment import Environment, ToolKit, folder_of, is_tool


class User(BaseModel):
    name: str
    address: str


class Order(BaseModel):
    user_id: str
    items: list[str]
    total: float
    status: str = "pending"


class ShopDB(BaseModel):
    users: dict[str, User]
    orders: dict[str, Order]


class ShopTools(ToolKit):
    @is_tool()
    def get_order(self, order_id: str) -> Order:
        """Look an order up."""
        if order_id not in self.db.orders:
            raise ValueError(f"Order {order_id} not found")
        return self.db.orders[order_id]

    @is_tool()
    def list_orders(self, user_id: str) -> list:
        """List a user's orders."""
        return [key for key, order in self.db.orders.items() if order.user_id == user_id]

    @is_tool(mutates=True)
    def cancel_order(self, order_id: str) -> str:
        """Cancel a pending order."""
        if self.get_order(order_id).status != "pending":
            raise ValueError("Only a pending order can be cancelled")
        self.db.orders[order_id].status = "cancelled"
        return "Cancelled."

    @is_tool(mutates=True)
    def new_order(self, user_id: str, items: list) -> Order:
        """Order items for a user."""
        order = Order(user_id=user_id, items=items, total=10.0 * len(items))
        self.db.orders[f"o{len(self.db.orders) + 1}"] = order
        return order

    @is_tool(mutates=True)
    def delete_order(self, order_id: str) -> str:
        """Delete an order."""
        del self.db.orders[order_id]
        return "Deleted."

    @is_tool(mutates=True)
    def change_address(self, user_id: str, address: str) -> User:
        """Change a user's address."""
        self.db.users[user_id].address = address
        return self.db.users[user_id]

    @is_tool()
    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfer the customer to a human agent."""
        return "Transfer successful"


def environment_of(domain: str) -> Environment:
    folder = folder_of(domain)
    db = ShopDB.model_validate(json.loads((folder / "db.json").read_text(encoding="utf-8")))
    return Environment(domain, (folder / "policy.md").read_text(encoding="utf-8"), ShopTools(db))
