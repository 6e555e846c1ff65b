"""Decisions over HTTP, by an exported controller, without torch.

    pip install 'knobwise[serve]'
    python examples/serve_http.py runs/latest/controller.npz
    curl localhost:8000/decide -d '{"kind": "ocr", "prompt_tokens": 33, "budget_ms": 60}'

A request to /decide is a JSON object with the features, by the names of their columns or as blocks
of numbers, and `budget_ms`. The answer is a value for each knob. A request that cannot be decided
gets status 400 and the reason. /health says which controller decides, and what it reads.
"""

import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from knobwise.agents import NumpyController


def application(controller: NumpyController) -> Starlette:
    """Return the server's two routes, for any ASGI server."""

    async def decide(request: Request) -> JSONResponse:
        try:
            features: dict[str, Any] = dict(await request.json())
            # a decision takes microseconds, so it may keep other requests waiting
            return JSONResponse(controller.decide(features, features.pop("budget_ms")))
        except KeyError as error:
            reason = f"no {error}"
        except (RecursionError, TypeError, ValueError) as error:
            reason = str(error)
        return JSONResponse({"error": reason}, 400)

    async def health(request: Request) -> JSONResponse:
        reads = {"blocks": controller.feature_sizes, "columns": controller.columns}
        return JSONResponse({"controller": controller.digest, "knobs": controller.knobs, **reads})

    routes = [Route("/decide", decide, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes)


def main(path: str = "runs/latest/controller.npz", port: str = "8000") -> None:
    """Serve on this machine alone until interrupted."""
    uvicorn.run(application(NumpyController.load(path)), host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:3])
