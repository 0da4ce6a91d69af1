"""What a Hugging Face `model_type` means where its config.json does not say it: plain tables, no logic."""

from __future__ import annotations


def _each(names: str, value) -> dict:
    return dict.fromkeys(names.split(), value)


RUNNABLE = ("llama", "mistral", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3")  # what kvlab's own transformer computes
CANNOT_RUN = {  # what kvlab's transformer lacks, for models that are often asked for
    "falcon": "attention and MLP in parallel, LayerNorm",
    "gemma": "scaled embeddings and its own norm",
    "gemma2": "scaled embeddings, extra norms and soft-capped logits",
    "gemma3_text": "scaled embeddings, extra norms and two RoPE bases",
    "gpt2": "learned positions, LayerNorm",
    "gpt_oss": "attention sinks and a mixture of experts",
    "llama4_text": "chunked attention and a mixture of experts",
    "opt": "learned positions, LayerNorm",
    "phi3": "fused projections in its checkpoint",
}

# Class defaults of transformers that differ from the general rule (heads = hidden / heads, KV heads = heads).
HEAD_DIM = {
    **_each("gemma gemma2 gemma3_text vaultgemma", 256),
    **_each("afmoe cohere2_moe cwm ernie4_5 glm glm4 helium hy_v3 internlm3 iquestcoder jetmoe", 128),
    **_each("llama4_text mellum minimax_m2 ministral3 molmo2_text paddleocr_vl_text qwen3 qwen3_vl_text", 128),
    **_each("seed_oss solar_open", 128),
    **_each("gpt_oss sarvam_moe", 64),
}
KEY_VALUE_HEADS = {
    **_each("qwen2 qwen3 qwen3_vl_text stablelm", 32),
    "helium": 20,
    **_each("gemma jetmoe qwen2_moe qwen3_vl_moe_text", 16),
    **_each("cwm emu3_text_model exaone glm4_moe glm4v_moe_text glm_ocr_text gpt_oss hy_v3 iquestcoder", 8),
    **_each("llama4_text minimax_m2 ministral ministral3 mistral mixtral molmo2_text phi4_multimodal phimoe", 8),
    **_each("qwen2_5_vl_text qwen2_vl_text seed_oss solar_open", 8),
    "bitnet": 5,
    **_each("ernie4_5_moe ernie4_5_vl_moe_text gemma2 gemma3_text granite_swa mellum qwen2_5_omni_text", 4),
    **_each("qwen3_moe qwen3_omni_moe_text sarvam_moe smollm3 vaultgemma", 4),
    **_each("ernie4_5 glm glm4 glm4v_text internlm3 paddleocr_vl_text starcoder2", 2),
    "dbrx": 1,
}
# Where the class has as many as query heads unless told; elsewhere that is said aloud, or refused in a nested config.
AS_MANY_AS_QUERY_HEADS = _each(
    """
    afmoe apertus arcee aria_text baichuan biogpt bloom codegen cohere cohere2 cohere2_moe ctrl diffllama doge falcon
    fuyu gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj granite granitemoe granitemoehybrid granitemoeshared
    hunyuan_v1_dense hunyuan_v1_moe llama moshi mpt nanochat olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3
    qwen xglm""",
    True,
)
LATENT = _each(  # MLA classes: without its ranks a file says nothing of the cache; null ranks mean plain heads
    """
    axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 minicpm3 mistral4 sarvam_mla youtu""",
    True,
)

# transformers writes a *nested* config as its difference from the class defaults: what is absent is one.
_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip


def _defaults(*values: int, **others: int) -> dict:
    return dict(zip(_FIELDS, values, strict=True)) | others


NESTED_DEFAULTS = {
    "llama": _defaults(32_000, 4096, 11_008, 32, 32, 2048),
    "mistral": _defaults(32_000, 4096, 14_336, 32, 32, 131_072, sliding_window=4096),
    "qwen2": _defaults(151_936, 4096, 22_016, 32, 32, 32_768),
    "qwen3": _defaults(151_936, 4096, 22_016, 32, 32, 32_768),
    "gemma3_text": _defaults(262_208, 2304, 9216, 26, 8, 131_072, sliding_window=4096),
    "llama4_text": _defaults(202_048, 5120, 8192, 48, 40, 131_072, attention_chunk_size=8192),
}
TIED_BY_DEFAULT = _each(
    "bloom cohere cohere2 falcon gemma gemma2 gemma3_text gpt2 gpt_bigcode mpt opt starcoder2", True
)

# Which layers slide, where the config gives a window but no layer_types: all but every n-th, all, or none.
FULL_EVERY = {
    **_each("gemma2 gpt_oss vaultgemma", 2),
    **_each("cohere2 exaone4 exaone_moe olmo3", 4),
    "gemma3_text": 6,
}
ALL_SLIDE = _each("ministral ministral3 mistral mixtral moshi phi3 phi4_multimodal phimoe qwen3_moe starcoder2", True)
HAS_WINDOW = (*FULL_EVERY, "cwm")  # without layer_types, a file that lacks sliding_window says nothing of the cache
IGNORES_WINDOW = ("llama", "qwen3_vl_text")  # these classes have no window whatever the file says

STATE = "its layers keep a recurrent state instead of (or beside) keys and values"
ENCODER = "it is not a decoder with a KV cache of its own"
_INDEXER = "an indexer keeps keys of its own beside the cache"
_SHARED = "some layers share one cache"
_CROSS = "cross attention keeps a second cache over another sequence"
_UNEVEN = "heads differ from layer to layer"
_SPARSE = "its sparse attention stores blocks or summaries of its own"
_LOCAL = "its local layers are given in a form that is not known here"
_DOUBLE = "each of its layers has two attentions"

_STATE_TYPES = """
    bailing_hybrid bamba falcon_h1 falcon_mamba glm5_next granitemoehybrid hgrn inkling inkling2
    inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model inkling_text jamba jet_nemotron
    kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax minimax_text_01
    nemotron_h olmo_hybrid phi4flash plamo2 qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next
    qwen4_exp qwen4_exp_text recurrent_gemma retnet rwkv xlstm zamba zamba2 zaya"""
_ENCODER_TYPES = """
    albert bart bert bert-generation big_bird blenderbot camembert clip data2vec-text deberta deberta-v2
    distilbert electra ernie layoutlm longformer m2m_100 marian mbart megatron-bert modernbert mpnet mt5
    pegasus rembert roberta roc_bert roformer siglip speech_to_text switch_transformers t5 t5gemma
    t5gemma2 umt5 vit whisper xlm-roberta xlm-roberta-xl xmod"""
REFUSED_TYPES = {
    **_each(_STATE_TYPES, STATE),
    **_each(_ENCODER_TYPES, ENCODER),
    **_each("axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4", _INDEXER),
    **_each("mistral_large4 mistral_large4_text", _INDEXER),
    **_each("deepseek_v4 evabyte minimax_m3_vl minimax_m3_vl_text", _SPARSE),
    **_each("gemma3n gemma3n_text", _SHARED),
    **_each("mllama mllama_text_model", _CROSS),
    **_each("diffusion_gemma diffusion_gemma_text gemma4 gemma4_text gemma4_unified gemma4_unified_text", _UNEVEN),
    **_each("mimo_v2_flash openelm step3p5", _UNEVEN),
    "longcat_flash": _DOUBLE,
}

# Fields that change what is stored: refused when present and not empty, 0 or false.
REFUSED_FIELDS = {
    **_each("index_topk index_head_dim index_n_heads", _INDEXER),
    **_each("num_kv_shared_layers kv_sharing_modes kv_reuse_group use_cla cla_share_factor", _SHARED),
    **_each("is_encoder_decoder add_cross_attention cross_attention_layers", _CROSS),
    **_each("attention_k_eq_v block_configs global_head_dim hybrid_layer_pattern per_layer_config", _UNEVEN),
    **_each("num_global_key_value_heads num_key_value_heads_per_layer swa_head_dim", _UNEVEN),
    **_each("swa_num_attention_heads swa_num_key_value_heads", _UNEVEN),
    **_each("blocksparse_block_size compress_ratios dense_attention_every_n_layers", _SPARSE),
    **_each("nsa_config sparse_attention_config sparse_config", _SPARSE),
    "attention_types": _LOCAL,  # GPT-Neo
}
# Refused likewise, but harmless where layer_types names attention for every layer.
_STATE_FIELDS = """
    attention_hidden_size attn_layer_idxs attn_layer_period attn_type_list block_types conv_L_cache conv_size
    decay_low_rank_dim decoder_attention_types expand_k expand_v full_attention_interval hybrid_override_pattern
    hyena_filter_groups layer_group_size layers_block_type linear_attn_config linear_num_key_heads mamba_d_state
    mamba_num_heads mixer_types rwkv_version ssm_cfg ssm_state_size state_size time_mix_extra_dim"""
_LOCAL_FIELDS = """
    attention_window_size global_attn_every_n_layers interleaved_sliding_window local_attention local_window_size
    sliding_window_layers window_size"""
REFUSED_UNLESS_LISTED = {**_each(_STATE_FIELDS, STATE), **_each(_LOCAL_FIELDS, _LOCAL)}
# Families whose members have a name each: rwkv5, rwkv7, gated_deltanet, nomic_bert, ...
REFUSED_NAMES = {
    r"rwkv|mamba|retnet|linear|delta_?(net|product)|hyena|xlstm|hgrn|mesa_?net|lightning|^(gla|gsa|kda|comba)$": STATE,
    r"bert(?!.*decoder)|electra|wav2vec|hubert|wavlm|dinov|(^|_)vit(_|$)|^(esm|swin|siglip2?)\b": ENCODER,
}
# Endings of class names in `architectures` that no decoder with a cache has.
ENCODER_CLASSES = (
    "ForMaskedLM", "ForCTC", "ForImageClassification", "ForAudioClassification", "ForObjectDetection",
    "ForDepthEstimation", "ForSemanticSegmentation", "ForMaskedImageModeling", "ForPreTraining",
)  # fmt: skip
LAYER_TYPE_REASONS = {
    **_each("conv hybrid hybrid_sliding linear_attention mamba mamba2 recurrent rwkv", STATE),
    **_each("indexed_attention deepseek_sparse_attention qwen_sparse_attention", _INDEXER),
    **_each("compressed_sparse_attention heavily_compressed_attention", _SPARSE),
    "minimax_m3_sparse": _SPARSE,
    "cross_attention": _CROSS,
}
