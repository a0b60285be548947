"""``--speculative-algorithm SSD`` as SGLang sees it: the algorithm object and the server arguments it implies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ssd.client import request_info
from sglang_ssd.config import VerifierConfig
from sglang_ssd.flags import verifier_config
from ssd_proto.channel import MAX_LOOKAHEAD
from ssd_proto.errors import ConfigError, DeadlineExceeded, ProtocolError
from ssd_proto.fingerprint import fingerprint, mismatch
from ssd_proto.model_checks import check_model_config, read_model_config
from ssd_proto.trace import check_trace

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.server_args import ServerArgs

    from ssd_proto.messages import ModelFingerprint

NAME = "SSD"
_DEFAULT_LOOKAHEAD = 4
_DEFAULT_MAX_RUNNING_REQUESTS = 48  # SGLang's own default under speculation
_INFO_TIMEOUT_S = 2.0


class SSDAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions about the algorithm.

    `is_standalone` makes SGLang capture verify graphs and choose hidden-state modes as for its own chain
    of drafts from a separate model.  With no draft model path set it reserves no draft memory, save for
    targets that bring layers for multi-token prediction: SGLang counts those whatever the algorithm.
    """

    def is_standalone(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        return True

    # The scheduler calls these three on every algorithm; the base class of plugins lacks them.

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)


def resolve_server_args(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution step around SGLang's ``handle_speculative_decoding``: check, then decide. Errors: `ConfigError`."""
    cfg = resolving_view(server_args)
    if (cfg.speculative_algorithm or "").upper() == NAME:
        config = verifier_config(server_args)
        check_trace(config.trace)
        _check_server(cfg)
        lookahead = _check_speculator(cfg, config)
        on_cpu = cfg.device == "cpu"
        declare_resolution(
            server_args,
            "sglang_ssd",
            speculative_draft_model_path=None,  # the service's business: nothing of it is loaded here
            speculative_num_steps=lookahead,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=lookahead + 1,
            max_running_requests=cfg.max_running_requests or _DEFAULT_MAX_RUNNING_REQUESTS,
            enable_mixed_chunk=False,
            disable_overlap_schedule=cfg.disable_overlap_schedule or (on_cpu and not config.overlap_on_cpu),
        )
    previous(server_args)


def _check_server(cfg: Any) -> None:
    """Refuse what SSD cannot serve, before any weights load."""
    if cfg.pp_size > 1:
        raise ConfigError("SSD does not work with pipeline parallelism; use --tp-size instead of --pp-size")
    if cfg.enable_dp_attention or (cfg.attn_dp_size or 1) > 1:
        raise ConfigError("SSD does not work with DP attention; leave out --attn-dp-size and --enable-dp-attention")
    if (cfg.page_size or 1) != 1:
        raise ConfigError(f"SSD needs --page-size 1, got {cfg.page_size}")
    if cfg.disaggregation_mode != "null":
        raise ConfigError("SSD does not work with --disaggregation-mode; leave it out")
    if cfg.speculative_adaptive:
        raise ConfigError("SSD does not work with --speculative-adaptive; leave it out")
    if cfg.speculative_eagle_topk not in (None, 1):
        raise ConfigError(f"SSD verifies chains: leave out --speculative-eagle-topk {cfg.speculative_eagle_topk}")
    if cfg.speculative_accept_threshold_single != 1.0 or cfg.speculative_accept_threshold_acc != 1.0:
        raise ConfigError("SSD is exact: leave out --speculative-accept-threshold-single and -acc")
    if cfg.enable_return_hidden_states:
        raise ConfigError("SSD does not return hidden states; leave out --enable-return-hidden-states")
    if cfg.enable_watermark:
        raise ConfigError("SSD does not work with --enable-watermark; leave it out")


def _check_speculator(cfg: Any, config: VerifierConfig) -> int:
    """Check the draft model or the running service against the target; returns the lookahead."""
    lookahead = cfg.speculative_num_steps
    if lookahead is not None and not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise ConfigError(f"--speculative-num-steps must be between 1 and {MAX_LOOKAHEAD} for SSD, got {lookahead}")
    if cfg.speculative_num_draft_tokens not in (None, (lookahead or _DEFAULT_LOOKAHEAD) + 1):
        raise ConfigError(
            "SSD verifies --speculative-num-steps + 1 tokens; leave out --speculative-num-draft-tokens "
            f"{cfg.speculative_num_draft_tokens}"
        )
    if config.endpoint is None:
        _check_draft(cfg, config)
        return lookahead or _DEFAULT_LOOKAHEAD
    try:
        info = request_info(config.endpoint, _INFO_TIMEOUT_S)
    except (DeadlineExceeded, ProtocolError):
        return lookahead or _DEFAULT_LOOKAHEAD  # nobody there yet: the server starts without and connects later
    if lookahead is not None and lookahead != info.lookahead:
        raise ConfigError(
            f"the speculator at {config.endpoint} drafts {info.lookahead} tokens ahead: give "
            f"--speculative-num-steps {info.lookahead}, or start it with --lookahead {lookahead}"
        )
    if info.num_kept != config.num_kept:
        raise ConfigError(
            f"the speculator at {config.endpoint} sends {info.num_kept} probabilities per token: set num_kept to "
            f"{info.num_kept} in --speculative-ssd-config, or start it with --num-kept {config.num_kept}"
        )
    reason = mismatch(_target_fingerprint(cfg), info.draft)
    if reason is not None:
        raise ConfigError(reason)
    return info.lookahead


def _check_draft(cfg: Any, config: VerifierConfig) -> None:
    """Check the draft model of an embedded service, as the service itself will."""
    draft = cfg.speculative_draft_model_path
    if draft is None:
        raise ConfigError(
            "SSD needs a speculator: give --speculative-draft-model-path for an embedded one, "
            "or --speculative-ssd-endpoint of a running service"
        )
    revision = cfg.speculative_draft_model_revision
    device = str(config.service.get("device", cfg.device)).partition(":")[0]
    check_model_config(read_model_config(draft, revision), device=device)
    reason = mismatch(_target_fingerprint(cfg), fingerprint(draft, revision, cfg.trust_remote_code))
    if reason is not None:
        raise ConfigError(reason)


def _target_fingerprint(cfg: Any) -> ModelFingerprint:
    return fingerprint(cfg.model_path, cfg.revision, cfg.trust_remote_code)
