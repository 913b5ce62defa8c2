"""A taskset of verifiers v1 with a tool and two rewards."""

import verifiers.v1 as vf

COLOURS = {f"item{n}": ("blue", "red", "green")[n % 3] for n in range(30)}


class DeskData(vf.TaskData):
    colour: str


class DeskTools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def look(self, item: str) -> str:
        """Look an item up."""
        return COLOURS.get(item, "no such item")


class DeskTask(vf.Task[DeskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [DeskTools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.colour in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return 1 / (1 + len(trace.last_reply or ""))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class DeskConfig(vf.TasksetConfig):
    size: int = 30


class DeskTaskset(vf.Taskset[DeskTask, DeskConfig]):
    def load(self):
        for item, colour in list(COLOURS.items())[: self.config.size]:
            prompt = f"Which colour has the {item}?"
            yield DeskTask(
                DeskData(prompt=prompt, system_prompt="desk", colour=colour), self.config.task
            )


__all__ = ["DeskTaskset"]


if __name__ == "__main__":
    DeskTools.run()
