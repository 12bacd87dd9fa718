"""python -m megarl.serve: its arguments and the command line of its server."""

import pytest

from megarl import serve
from megarl.config.schema.roles import RandomModelConfig
from megarl.models.checkpoint import build_random_checkpoint
from megarl.rollout.server import build_command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_random_checkpoint(RandomModelConfig(), tmp_path_factory.mktemp("cache"))


def test_the_server_takes_messages_and_keeps_its_weights(checkpoint, tmp_path):
    words = [str(checkpoint), "--port=0", "--dtype=float32", f"--log={tmp_path / 'server.log'}"]
    server = serve.build_server(serve.read_arguments(words), tmp_path)
    of_rollouts = build_command(server.config, checkpoint, host=server.host, port=server.port, seed=1)
    assert set(of_rollouts) - set(server._command) == {word for words in serve.LEFT_OUT for word in words}
    assert [word for word in of_rollouts if word in server._command] == server._command
    assert server.config.kv_cache_tokens in (16384, None)
