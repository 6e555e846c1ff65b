"""`python -m campaign.clients [NAME …]`: real clients ask through `knobwise serve`, real gateways
stand before it and real servers behind it. Prints a table in Markdown.

Names are those of `CLIENTS`; without any, all run, for some three minutes. What they need is
installed, pinned, into the folder for temporary files, for some twenty the first time.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from campaign.clients.chains import CHAINS, Chain
from campaign.clients.environments import (
    NODE,
    InstallError,
    node_of,
    python_of,
    version_of,
    without_ours,
)
from campaign.clients.servers import StartError

SCRIPTS = Path(__file__).with_name("scripts")
CLIENT_S = 300
"""A script that takes longer has failed."""
FIELDS = {
    "model": "model",
    "knobs": "knobs",
    "request_id": "request id",
    "answer_id": "answer id",
    "usage": "usage",
}
"""What a case may see of an answer beside its text."""
CELL = 250
"""Characters of a cell."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Client(NamedTuple):
    """Whose requests are made, and where."""

    title: str
    package: str
    """Whose version is in the table."""
    environment: str
    """What holds the package."""
    chain: str = "plain"
    """What is asked, one of `CHAINS`."""
    script: str = ""
    """What asks, without its suffix; "" for what is named as the client."""
    runs_in: str = ""
    """The environment of the script; "" for that of the package."""


BEHIND = {"script": "real_server", "runs_in": "openai"}
CLIENTS = {
    "openai": Client("openai (Python)", "openai", "openai"),
    "openai_js": Client("openai (JavaScript)", "openai", NODE),
    "langchain": Client("langchain-openai", "langchain-openai", "langchain"),
    "litellm_sdk": Client("litellm (SDK)", "litellm", "litellm"),
    "dspy": Client("dspy", "dspy", "dspy"),
    "vercel": Client("Vercel's AI SDK", "ai", NODE),
    "pydantic_ai": Client("pydantic-ai", "pydantic-ai-slim", "pydantic_ai"),
    "openai_agents": Client("openai-agents", "openai-agents", "openai_agents"),
    "smolagents": Client("smolagents", "smolagents", "smolagents"),
    "llama_index": Client("llama-index OpenAILike", "llama-index-llms-openai-like", "llama_index"),
    "haystack": Client("haystack", "haystack-ai", "haystack"),
    "any_llm": Client("any-llm", "any-llm-sdk", "any_llm"),
    "instructor": Client("instructor", "instructor", "instructor"),
    "semantic_kernel": Client("semantic-kernel", "semantic-kernel", "semantic_kernel"),
}
for name in ("openai", "langchain", "vercel", "pydantic_ai", "openai_agents"):
    title = f"{CLIENTS[name].title}, no /v1/responses behind"
    CLIENTS[f"{name}_chats"] = CLIENTS[name]._replace(title=title, chain="chats", script=name)
CLIENTS |= {
    "litellm_gateway": Client(
        "LiteLLM proxy in front", "litellm", "litellm_proxy", "litellm", runs_in="openai"
    ),
    "transformers_serve": Client(
        "LiteLLM in front, transformers serve behind",
        "transformers",
        "transformers",
        "transformers",
        **BEHIND,
    ),
    "llama_cpp_server": Client(
        "LiteLLM in front, llama-cpp-python's server behind",
        "llama-cpp-python",
        "llama_cpp",
        "llama_cpp",
        **BEHIND,
    ),
    "llama_cpp_in_turn": Client(
        "the same with `interrupt_requests` false",
        "llama-cpp-python",
        "llama_cpp",
        "llama_cpp_in_turn",
        **BEHIND,
    ),
}


def run(name, client, chain: Chain, first):
    """Run a script; return its cases, each as it was printed."""
    environment = client.runs_in or client.environment
    if environment == NODE:
        command = node_of(SCRIPTS / f"{client.script or name}.mjs")
    else:
        # safe: the name of a script may be that of the package that it imports
        source = SCRIPTS / f"{client.script or name}.py"
        command = [python_of(environment), "-P", source]
    variables = {
        "KNOBWISE_URL": chain.url,
        "KNOBWISE_KEY": chain.key,
        "KNOBWISE_FIRST": str(first),
        "PYTHONPATH": str(SCRIPTS / "shared"),
        # no client may ask another server, nor say anything of what it does
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": chain.url,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
    }
    options = {"env": without_ours() | variables, "capture_output": True, "text": True}
    try:
        done = subprocess.run(list(map(str, command)), timeout=CLIENT_S, **options)
        printed, errors = done.stdout, done.returncode and done.stderr
    except subprocess.TimeoutExpired as error:
        printed, errors = (error.stdout or b"").decode(), f"no end within {CLIENT_S} s"
    lines = printed.splitlines()
    cases = [json.loads(line[5:]) for line in lines if line.startswith("CASE ")]
    if errors or not cases:
        last = (errors or "nothing was printed").strip().splitlines()[-1:]
        cases.append({"sent": "the rest", "error": " ".join(last)})
    return cases


