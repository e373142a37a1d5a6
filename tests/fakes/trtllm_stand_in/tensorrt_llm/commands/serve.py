"""A stand-in for trtllm-serve's command line."""
import argparse
import asyncio
import sys

from tensorrt_llm.serve.openai_server import OpenAIServer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    for flag in ("--host", "--port", "--tp_size", "--max_batch_size", "--max_seq_len", "--config"):
        parser.add_argument(flag)
    options = parser.parse_args(sys.argv[1:])
    asyncio.run(OpenAIServer(options.model, options.config)(options.host, int(options.port)))
