"""The model classes that SGLang looks up first (SGLANG_EXTERNAL_MODEL_PACKAGE); for any other it imports all of its own."""
