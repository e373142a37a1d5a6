"""A stand-in for TensorRT-LLM's server: a FastAPI application made in ``__init__`` and given to uvicorn in ``__call__``."""
import json
import pathlib

import uvicorn
import yaml
from fastapi import FastAPI, WebSocket
from fastapi.responses import PlainTextResponse, Response


class OpenAIServer:
    def __init__(self, model, config):
        self.app = FastAPI()
        name = pathlib.Path(model).name          # as the real one names it
        settings = yaml.safe_load(pathlib.Path(config).read_text()) if config else {}

        @self.app.get("/health")
        async def health():
            return Response(status_code=200)

        @self.app.get("/v1/models")
        async def models():
            return {"data": [{"id": name}]}

        @self.app.post("/v1/completions")
        async def completions():
            return {"choices": [{"index": 0, "text": json.dumps(settings, sort_keys=True), "finish_reason": "stop"}]}

        @self.app.post("/update_weights")
        async def update_weights():
            return {"done": True}

        @self.app.websocket("/socket")
        async def socket(websocket: WebSocket):
            await websocket.accept()

        if settings.get("return_perf_metrics"):
            @self.app.get("/prometheus/metrics")
            async def metrics():
                return PlainTextResponse("# TYPE trtllm_num_requests_running gauge\ntrtllm_num_requests_running{model=\"m\"} 2\n"
                                         "trtllm_num_requests_waiting 1\ntrtllm_kv_cache_utilization 0.25\n")

    async def __call__(self, host, port):
        await uvicorn.Server(uvicorn.Config(self.app, host=host, port=port, log_level="warning")).serve()
