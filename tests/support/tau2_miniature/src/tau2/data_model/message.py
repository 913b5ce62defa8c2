from pydantic import BaseModel


class ToolCall(BaseModel):
    id: str = ""
    name: str
    arguments: dict
    requestor: str = "assistant"


class ToolMessage(BaseModel):
    content: str
    error: bool
