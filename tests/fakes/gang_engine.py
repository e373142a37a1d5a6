"""A stand-in for vLLM on several nodes: rank 0 waits for the others, serves with a key, and ends when one is lost.

Written as a Python "environment": `stand_in(folder)` gives the path of what the agent takes for its Python. Proves
plumbing only. Like vLLM 0.30.0, a rank that loses another ends by itself with code 0; unlike it, at once.
"""
from __future__ import annotations

import pathlib
import sys
import textwrap

VERSION = "0.30.0+cpu"
SCRIPT = '''#!{python}
import http.server, json, os, socket, sys, threading, time
words = sys.argv[1:]
if "-c" in words or "--version" in words:
    print({version!r}); sys.exit(0)
if any(word.startswith("--help") for word in words):
    sys.exit("this is a stand-in")
def of(flag, default=None):
    return words[words.index(flag) + 1] if flag in words else default
rank, size = int(of("--node-rank", "0")), int(of("--nnodes", "1"))
meet = (of("--master-addr", "127.0.0.1"), int(of("--master-port", "0")))
print("rank", rank, "of", size, "meets at", meet, flush=True)
def end_with(peer):
    peer.recv(1)
    print("lost a rank", flush=True)
    os._exit(0)
if rank:
    deadline = time.monotonic() + 60
    while True:
        try:
            peer = socket.create_connection(meet, timeout=60); break
        except OSError:
            if time.monotonic() > deadline: raise
            time.sleep(0.05)
    peer.settimeout(None)
    end_with(peer)
if size > 1:
    door = socket.create_server(meet)
    for _ in range(size - 1):
        peer, _ = door.accept()
        threading.Thread(target=end_with, args=(peer,), daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *unused): pass
    def answer(self, status, value):
        data = json.dumps(value).encode() if not isinstance(value, bytes) else value
        self.send_response(status); self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json"); self.end_headers(); self.wfile.write(data)
    def allowed(self):
        return self.headers.get("Authorization") == "Bearer " + os.environ["VLLM_API_KEY"]
    def do_GET(self):
        if self.path in ("/health", "/metrics"): return self.answer(200, b"vllm:num_requests_running 0\\n")
        if not self.allowed(): return self.answer(401, {{"error": "Unauthorized"}})
        self.answer(200, {{"data": [{{"id": of("--served-model-name")}}]}})
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self.allowed(): return self.answer(401, {{"error": "Unauthorized"}})
        self.answer(200, {{"id": "x", "object": "text_completion", "created": 1, "model": of("--served-model-name"),
            "choices": [{{"index": 0, "text": "from %d ranks" % size, "finish_reason": "stop"}}],
            "usage": {{"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}}})
http.server.ThreadingHTTPServer(("127.0.0.1", int(of("--port"))), Handler).serve_forever()
'''


def stand_in(folder) -> pathlib.Path:
    """Write the stand-in and return its path."""
    path = pathlib.Path(folder) / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(textwrap.dedent(SCRIPT).format(python=sys.executable, version=VERSION))
    path.chmod(0o755)
    return path
