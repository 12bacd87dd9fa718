"""A model's name on the hub: downloaded where the machine may, by huggingface_hub, from a server of this test."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "flax_model.msgpack": b"large"}
SHA = "0123456789abcdef0123456789abcdef01234567"
CODE = """
from megarl.config.errors import ConfigError
from megarl.models.checkpoint import find_checkpoint
try: print("FOUND", *sorted(path.name for path in find_checkpoint("owner/small", "model.path").iterdir()))
except ConfigError as error: print("ERROR", error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name = self.path.split("?")[0].rpartition("/")[2]
        if "/tree/" in self.path:
            tree = [{"type": "file", "path": file, "size": len(body), "oid": SHA} for file, body in FILES.items()]
            self.answer(json.dumps(tree).encode())
        elif self.path.startswith("/api/models/owner/small"):
            siblings = [{"rfilename": file} for file in FILES]
            self.answer(json.dumps({"id": "owner/small", "sha": SHA, "siblings": siblings}).encode())
        elif self.path.startswith("/owner/small/resolve/") and name in FILES:
            self.answer(FILES[name], ETag=f'"{hashlib.sha1(FILES[name]).hexdigest()}"', **{"X-Repo-Commit": SHA})
        else:
            self.send_error(404)

    def answer(self, body, **headers):
        self.send_response(200)
        for header, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def find(tmp_path, endpoint, **environment):
    given = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "HF_TOKEN": ""}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**kept, **given, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_that_is_not_in_the_cache_is_downloaded_once_without_what_is_not_needed(tmp_path, hub):
    first = find(tmp_path, hub)
    assert "model.path: owner/small is not in the Hugging Face cache" in first
    assert "FOUND config.json model.safetensors tokenizer.json\n" in first
    assert "downloading" not in find(tmp_path, "http://127.0.0.1:9")


def test_where_nothing_may_be_downloaded_the_command_is_said(tmp_path):
    assert "HF_HUB_OFFLINE forbids to download it; where there is a network, `hf download owner/small`" in find(
        tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1"
    )
    text = find(tmp_path, "http://127.0.0.1:9")
    assert "ERROR model.path: 'owner/small' found" in text
    assert "it could not be downloaded (" in text
    assert "`hf download owner/small` does it" in text
