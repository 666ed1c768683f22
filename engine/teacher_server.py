"""An HTTP server for one teacher. It answers requests with top-kappa log-probabilities in binary form.

    python -m smopd.engine.teacher_server PATH --port 8100 --vocabulary 151936

`POST /score?kappa=16&temperature=1.0` returns the kappa most likely tokens at each response position.
Requests and answers are safetensors (smopd/engine/remote/wire.py). A request with `weights=DIGEST` (from
/describe) fails if the server has other weights. The status is 400 for a malformed request, and 413 for more
than MAX_REQUEST_BYTES. The server keeps no state, so a request may be repeated.

If the environment variable SMOPD_SERVER_TOKEN is set, every request needs `Authorization: Bearer TOKEN`.
Clients read TOKEN from the same variable. Nothing is encrypted, so use this server in a private network.
"""

from __future__ import annotations

import argparse
import hmac
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from smopd.engine import distributed
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.models.loading import load_tokenizer
from smopd.engine.remote.servers import TOKEN
from smopd.engine.remote.wire import pack, unpack_request
from smopd.engine.settings import Vllm
from smopd.engine.weights.adapters import read_adapter
from smopd.engine.weights.architecture import weights_digest

if TYPE_CHECKING:
    from smopd.engine.vllm.teachers import VllmTeachers

MAX_REQUEST_BYTES = 256 << 20  # ours
MAX_TEXT = 1 << 20  # ours: characters of a text to tokenize
TEMPERATURES = (1e-2, 1e2)  # ours: logits divided by less than 1e-2 could overflow
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def application(teacher: LocalTeachers | VllmTeachers, path: str, vocabulary: int) -> Starlette:
    """Return the ASGI application of one teacher."""
    adapter = read_adapter(path)
    tokenizer = load_tokenizer(adapter.base if adapter else path)
    one_at_a_time, rows = threading.Lock(), min(teacher.rows, vocabulary)
    weights = weights_digest(path) + (weights_digest(adapter.base) if adapter else "")

    def score(content: bytes, params: QueryParams) -> Response:
        if params.get("weights", weights) != weights:
            raise ValueError(f"this server holds the weights {weights}, expected {params['weights']}")
        temperature = float(params.get("temperature", 1.0))
        if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
            raise ValueError(f"temperature is {temperature:g}, expected one in {list(TEMPERATURES)}")
        rollouts = unpack_request(content, vocabulary)
        with one_at_a_time:
            before = teacher.dropped
            top = teacher.score(rollouts, int(params["kappa"]), temperature)
            dropped = torch.tensor(teacher.dropped - before)
        entries = {"ids_NS": top.ids_NMS[:, 0], "logps_NS": top.logps_NMS[:, 0]}
        return Response(pack(token_logps_N=top.token_logps_NM[:, 0], dropped=dropped, **entries))

    def tokenize(content: bytes, params: QueryParams) -> Response:
        text = json.loads(content)["prompt"]
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise ValueError(f"prompt is not a text of at most {MAX_TEXT} characters")
        return JSONResponse({"tokens": tokenizer.encode(text, add_special_tokens=False)})

    def describe(content: bytes, params: QueryParams) -> Response:
        return JSONResponse({"teacher": path, "vocabulary": vocabulary, "rows": rows, "weights": weights})

    routes = [Route(f"/{each.__name__}", _endpoint(each), methods=["POST"]) for each in (score, tokenize)]
    return Starlette(routes=routes + [Route(at, _endpoint(describe)) for at in ("/describe", "/health")])


def _endpoint(answer: Callable[[bytes, QueryParams], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that checks the token and runs `answer` in a thread. Bad requests return 400."""
    token = os.environ.get(TOKEN, "").strip()

    async def endpoint(request: Request) -> Response:
        brought = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(brought.encode("latin-1"), f"Bearer {token}".encode()):
            raise HTTPException(401, f"missing or wrong token ({TOKEN})")
        content = bytearray()
        try:
            async for piece in request.stream():
                content += piece
                if len(content) > MAX_REQUEST_BYTES:
                    raise HTTPException(413, f"a request of more than {MAX_REQUEST_BYTES} bytes")
            return await run_in_threadpool(answer, bytes(content), request.query_params)
        except (LookupError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", 400)
        except ClientDisconnect:
            return Response(status_code=400)  # the client is gone

    return endpoint


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m smopd.engine.teacher_server", description=__doc__)
    add = parser.add_argument
    add("path", help="folder or hub id of the teacher, or folder of a LoRA adapter")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100)
    add("--vocabulary", type=int, required=True, help="the student's size; a teacher's may be larger")
    add("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    add("--max-model-len", type=int)
    add("--gpu-memory-share", type=float, default=0.9, help="share of each GPU's total memory")
    add("--tensor-parallel-size", type=int, default=1, help="number of GPUs that share the teacher")
    chosen = parser.parse_args()
    if chosen.host not in LOOPBACK and not os.environ.get(TOKEN):
        logging.warning("%s is not set: %s:%d serves anyone", TOKEN, chosen.host, chosen.port)
    import uvicorn

    try:
        from smopd.engine.vllm.teachers import VllmTeachers
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed (pip install {error.name})")

    settings = Vllm(
        placement="colocated" if chosen.tensor_parallel_size == 1 else "process",
        engine_kwargs={
            "tensor_parallel_size": chosen.tensor_parallel_size,
            "dtype": chosen.dtype,
            "max_model_len": chosen.max_model_len,
            "gpu_memory_utilization": chosen.gpu_memory_share,
            "enable_sleep_mode": False,  # no other engine uses its GPUs
        },
    )
    with distributed.process_group():
        teacher = VllmTeachers([chosen.path], settings, chosen.vocabulary, tokens=1)
        served = application(teacher, chosen.path, chosen.vocabulary)
        uvicorn.run(served, host=chosen.host, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
