"""Tiny random checkpoints with character-level tokenizers, and SGLang servers on them."""

import contextlib
import json
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cli import KEY
from megarl.config.schema.root import RolloutConfig
from megarl.models.checkpoint import build_character_tokenizer
from megarl.rollout.server import SGLangServer

API_KEY = "key-of-these-tests"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*/()<>[],.:?"


TINY_QWEN3 = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, "initializer_range": 0.1},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


HOSTILE = {
    **{"do_sample": True, "temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1},
    **{"repetition_penalty": 2.0, "no_repeat_ngram_size": 1, "suppress_tokens": [5, 6], "begin_suppress_tokens": [7]},
    **{"forced_bos_token_id": 3, "forced_eos_token_id": 4, "max_length": 3, "max_new_tokens": 1, "min_new_tokens": 1},
    **{"bad_words_ids": [[8]], "sequence_bias": [[[9], -10.0]], "renormalize_logits": True, "eos_token_id": 2},
}
"""A generation_config.json whose defaults would change what is sampled, and how long it is"""


def write_tiny_checkpoint(directory: Path, seed: int) -> Path:
    """A random fp32 Qwen3 of 2 layers with grouped-query attention; token 2 ends a response. Its generation_config.json
    is HOSTILE, which the contract's log-probs and lengths, and the frequencies of samples, hold to have no effect."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *ALPHABET])}
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=len(vocab), max_position_embeddings=512, **TINY_QWEN3)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(HOSTILE))
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(directory)
    return directory


@contextlib.contextmanager
def running_server(config: RolloutConfig, checkpoint: Path, log_file: Path, seed: int) -> Iterator[SGLangServer]:
    """A healthy server, whose callers need API_KEY."""
    running = SGLangServer(config, checkpoint, log_file=log_file, seed=seed, api_key=API_KEY)
    running.start()
    try:
        running.wait_healthy(config.startup_deadline_s)
        yield running
    finally:
        running.stop()


CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_chat_checkpoint(directory: Path, kind: str) -> tuple[Any, Any]:
    """A random float32 Qwen3 of two layers with a chat template; kind: ForCausalLM or ForSequenceClassification, which
    has one label. Returns transformers' model and tokenizer.
    """
    import transformers

    tokenizer = build_character_tokenizer(string.printable, 4096)
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(5)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "num_labels": 1}
    config = transformers.Qwen3Config(**sizes, **TINY_QWEN3)
    model = getattr(transformers, f"Qwen3{kind}")(config).float().eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


@contextlib.contextmanager
def serving(checkpoint: Path, log_file: Path) -> Iterator[str]:
    """The url of a healthy server that `megarl serve` has started; it has ended on leaving.

    Its key is in this process's environment meanwhile.
    """
    options = ["--dtype=float32", "--port=0", "--kv-cache-tokens=16384", "--max-running-requests=8"]
    command = [sys.executable, "-m", "megarl.cli", "serve", str(checkpoint), *options, f"--log={log_file}"]
    patch = pytest.MonkeyPatch()
    patch.setenv(KEY, API_KEY)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline(), process.stdout.readline()]
        assert said[1].startswith("ready: reward.url="), said
        url, key = said[1].split()[1:]
        assert key == f"reward.api_key_env={KEY}"
        yield url.removeprefix("reward.url=")
    finally:
        patch.undo()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
