"""A control plane that only answers what it was given: for what people see, not for how it works."""
from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeControlApi:
    """``answers`` maps "METHOD /path" to data, to (status, data), or to a function of (path, body) that
    gives one of them, or None to hang up; ``requests`` is what came."""

    def __init__(self, answers):
        self.answers, self.requests = dict(answers), []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append((self.command, self.path, body, self.headers.get("Authorization", "")))
                found = outer.answers.get(f"{self.command} {self.path.split('?')[0]}",
                                          (404, {"reason": "NotFound", "message": f"no such path: {self.path}"}))
                if callable(found):
                    found = found(self.path, body)
                if found is None:
                    self.close_connection = True
                    return
                status, data = found if isinstance(found, tuple) else (200, found)
                sent = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_GET = do_POST = do_PUT = do_DELETE = _answer

            def log_message(self, *unused):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
