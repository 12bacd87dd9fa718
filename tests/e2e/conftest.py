"""One SGLang server for the whole session, on a tiny random checkpoint with a character-level tokenizer."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.rollout.server import SGLangServer

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*/()<>[],.:?"


def write_tiny_checkpoint(directory: Path, seed: int) -> Path:
    """A random fp32 Qwen3 of 2 layers with grouped-query attention; token 2 ends a response."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *ALPHABET])}
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def server_seed() -> int:
    return 7


@pytest.fixture(scope="session")
def rollout_config() -> RolloutConfig:
    return RolloutConfig(
        response_length=48,
        dtype=Dtype.float32,
        max_running_requests=128,
        kv_cache_tokens=16384,
        startup_deadline_s=float(os.environ.get("MEGARL_TEST_STARTUP_DEADLINE_S", "180")),
        request_deadline_s=60.0,
        sync_deadline_s=60.0,
    )


@contextlib.contextmanager
def running_server(config: RolloutConfig, checkpoint: Path, log_file: Path, seed: int) -> Iterator[SGLangServer]:
    """A healthy server."""
    running = SGLangServer(config, checkpoint, log_file=log_file, seed=seed)
    running.start()
    try:
        running.wait_healthy(config.startup_deadline_s)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def server(
    tiny_checkpoint: Path,
    rollout_config: RolloutConfig,
    server_seed: int,
    tmp_path_factory: pytest.TempPathFactory,
):
    """A healthy server on `tiny_checkpoint`; tests that change its weights put the checkpoint's back."""
    log_file = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_server(rollout_config, tiny_checkpoint, log_file, server_seed) as running:
        yield running
