"""One example of what the model was trained on, which the snippet of the model card uses."""

import gzip
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipeline.tracking.run_files import RunData

EXAMPLE = "example.json"
Example = dict[str, Any]


def example_of(run: RunData) -> Example:
    """Return the first messages of a held-out episode, and the JSON schemas of its tools.

    Without transcripts, the example is one word without tools.
    """
    for path in sorted(run.folder.glob("trajectories/evaluation-*/step-*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            episode = json.loads(file.readline() or "{}")
        if messages := episode.get("messages"):
            asked = takewhile(lambda message: message["role"] != "assistant", messages)
            tools = run.results.get("tools", {}).get(episode["domain"], [])
            return {"messages": [*asked], "tools": tools}
    return {"messages": [{"role": "user", "content": "Hello"}], "tools": []}


def write_example(folder: Path, example: Example) -> None:
    text = json.dumps(example, ensure_ascii=False, indent=1)
    (folder / EXAMPLE).write_text(text, encoding="utf-8")
