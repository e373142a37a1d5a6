"""llmgw: a handful of Linux machines as one OpenAI-compatible endpoint."""

__version__ = "0.1.0"
