"""The engine's settings in SGLang's words. Imports nothing of SGLang."""

from __future__ import annotations

from speculator_service.draft.config import DraftConfig


def server_arguments(config: DraftConfig) -> dict[str, object]:
    """Keyword arguments of ``ServerArgs`` for a resolved configuration."""
    shared_trunk = config.attention_backend == "shared_trunk"
    arguments: dict[str, object] = {
        "model_path": config.model_path,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
        "device": config.device_type,
        "base_gpu_id": config.gpu_id,
        # A lean forward exists in float32 only; its products may be rounded (products.py).
        "dtype": "float32" if config.device_type == "cpu" and config.dtype == "auto" else config.dtype,
        "attention_backend": "torch_native" if shared_trunk else config.attention_backend,
        "page_size": 1,
        "max_running_requests": config.max_rows,
        "max_total_tokens": config.max_total_tokens,
        "context_length": config.context_length,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_hybrid_swa_memory": True,
        "disable_prefill_cuda_graph": True,
        "skip_tokenizer_init": True,
        "log_level": "warning",
    }
    if config.device_type == "cpu":
        arguments["disable_cuda_graph"] = True
    else:
        arguments["cuda_graph_bs_decode"] = graph_sizes(config.max_rows)
    return arguments


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture decode graphs for: at most an eighth of the rows of a step is padding."""
    sizes, size = [1, 2, 4], 8
    while size < max_rows:
        sizes.append(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return [n for n in sizes if n < max_rows] + [max_rows]
