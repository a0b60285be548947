"""Draft models that cannot work are refused by their config.json, with a sentence that says what to change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speculator_service.draft.config import DraftConfig
from speculator_service.draft.sglang_arguments import graph_sizes, server_arguments
from ssd_proto.errors import ConfigError
from ssd_proto.model_checks import check_model_config, model_context_length, read_model_config

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512}


def write(path: Path, **changes: Any) -> str:
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    (path / "model.safetensors").touch()
    return str(path)


def config(path: str, **changes: Any) -> DraftConfig:
    return DraftConfig(**{"model_path": path, "max_slots": 4, "num_branches": 6, "lookahead": 3, **changes})


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "layer_types": ["full_attention"]},
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1},
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None},
        {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
        {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_nextn_predict_layers": 0},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_attention_models_are_accepted(good: dict[str, Any]) -> None:
    check_model_config({**LLAMA, **good}, device="cpu")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "attention layers only"),
        ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "attention layers only"),
        ({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}, "attention layers only"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "attention layers only"),
        ({"layer_types": ["conv", "full_attention"], "model_type": "other"}, "attention layers only"),
        ({"hybrid_override_pattern": "M-M*"}, "attention layers only"),
        ({"text_config": {"model_type": "x", "mamba_d_state": 16}}, "attention layers only"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "complete language model"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "complete language model"),
        ({"architectures": ["Qwen3_5MTP"]}, "complete language model"),
        ({"draft_vocab_size": 32000}, "complete language model"),
        ({"is_encoder_decoder": True}, "decoder-only"),
        ({"attn_logit_softcapping": 50.0, "model_type": "gemma2"}, "--device cuda"),
        ({"kv_lora_rank": 512}, "--device cuda"),
        ({"model_type": "gpt_oss"}, "--device cuda"),
    ],
)
def test_other_models_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_model_config({**LLAMA, **bad}, device="cpu")


def test_cuda_allows_what_only_the_cpu_code_lacks() -> None:
    check_model_config({**LLAMA, "attn_logit_softcapping": 50.0}, device="cuda")


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        read_model_config("/no/such/model")
    with pytest.raises(ConfigError, match="is not a directory"):
        read_model_config("./model")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no weights"):
        read_model_config(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_config(str(tmp_path))
    assert read_model_config(write(tmp_path)) == LLAMA


def test_hub_name_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="neither a directory nor"):
        read_model_config("nobody/no-such-model")


def test_context_length_rule() -> None:
    assert model_context_length(LLAMA) == 512
    assert model_context_length({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}) == 1024
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert model_context_length({**LLAMA, "rope_scaling": llama3}) == 512
    assert model_context_length({"text_config": {"max_position_embeddings": 64}}) == 64


def test_defaults_are_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    resolved = config(write(tmp_path)).resolved()
    assert resolved.context_length == 512
    assert resolved.max_total_tokens == 4 * (512 + 6 * 3)
    assert (resolved.attention_backend, resolved.num_threads) == ("shared_trunk", 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert config(write(tmp_path), device="cuda:1").resolved().num_threads == 3
    assert config(write(tmp_path), device="cuda:1").resolved().attention_backend == "triton"
    assert config(write(tmp_path), device="cuda:1").gpu_id == 1
    write(tmp_path, max_position_embeddings=131072)
    assert config(str(tmp_path)).resolved().max_total_tokens == 4 * (4096 + 6 * 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context_length": 513}, "allows 2 to 512"),
        ({"context_length": 1}, "allows 2 to 512"),
        ({"max_total_tokens": 529}, "at least 530"),
        ({"max_slots": 0}, "max_slots is 0"),
        ({"lookahead": 0}, "lookahead is 0"),
        ({"num_branches": -1}, "num_branches is -1"),
        ({"max_slots": 5000}, "lower max_slots"),
        ({"device": "gpu"}, "cuda:N"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"device": "cuda", "attention_backend": "shared_trunk"}, "CPU only"),
    ],
)
def test_impossible_settings(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(write(tmp_path), **change).resolved()


def test_checking_imports_neither_sglang_nor_torch() -> None:
    code = "import sys, speculator_service.draft.config; sys.exit(bool({'sglang', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_sglang_arguments(tmp_path: Path) -> None:
    on_cpu = server_arguments(config(write(tmp_path)).resolved())
    assert (on_cpu["device"], on_cpu["page_size"], on_cpu["disable_cuda_graph"]) == ("cpu", 1, True)
    on_gpu = server_arguments(config(write(tmp_path), device="cuda:1", max_slots=16).resolved())
    assert (on_gpu["device"], on_gpu["base_gpu_id"], on_gpu["attention_backend"]) == ("cuda", 1, "triton")
    assert on_gpu["max_running_requests"] == 16 * 7


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 100, 112, 1024])
def test_decode_graphs_cover_every_batch_with_little_padding(rows: int) -> None:
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == rows
    assert all(next(s for s in sizes if s >= n) - n <= max(7, n // 4) for n in range(1, rows + 1))
    assert len(sizes) < 60
