"""A stand-in of the Hugging Face hub: one repository of models, over HTTP, without xet."""

import base64
import json
from http.server import ThreadingHTTPServer
from typing import Any

from tests.support import http


class Hub(ThreadingHTTPServer):
    """Keeps what clients send; `files` has the content of the repository by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}  # of LFS, by SHA-256
        self.created: list[dict[str, Any]] = []
        self.calls: list[str] = []  # method and path of each request
        self.tokens: set[str] = set()


class Handler(http.Handler):
    server: Hub

    def _answer(self, value: Any) -> None:
        self.send(json.dumps(value), Content_Type="application/json")

    def _body(self) -> bytes:
        self.server.calls.append(f"{self.command} {self.path}")
        self.server.tokens.add(self.headers.get("Authorization", ""))
        return self.body()

    def do_GET(self) -> None:
        self._body()
        rows = [{"type": "file", "path": p, "oid": "0", "size": 1} for p in self.server.files]
        siblings = [{"rfilename": path} for path in self.server.files]
        is_tree = "/tree/" in self.path
        self._answer(rows if is_tree else {"id": "me/desk", "sha": "0" * 40, "siblings": siblings})

    def do_PUT(self) -> None:
        body = self._body()
        self.server.objects[self.path.rpartition("/")[2]] = body
        self._answer({})

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.url}/me/{hub.created[-1]['name']}"})
        elif self.path.endswith("/objects/batch"):
            wanted = json.loads(body)["objects"]
            upload = {o["oid"]: {"upload": {"href": f"{hub.url}/put/{o['oid']}"}} for o in wanted}
            self._answer({"objects": [{**o, "actions": upload[o["oid"]]} for o in wanted]})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {p: "lfs" if p.endswith(".safetensors") else "regular" for p in paths}
            files = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
                elif line["key"] == "deletedFile":
                    del hub.files[value["path"]]
            self._answer({"commitUrl": f"{hub.url}/me/desk/commit/1", "commitOid": "1" * 40})
        else:
            self._answer({"errors": [], "warnings": []})
