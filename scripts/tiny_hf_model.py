"""Write a tiny random LLaMA with a byte-level tokenizer as a Hugging Face folder: 0.8 MB, loads at once, nonsense.

    python scripts/tiny_hf_model.py FOLDER     needs torch, transformers and tokenizers; an environment of vLLM has them
"""
from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")


def main(folder: str) -> None:
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{letter: index + 3 for index, letter in enumerate(alphabet)}}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, unk_token="<unk>", bos_token="<s>",
                                        eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
                         bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    main(sys.argv[1])
