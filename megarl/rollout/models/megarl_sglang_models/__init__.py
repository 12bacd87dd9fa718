"""The model classes that SGLang looks up first (by SGLANG_EXTERNAL_MODEL_PACKAGE), before importing all."""
