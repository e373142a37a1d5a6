"""Start trtllm-serve so that nothing but its health is answered without the replica's key.

Run by the Python of an environment that has TensorRT-LLM; imports nothing of llmgw, which copies this file out:

    python trtllm_serve.py --key-file F --merged FILE.yaml -- serve MODEL --host 127.0.0.1 --port N ...

TensorRT-LLM has no key of its own, and will not get one (NVIDIA/TensorRT-LLM#9950). The options after ``--`` are its
own; the file that ``--config`` (or ``--extra_llm_api_options``) names is read, not changed: a copy with what the
gauges need is written to ``--merged`` and given instead.
"""
import hmac
import json
import os
import sys

OPEN = ("/health",)
GAUGES = ("return_perf_metrics", "enable_iter_perf_stats")
CONFIG = ("--config", "--extra_llm_api_options")


class KeyMiddleware:
    """ASGI: every request but those for health shows ``Authorization: Bearer KEY``, or is refused."""

    def __init__(self, app, key):
        self.app, self.wanted = app, b"Bearer " + key

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan" or self._may(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = {"message": "Unauthorized", "type": "authentication_error", "code": 401}
            body = json.dumps({"error": error}).encode()
            await send({"type": "http.response.start", "status": 401, "headers": [
                (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

    def _may(self, scope):
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in OPEN:
            return True
        shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self.wanted)


def guard(server_class, key):
    """Make every server of this class demand the key; one whose application cannot be reached is not started."""
    original_init, original_call = server_class.__init__, server_class.__call__

    def __init__(self, *args, **kwargs):
        original_init(self, *args, **kwargs)
        app = getattr(self, "app", None)
        if app is None or not hasattr(app, "add_middleware"):
            raise SystemExit("llmgw: this TensorRT-LLM keeps its application elsewhere: "
                             "refusing to serve without a key")
        app.add_middleware(KeyMiddleware, key=key)
        self._llmgw_guarded = True

    def __call__(self, *args, **kwargs):
        if not getattr(self, "_llmgw_guarded", False):
            raise SystemExit("llmgw: the key was not put in place: refusing to serve without it")
        return original_call(self, *args, **kwargs)

    server_class.__init__, server_class.__call__ = __init__, __call__


def with_gauges(words, merged):
    """Return the command's words with a configuration file that turns the gauges on; the operator's own is kept."""
    words, own = list(words), None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in CONFIG:
            own = value if equals else words[at + 1]
            del words[at:at + (1 if equals else 2)]
            break
    settings = {}
    if own is not None:
        import yaml                # TensorRT-LLM reads this file with it
        with open(own, encoding="utf-8") as source:
            settings = yaml.safe_load(source) or {}
        if not isinstance(settings, dict):
            raise SystemExit("llmgw: %s holds no map of settings" % own)
    settings.update(dict.fromkeys(GAUGES, True))
    handle = os.open(merged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as target:
        if own is None:
            target.write("".join("%s: true\n" % name for name in GAUGES))
        else:
            yaml.safe_dump(settings, target)
    return words + ["--config", merged]


def main(argv):
    """Put the key in place and hand over to trtllm-serve."""
    if "--" not in argv:
        raise SystemExit("usage: trtllm_serve.py --key-file F --merged FILE.yaml -- serve MODEL ...")
    ours, words = argv[:argv.index("--")], argv[argv.index("--") + 1:]
    options = dict(zip(ours[::2], ours[1::2]))
    with open(options["--key-file"], "rb") as source:
        key = source.read().strip()
    if len(key) < 16:
        raise SystemExit("llmgw: %s holds no key: refusing to serve without one" % options["--key-file"])
    words = with_gauges(words, options["--merged"])
    from tensorrt_llm.serve.openai_server import OpenAIServer
    guard(OpenAIServer, key)
    from tensorrt_llm.commands.serve import main as serve
    sys.argv = ["trtllm-serve"] + words
    return serve()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