def fault_in(case, chain: Chain):
    """Return what is wrong with a case; "" for nothing."""
    if "error" in case:
        return case["error"]
    if not case.get("text"):
        return "no text"
    return fault_of_requests(case, chain) or (case["decides"] and fault_of_rows(case, chain)) or ""


def fault_of_requests(case, chain):
    """Return what is wrong with what the endpoint was sent."""
    if chain.received is None or not case.get("question"):
        return ""
    texts = [(request, json.dumps(request.body)) for request in chain.received]
    requests = [request for request, text in texts if case["question"] in text]
    if not requests and case["decides"]:
        return "the endpoint was sent nothing"
    for request in requests:
        ours = [name for name in (*request.body, *request.headers) if "budget" in name]
        if ours:
            return f"the endpoint was sent {ours[0]}"
        if case["decides"] and request.body.get("model") not in chain.knobs["model"]:
            return f"the endpoint was sent the model {request.body.get('model')}"
        if case["decides"] and not any(name in request.body for name in LENGTHS):
            return "the endpoint was sent no length"
    return ""


def fault_of_rows(case, chain):
    """Return what is wrong with the row of the log, of which there is at least one."""
    rows = chain.served.rows_of(case["budget_ms"])
    if "whole" in case:
        # a gateway may call an answer whole that was cut, but the log may not
        more = len(rows) > case["whole"]
        return f"{len(rows)} answers are logged, {case['whole']} came whole" if more else ""
    if not rows:
        return "no row of the log has its budget"
    # some libraries make up an id of an answer
    if "answer_id" in case and case["answer_id"] not in [row.get("answer") for row in rows]:
        case["answer_id"] = None
    for name in filter(None, (case.get("request_id"), case.get("answer_id"))):
        if not chain.served.labels(name):
            return f"{name} takes no label"
    return ""


def came_back(case, chain: Chain):
    """Return what came back, in words."""
    # some show the name that was asked for instead
    if "model" in case and case["model"] not in chain.knobs["model"]:
        case["model"] = None
    seen = [words for name, words in FIELDS.items() if case.get(name)]
    unseen = [words for name, words in FIELDS.items() if name in case and not case[name]]
    words = ", ".join([case.get("note", "text"), *seen])
    return f"{words}; no {', no '.join(unseen)}" if unseen else words


def line(*cells):
    """Print a line of a table, with no more of an error than says what it is."""
    texts = [" ".join(str(cell).replace("|", "/").split()) for cell in cells]
    texts = [f"{text[:CELL]}…**" if len(text) > CELL else text for text in texts]
    print(f"| {' | '.join(texts)} |", flush=True)


def main(words):
    if unknown := set(words) - CLIENTS.keys():
        known = ", ".join(CLIENTS)
        print(f"campaign.clients: no client {min(unknown)}; known are {known}", file=sys.stderr)
        return 2
    failed = 0
    line("client or gateway", "version", "sent", "came back")
    line("---", "---", "---", "---")
    wanted = [name for name in CLIENTS if not words or name in words]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for kind in dict.fromkeys(CLIENTS[name].chain for name in wanted):
            named = {name: CLIENTS[name] for name in wanted if CLIENTS[name].chain == kind}
            try:
                with CHAINS[kind](folder / kind) as chain:
                    for name, client in named.items():
                        failed += table_of(name, client, chain)
            except (InstallError, StartError) as error:
                for client in named.values():
                    line(client.title, "", "nothing", f"**{error}**")
                    failed += 1
    print(f"{failed} not as promised")
    return bool(failed)


def table_of(name, client, chain):
    """Print a line for each case of a client; return how many are not as promised."""
    try:
        version = version_of(client.environment, client.package)
        python_of(client.runs_in or client.environment)
    except InstallError as error:
        line(client.title, "", "nothing", f"**{error}**")
        return 1
    failed = 0
    for case in run(name, client, chain, 100 * (1 + [*CLIENTS].index(name))):
        fault = fault_in(case, chain)
        failed += bool(fault)
        line(
            client.title, version, case["sent"], f"**{fault}**" if fault else came_back(case, chain)
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
