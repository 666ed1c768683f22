"""A teacher behind a URL: top-kappa log-probabilities as one binary answer.

    python -m smopd.engine.teacher_server PATH --port 8100 --vocabulary 151936

`POST /score?kappa=16&temperature=1.0&dtype=float16` takes and gives safetensors: `tokens` (all prompts and
responses, one behind the other) and `lengths` (R, 2) come in; `ids_NS` int32, `logps_NS` in the dtype that
was asked for and `token_logps_N` fp32 go out, with how many ids were `dropped` because they only pad the
teacher's vocabulary. `POST /given?temperature=1.0&dtype=float16` takes `ids_NU` int32 and the sampled tokens'
own `token_logps_N` too, and gives these ids' `logps_NU`: by it a union over several servers is exact.

An answer depends on nothing asked before, so a request may be sent again. What is no request is answered by
status 400, one of more than MAX_REQUEST_BYTES by 413.

Where the environment variable SMOPD_SERVER_TOKEN is set, every request must bring it (`Authorization: Bearer
TOKEN`), and clients with the same variable do. There is no encryption: it is for a network of your own.
"""

from __future__ import annotations

import argparse
import hmac
import json
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
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from smopd.engine import distributed
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.models.loading import load_tokenizer
from smopd.engine.remote.client import TOKEN
from smopd.engine.remote.wire import BINARY, pack_answer, pack_values, unpack_given, unpack_request
from smopd.engine.settings import VllmSettings
from smopd.engine.weights.adapters import read_adapter

if TYPE_CHECKING:
    from smopd.engine.vllm.teachers import VllmTeachers

MAX_REQUEST_BYTES = 256 << 20  # ours
MAX_TEXT = 1 << 20  # ours, characters to tokenize
TEMPERATURES = (1e-2, 1e2)  # ours: logits divided by less overflow
DTYPES = {"float16": torch.float16, "float32": torch.float32}


def application(teacher: LocalTeachers | VllmTeachers, path: str, vocabulary: int) -> Starlette:
    """The ASGI application around one teacher, whose rows a client compares with its tokens."""
    adapter = read_adapter(path)
    tokenizer = load_tokenizer(adapter.base if adapter else path)
    one_at_a_time, rows = threading.Lock(), min(teacher.rows, vocabulary)

    def score(content: bytes, asked: QueryParams) -> Response:
        rollouts, kappa, (temperature, dtype) = (
            unpack_request(content, vocabulary),
            int(asked["kappa"]),
            _how(asked),
        )
        with one_at_a_time:
            before = teacher.dropped
            top = teacher.score(rollouts, kappa, temperature)
            dropped = teacher.dropped - before
        answer = (top.ids_NMS[:, 0], top.logps_NMS[:, 0], top.token_logps_NM[:, 0])
        return Response(pack_answer(*answer, dtype, dropped), media_type=BINARY)

    def given(content: bytes, asked: QueryParams) -> Response:
        rollouts, ids_NU, token_logps_N = unpack_given(content, vocabulary, rows)
        temperature, dtype = _how(asked)
        with one_at_a_time:
            logps_NMU = teacher.given(rollouts, ids_NU[:, None], token_logps_N[:, None], temperature)
        return Response(pack_values(logps_NMU[:, 0], dtype), media_type=BINARY)

    def tokenize(content: bytes, asked: QueryParams) -> Response:
        text = json.loads(content)["prompt"]
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise ValueError(f"prompt is no text of at most {MAX_TEXT} characters")
        return JSONResponse({"tokens": tokenizer.encode(text, add_special_tokens=False)})

    async def describe(request: Request) -> Response:
        return JSONResponse({"teacher": path, "vocabulary": vocabulary, "rows": rows})

    answers = {"/score": score, "/given": given, "/tokenize": tokenize}
    return Starlette(
        routes=[
            *(Route(at, _answering(answer), methods=["POST"]) for at, answer in answers.items()),
            Route("/describe", describe),
            Route("/health", describe),
        ],
        middleware=[Middleware(_Guarded, token=os.environ.get(TOKEN, ""))],
    )


def _answering(answer: Callable[[bytes, QueryParams], Response]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of `answer`, which runs in a thread; what it cannot read is answered by 400."""

    async def endpoint(request: Request) -> Response:
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > MAX_REQUEST_BYTES:
                raise HTTPException(413, f"a request of more than {MAX_REQUEST_BYTES} bytes")
        try:
            return await run_in_threadpool(answer, bytes(content), request.query_params)
        except (LookupError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            return PlainTextResponse(f"{type(error).__name__}: {error}", 400)

    return endpoint


def _how(asked: QueryParams) -> tuple[float, torch.dtype]:
    """Temperature, and the dtype of log-probabilities in the answer."""
    temperature, dtype = float(asked.get("temperature", 1.0)), DTYPES[asked.get("dtype", "float32")]
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        raise ValueError(f"temperature is {temperature:g}, expected one in {list(TEMPERATURES)}")
    return temperature, dtype


class _Guarded:
    """ASGI: answers 401 where the token is not brought."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self.expected = app, f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.expected:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                await PlainTextResponse(f"no or another token ({TOKEN})", 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def server_settings(chosen: argparse.Namespace) -> VllmSettings:
    """Of the one engine of this server, which shares its GPUs with nothing."""
    return VllmSettings(
        placement="colocated" if chosen.tensor_parallel_size == 1 else "process",
        tensor_parallel_size=chosen.tensor_parallel_size,
        dtype=chosen.dtype,
        max_model_len=chosen.max_model_len,
        gpu_memory_share=chosen.gpu_memory_share,
        sleep=False,
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m smopd.engine.teacher_server", description=__doc__)
    add = parser.add_argument
    add("path", help="folder or hub id of the teacher, or folder of a LoRA adapter")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100)
    add("--vocabulary", type=int, required=True, help="of the student; a teacher's may be padded")
    add("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    add("--max-model-len", type=int)
    add("--gpu-memory-share", type=float, default=0.9, help="of each GPU's whole memory")
    add("--tensor-parallel-size", type=int, default=1, help="GPUs that hold the teacher together")
    add("--route", default="auto", choices=("auto", "pooler", "prompt_logprobs"))
    return parser


def main() -> None:
    chosen = arguments().parse_args()
    import uvicorn

    from smopd.engine.vllm.teachers import VllmTeachers

    with distributed.process_group():
        settings = server_settings(chosen)
        teacher = VllmTeachers([chosen.path], settings, chosen.vocabulary, chosen.route, tokens=1)
        served = application(teacher, chosen.path, chosen.vocabulary)
        uvicorn.run(served, host=chosen.host, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
