"""A tiny random checkpoint with a character-level tokenizer, and SGLang servers on it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

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
