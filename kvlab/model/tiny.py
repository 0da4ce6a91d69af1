"""Four byte-level models of a million parameters, alike but for attention: what chapter 05 compares.

Every byte is a token (id = byte value), so text needs no learned tokenizer and bits per byte is the loss itself.
8 query heads of 16 dimensions everywhere; the MLP is as wide as makes the parameter counts equal. What one token
stores in one layer, in numbers:

    mha   2 x 8 heads x 16 = 256        mqa   2 x 1 head x 16 = 32
    gqa   2 x 2 heads x 16 =  64        mla   40 (latent) + 8 (rope) = 48, between MQA and GQA

DeepSeek-V2 (arXiv:2405.04434) keeps 4.5 head widths for a token, as GQA with 2.25 heads; that would be 72 numbers
here, more than this GQA. 48 asks the harder question, whether MLA stays good with less than GQA stores.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from kvlab.config import ModelConfig
from kvlab.model.tokenizer import Tokenizer

ATTENTIONS = ("mha", "gqa", "mqa", "mla")
NAMES = tuple(f"tiny-{attention}" for attention in ATTENTIONS)
SOURCE = "trained by `kvlab train-tiny`, seed 0"  # what lies in kvlab/data/tiny

COMMON = {
    "vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 1024, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False, "bos_token_id": None, "eos_token_id": None,
    "torch_dtype": "float16",
}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 16}
LATENT = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 8,
    "q_lora_rank": None, "kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8, "first_k_dense_replace": 4,  # all layers dense; in transformers head_dim is the rotated part
}  # fmt: skip
OWN = {
    "mha": {**LLAMA, "num_key_value_heads": 8, "intermediate_size": 448},
    "gqa": {**LLAMA, "num_key_value_heads": 2, "intermediate_size": 512},
    "mqa": {**LLAMA, "num_key_value_heads": 1, "intermediate_size": 523},
    "mla": {**LATENT, "intermediate_size": 469},
}


def hugging_face_config(attention: str) -> dict:
    """The config.json of one of the four, as transformers reads it too; raises ValueError for another name."""
    if attention not in OWN:
        raise ValueError(f"unknown attention {attention!r}: one of {', '.join(ATTENTIONS)}")
    return {**COMMON, **OWN[attention]}


def tiny_config(attention: str) -> ModelConfig:
    """The shape of "mha", "gqa", "mqa" or "mla", named tiny-..."""
    return ModelConfig.from_dict(hugging_face_config(attention), name=f"tiny-{attention}", source=SOURCE)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose token ids are the bytes of the text; it has no special tokens."""
    # no merges, no splitting: what ByteLevel writes for a byte is a token, and nothing else is
    backend = Backend(models.BPE(vocab={char: byte for byte, char in enumerate(_characters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


def _characters() -> list[str]:
    """The character that stands for each byte: itself where it prints, else the next one from U+0100 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    stand_ins = iter([char for char in alphabet if ord(char) > 255])
    printing = set(alphabet)
    return [chr(byte) if chr(byte) in printing else next(stand_ins) for byte in range(256)]
