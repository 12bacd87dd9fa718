"""Stand-in for triton.knobs: without a runtime there is nothing for SGLang to watch."""

runtime = None
compilation = None
