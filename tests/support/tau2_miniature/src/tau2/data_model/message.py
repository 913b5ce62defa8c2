from pydantic import BaseModel


class ToolCall(BaseModel):
    id: str = ""
    name: str
    arguments: dict
    requestor: str = "assistant"


class AssistantMessage(BaseModel):
    role: str
    content: str


class ToolMessage(BaseModel):
    content: str
    error: bool
