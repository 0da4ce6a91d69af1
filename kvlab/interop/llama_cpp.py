"""The same weights in llama.cpp, through llama-cpp-python where it is installed."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from kvlab.interop.transformers import unfused
from kvlab.model.transformer import Transformer


def write_gguf(model: Transformer, path: Path) -> Path:
    """Write a Llama-family model as an unquantised bf16 GGUF without a tokenizer: it is fed token ids.

    Raises ValueError for an architecture whose GGUF layout this function does not know.
    """
    import gguf

    config = model.config
    if config.model_type != "llama":
        raise ValueError(f"{config.name} is of type {config.model_type}: only llama is written as GGUF")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in unfused(model).items():
        short = names.get_name(name, try_suffixes=(".weight",))
        _add(writer, short, _interleaved(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, name: str, weight: torch.Tensor) -> None:
    import gguf

    values = weight.float().numpy()
    if values.ndim == 1:  # norms stay fp32, as llama.cpp wants them
        writer.add_tensor(name, values)
    else:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _interleaved(name: str, weight: torch.Tensor, config) -> torch.Tensor:
    """llama.cpp rotates neighbours (0, 1), Hugging Face halves (0, D/2): the rows of q and k change places."""
    if ".q_proj." in name or ".k_proj." in name:
        halves = weight.view(-1, 2, config.head_dim // 2, *weight.shape[1:])  # (heads, 2, D/2, hidden)
        return halves.transpose(1, 2).reshape(weight.shape)
    return weight


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU. Raises ImportError where llama-cpp-python is not installed."""

    def __init__(self, path: Path, context: int, threads: int):
        from llama_cpp import Llama

        self._llama = Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False
        )

    def timed_tokens(self, token_ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy token ids, and the seconds that each took, the first with its prefill."""
        self._llama.reset()
        out, seconds, feed = [], [], token_ids
        for _ in range(count):
            before = perf_counter()
            self._llama.eval(feed)
            out.append(self._argmax())
            seconds.append(perf_counter() - before)
            feed = out[-1:]
        return out, seconds

    def _argmax(self) -> int:
        import llama_cpp

        logits = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._llama.n_vocab(),)).argmax())
