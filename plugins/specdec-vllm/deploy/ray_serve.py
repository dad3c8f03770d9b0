"""vLLM with specdec's drafters behind Ray Serve: each replica runs a server of vLLM's and passes requests on.

    pip install 'ray[serve]' httpx        # where vLLM, specdec and specdec-vllm are installed
    serve run ray_serve:app model=MODEL drafter=suffix gpus=1

in this folder. `ray.serve.llm` is no alternative: Ray 2.60 comes with vLLM 0.29, and specdec-vllm takes 0.32 and 0.33.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx
from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import StreamingResponse

SPECULATION = {"method": "custom_class", "model": "specdec_vllm.Proposer", "num_speculative_tokens": 8}
PASSED_ON = ("content-type", "authorization")


@serve.deployment(max_ongoing_requests=256, health_check_timeout_s=30)
class Vllm:
    """A server of vLLM's, and requests to it."""

    async def __init__(self, model: str, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        host, port = address.split(":")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host]
        command += ["--port", port, "--speculative-config", json.dumps(SPECULATION), *options]
        self._server = subprocess.Popen(command)
        self._client = httpx.AsyncClient(base_url=f"http://{address}", timeout=None)
        while True:  # weights are read and passes compiled first
            try:
                return await self.check_health()
            except httpx.TransportError:
                await asyncio.sleep(1)

    async def check_health(self) -> None:
        """Ray replaces a replica in which this raises."""
        if self._server.poll() is not None:
            raise RuntimeError(f"vLLM has ended with status {self._server.returncode}")
        (await self._client.get("/health", timeout=20)).raise_for_status()

    async def __call__(self, request: Request) -> StreamingResponse:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        passed = self._client.build_request(
            request.method, str(request.url.path), headers=headers, content=await request.body()
        )
        answer = await self._client.send(passed, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_bytes():
                    yield piece
            finally:  # also where the client has gone, so that vLLM stops
                await answer.aclose()

        return StreamingResponse(body(), answer.status_code, media_type=answer.headers.get("content-type"))

    def __del__(self) -> None:
        self._server.terminate()
        self._server.wait()


def app(arguments: dict[str, str]) -> Application:
    """What `serve run` starts: `model`, and `drafter`, `gpus`, and `options` of vLLM's server in one text."""
    names = ("OMP_NUM_THREADS", "KMP_BLOCKTIME", "VLLM_CPU_OMP_THREADS_BIND", "SPECDEC_PAUSING")  # for a CPU, and ours
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment["SPECDEC_DRAFTER"] = arguments.get("drafter", "suffix")
    actor = {"num_gpus": float(arguments.get("gpus", 1)), "runtime_env": {"env_vars": environment}}
    return Vllm.options(ray_actor_options=actor).bind(arguments["model"], arguments.get("options", "").split())
