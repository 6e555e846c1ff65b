"""A small W&B server on this machine: takes what runs send, keeps it, and shows tests what came.

It answers what wandb asks when a run is logged, resumed or synced: GraphQL by the name of the
operation, the stream of history, summary and events, and uploads of files. What is asked and not
known here is kept in `unknown`, so that a test fails by name when another version of wandb asks for
more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import wandb
from wandb.util import get_core_path

KEY = "0" * 40
ENTITY = "someone"
USER = {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}
ANSWERS = {
    "Viewer": {"viewer": USER},
    "GetDefaultEntity": {"viewer": USER},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "FetchArtifactDigestAlgorithm": {"project": {"artifactType": None}},
    "OrganizationCoreWeaveOrganizationID": {"entity": {"organization": None}},
    "ArtifactType": {"project": {"artifact": None}},
    "XXHashDigestsEnabled": {"entity": {"xxhashDigestsEnabled": False}},
}
"""GraphQL operations that are always answered in the same way."""


def forget_wandb(patch, folder):
    """No key, no netrc, none of the developer's own W&B variables."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        patch.delenv(name)
    patch.setenv("NETRC", str(folder / "netrc"))
    patch.setenv("WANDB_CONFIG_DIR", str(folder / "wandb-settings"))


@dataclass
class ReceivedRun:
    """One run, as the server has it."""

    name: str  # its id, which W&B calls name
    # displayName, groupName, jobType, tags, commit …
    about: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    # file of the stream → number of the line → the line
    lines: dict[str, dict[int, str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # path → content
    exit_code: int | None = None
    used: list[str] = field(default_factory=list)  # ids of artifacts
    records: list[dict[str, Any]] = field(default_factory=list)  # what an offline run has written

    @property
    def rows(self):
        """Every row, in order, without W&B's own columns."""
        lines = self.lines.get("wandb-history.jsonl", {})
        rows = [json.loads(lines[number], object_hook=_numbers) for number in sorted(lines)]
        return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]

    @property
    def history(self):
        """The same without `Train/step` and `Val/step`, which must hold what `step` holds."""
        history = []
        for row in self.rows:
            again = {name for name in row if name.endswith("/step")}
            assert {row[name] for name in again} <= {row.get("step")}
            history.append({name: row[name] for name in row if name not in again})
        return history

    @property
    def summary(self):
        lines = self.lines.get("wandb-summary.json") or {0: "{}"}
        return json.loads(lines[max(lines)], object_hook=_numbers)

    @summary.setter
    def summary(self, content):
        self.lines["wandb-summary.json"] = {0: json.dumps(content)}


def _numbers(row):
    """What JSON has no numbers for W&B writes as words."""
    words = ("Infinity", "-Infinity", "NaN")
    return {name: float(value) if value in words else value for name, value in row.items()}


def offline_runs(run_folder):
    """The offline W&B runs in a folder, as the server would have them, in the order of their
    creation; records are read by the program behind `wandb leet inspect`, which itself takes
    seconds to start."""
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file"]
    folders = (run_folder / "wandb").glob("offline-run-*")
    runs = []
    for folder in sorted(folders, key=lambda folder: folder.stat().st_ctime_ns):
        file = next(folder.glob("run-*.wandb"))
        words = [*command, str(file), str(folder)]
        # wandb's service may still be writing when `finish` returns; killed runs have no exit
        for _ in range(5):
            lines = subprocess.run(words, capture_output=True, text=True, check=False).stdout
            records = [json.loads(line) for line in lines.splitlines()]
            if any(record["type"] == "exit" for record in records):
                break
            time.sleep(0.2)
        files = folder / "files"
        paths = [path for path in files.rglob("*") if path.is_file()]
        content = {str(path.relative_to(files)): path.read_bytes() for path in paths}
        runs.append(_received(folder.name.split("-")[-1], records, content))
    return runs


def _received(name, records, files):
    """The run that these records tell of."""
    run = ReceivedRun(name, files=files, records=records)
    history = run.lines.setdefault("wandb-history.jsonl", {})
    for record in records:
        content = record.get(record["type"]) or {}
        if record["type"] == "run":
            run.name = content["run_id"]
            about = {"displayName": "display_name", "groupName": "run_group"}
            about |= {"jobType": "job_type", "tags": "tags", "project": "project", "notes": "notes"}
            run.about = {name: content.get(key) for name, key in about.items()}
            run.config = content["config"]["update"]
        elif record["type"] == "history":
            history[len(history)] = json.dumps(content["item"])
        elif record["type"] == "summary":
            run.summary |= content.get("update", {})
        elif record["type"] == "exit":
            run.exit_code = content["exit_code"]
    return run


@dataclass
class ReceivedArtifact:
    """One artifact, as the server has it."""

    identity: str
    name: str
    kind: str
    run: str  # id of the run that logged it
    digest: str
    metadata: dict[str, Any]
    aliases: list[str]
    manifest: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # path → content
    committed: bool = False


class WandbStub:
    """The server; a context manager. All that came lies in its attributes."""

    def __init__(self):
        self.runs = {}
        self.artifacts = {}
        self.unknown = []
        self.views = {}
        self.projects = {"knobwise", "other"}
        self.refuse = lambda what: False
        """Operations and paths that are answered with an error that is not tried again."""
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = unquote(urlsplit(self.path).path)
                with stub._lock:
                    status, answer = stub._answered(self.command, path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _answer

            def log_message(self, *words): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # of a client that hangs up
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self):
        """What makes wandb talk to this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    @contextmanager
    def connected(self):
        """A block in which wandb, which reads the environment once in the life of a process, talks
        to this server."""
        wandb.teardown()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            yield
            wandb.teardown()

    # -- HTTP --------------------------------------------------------------------------------------

    def _answered(self, method, path, body):
        if path == "/graphql":
            return self._of_graphql(json.loads(body))
        if self.refuse(path):
            return 403, {}
        parts = path.strip("/").split("/")
        if parts[0] == "files" and parts[-1] == "file_stream":
            return 200, self._stream(self.runs[parts[-2]], json.loads(body))
        if parts[0] == "upload" and method == "PUT":
            _, kind, owner, *file = parts
            if kind == "manifest":
                self.artifacts[owner].manifest = json.loads(body)
            else:
                owners = {"run": self.runs, "artifact": self.artifacts}[kind]
                owners[owner].files["/".join(file)] = body
            return 200, {}
        if parts[0] == "sdk":  # how wandb itself is doing
            return 200, {}
        self.unknown.append(f"{method} {path}")
        return 404, {}

    def _stream(self, run, sent):
        for file, chunk in (sent.get("files") or {}).items():
            for number, line in enumerate(chunk["content"], chunk["offset"]):
                run.lines.setdefault(file, {})[number] = line
        if sent.get("complete"):
            run.exit_code = sent["exitcode"]
        return {"limits": {}}

    # -- GraphQL: one method for each operation ----------------------------------------------------

    def _of_graphql(self, request):
        name = (re.findall(r"(?:query|mutation)\s+(\w+)", request["query"]) or ["anonymous"])[0]
        if self.refuse(name):
            return 400, {"errors": [{"message": f"{name} refused"}]}
        if name in ANSWERS:
            return 200, {"data": ANSWERS[name]}
        if hasattr(self, f"_{name}"):
            return 200, {"data": getattr(self, f"_{name}")(request.get("variables") or {})}
        self.unknown.append(request["query"])
        return 400, {"errors": [{"message": f"{name} unknown"}]}

    def _RunResumeStatus(self, variables):
        entity = {"name": ENTITY}
        model = {"id": "p", "name": variables["project"], "entity": entity, "bucket": None}
        run = self.runs.get(variables["name"])
        if run is None:
            return {"model": model}
        rows, events = (run.lines.get(f"wandb-{name}.jsonl", {}) for name in ("history", "events"))
        config = {key: {"value": value} for key, value in run.config.items()}
        bucket = {
            "id": run.name,
            "name": run.name,
            "displayName": run.about["displayName"],
            "notes": None,
            "logLineCount": 0,
            "historyLineCount": len(rows),
            "eventsLineCount": len(events),
            "eventsTail": "[]",
            "historyTail": json.dumps([rows[max(rows)]] if rows else []),
            "config": json.dumps(config),
            "summaryMetrics": json.dumps(run.summary),
            "wandbConfig": json.dumps({"t": 1}),
            "tags": run.about.get("tags") or [],
        }
        return {"model": model | {"bucket": bucket}}

    def _UpsertBucket(self, variables):
        name = variables.get("name") or variables["id"]
        inserted = name not in self.runs
        run = self.runs.setdefault(name, ReceivedRun(name))
        run.about |= {key: value for key, value in variables.items() if value is not None}
        config = json.loads(variables.get("config") or "{}")
        run.config |= {key: entry["value"] for key, entry in config.items()}
        if variables.get("summaryMetrics"):
            run.summary = json.loads(variables["summaryMetrics"])
        entity = {"id": "e", "name": ENTITY}
        bucket = {
            "id": name,
            "name": name,
            "displayName": run.about.get("displayName") or name,
            "description": None,
            "config": "{}",
            "sweepName": run.about.get("sweep"),
            "project": {"id": "p", "name": variables.get("project"), "entity": entity},
            "historyLineCount": len(run.lines.get("wandb-history.jsonl", {})),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": inserted}}

    def _GetProject(self, variables):
        if variables["name"] not in self.projects:
            return {"project": None}
        found = {"id": "p", "name": variables["name"], "entityName": variables["entity"]}
        about = {"__typename": "Project", "createdAt": "2026-01-01T00:00:00Z"}
        return {"project": found | about | {"isBenchmark": False, "user": None}}

    def _View(self, variables):
        if variables["projectName"] not in self.projects:
            return {"project": None}
        wanted = variables["viewName"], variables["projectName"]
        views = self.views.values()
        found = [view for view in views if (view["name"], view["projectName"]) == wanted]
        return {"project": {"allViews": {"edges": [{"node": view} for view in found]}}}

    def _UpsertView2(self, variables):
        identity = variables.get("id") or f"id-of-{variables['name']}"
        self.views[identity] = {"id": identity, **variables}
        view = {"id": identity, "name": variables["name"]}
        return {"upsertView": {"view": view, "inserted": True}}

    def _CreateRunFiles(self, variables):
        files = [self._upload("run", variables["run"], file) for file in variables["files"]]
        return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}

    def _CreateArtifact(self, variables):
        sent = variables["input"]
        identity = f"artifact-{len(self.artifacts)}"
        self.artifacts[identity] = ReceivedArtifact(
            identity,
            name=sent["artifactCollectionName"],
            kind=sent["artifactTypeName"],
            run=sent.get("runName") or "",
            digest=sent["digest"],
            metadata=json.loads(sent.get("metadata") or "{}"),
            aliases=[alias["alias"] for alias in sent.get("aliases") or []],
        )
        sequence = {"id": "s", "latestArtifact": None}
        created = {"id": identity, "state": "PENDING", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": created}}

    def _CreateArtifactManifest(self, variables):
        owner = variables.get("artifactID") or variables["artifactManifestID"]
        manifest = {"id": owner, "file": self._upload("manifest", owner, "wandb_manifest.json")}
        answer = {"artifactManifest": manifest}
        return {"createArtifactManifest": answer, "updateArtifactManifest": answer}

    _UpdateArtifactManifest = _CreateArtifactManifest

    def _upload(self, kind, owner, name):
        address = {"uploadUrl": f"{self.url}/upload/{kind}/{owner}/{name}", "uploadHeaders": []}
        return {"id": "f", "name": name, "displayName": name, **address}

    def _CreateArtifactFiles(self, variables):
        edges = []
        for file in variables["input"]["artifactFiles"]:
            name, owner = file["name"], file["artifactID"]
            node = self._upload("artifact", owner, name)
            node |= {"storagePath": f"{owner}/{name}", "artifact": {"id": owner}}
            edges.append({"node": node | {"uploadMultipartUrls": None}})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _CommitArtifact(self, variables):
        artifact = self.artifacts[variables["artifactID"]]
        artifact.committed = True
        committed = {"id": artifact.identity, "digest": artifact.digest}
        return {"commitArtifact": {"artifact": committed}}

    def _ArtifactByID(self, variables):
        artifact = self.artifacts[variables["id"]]
        project = {"id": "p", "internalId": "1", "name": "knobwise", "entity": {"name": ENTITY}}
        collection = {"__typename": "ArtifactSequence", "name": artifact.name, "project": project}
        found = {
            "__typename": "Artifact",
            "id": artifact.identity,
            "artifactSequence": collection,
            "versionIndex": 0,
            "artifactType": {"name": artifact.kind},
            "description": None,
            "tags": [],
            "historyStep": None,
            "metadata": json.dumps(artifact.metadata),
            "ttlDurationSeconds": -2,
            "ttlIsInherited": False,
            "state": "COMMITTED",
            "size": 0,
            "digest": artifact.digest,
            "digestAlgorithm": "MANIFEST_MD5",
            "commitHash": "0",
            "fileCount": 1,
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": None,
            "aliases": [],
        }
        return {"artifact": found}

    def _UseArtifact(self, variables):
        # of a new artifact, or of one that a run has logged
        sent = variables.get("input", variables)
        self.runs[sent["runName"]].used.append(sent["artifactID"])
        return {"useArtifact": {"artifact": {"id": sent["artifactID"]}}}
