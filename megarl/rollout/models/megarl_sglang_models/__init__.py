"""The model classes that SGLang looks up first; for any other it imports all of its own.

Named to it by SGLANG_EXTERNAL_MODEL_PACKAGE.
"""
