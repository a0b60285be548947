"""What is changed in SGLang at run time so that it serves on a CPU without its native CPU library."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_ssd.cpu import packed_weights

BACKEND = "torch_cpu"


def install() -> None:
    """Register the attention backend and the hooks; SGLang applies the hooks when all plugins are loaded."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices, add_draft_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_attention_backend_choices([BACKEND])
    add_draft_attention_backend_choices([BACKEND])
    hooks: dict[str, Callable[..., Any]] = {
        "sglang.srt.arg_groups.platform_hook.handle_cpu_backends": _choose_attention_backend,
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend": _create_draft_backend,
        "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__": _disable_pynccl,
        "sglang.srt.utils.numa_utils.init_threads_binding": _share_cores,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    register_resolution_hook("handle_speculative_decoding")(_complete_standalone)
    _register_attention_backend()
    _install_samplers()
    packed_weights.install()


def _register_attention_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(BACKEND)
    def create(runner: Any) -> Any:
        from sglang_ssd.cpu.attention_backend import TorchCpuAttnBackend

        if runner.use_mla_backend:
            raise NotImplementedError(
                "torch_cpu does not serve MLA models; start with --attention-backend torch_native"
            )
        return TorchCpuAttnBackend(runner)


def _install_samplers() -> None:
    """Put the CPU samplers where SGLang's verification looks for them.

    These names are None on CPU, and HookRegistry replaces every variable in every module that is identical to the
    original: with None as original that would be all of them. So they are set one by one.
    """
    from sglang.srt.speculative import eagle_utils

    from sglang_ssd.cpu import samplers

    eagle_utils.top_k_renorm_prob = samplers.top_k_renorm_prob
    eagle_utils.top_p_renorm_prob = samplers.top_p_renorm_prob
    eagle_utils.tree_speculative_sampling_target_only = samplers.tree_speculative_sampling_target_only
    eagle_utils.chain_speculative_sampling_triton = samplers.chain_speculative_sampling
    eagle_utils._verify_uses_greedy = samplers.verify_uses_greedy


def _choose_attention_backend(original: Callable[..., None], server_args: Any) -> None:
    """Make ``torch_cpu`` the default on device cpu; what the user named stays."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.device == "cpu" and view.attention_backend is None:
        declare_resolution(server_args, "sglang_ssd.cpu", attention_backend=BACKEND)
    original(server_args)


def _complete_standalone(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let ``--speculative-num-steps`` alone stand for a chain; SGLang would compare the missing top-k and die."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    steps, width = view.speculative_num_steps, view.speculative_num_draft_tokens
    is_standalone = (view.speculative_algorithm or "").upper() == "STANDALONE"
    if is_standalone and steps is not None and view.speculative_eagle_topk is None:
        declare_resolution(
            server_args,
            "sglang_ssd.cpu",
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=steps + 1 if width is None else width,
        )
    previous(server_args)


def _create_draft_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Teach SGLang's draft workers the backend: one object per draft step, or a plain one for draft extend."""
    from sglang_ssd.cpu.attention_backend import TorchCpuAttnBackend, TorchCpuMultiStepDraftBackend

    runner = factory.draft_model_runner

    def create() -> tuple[str, Any]:
        if kwargs.get("stamps_children"):
            return BACKEND, TorchCpuMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)
        return BACKEND, TorchCpuAttnBackend(runner)

    return original(factory, backend_name, {**backend_map, BACKEND: create}, *args, **kwargs)


def _disable_pynccl(
    _original: Callable[..., None], communicator: Any, group: Any, device: Any, *_: Any, **__: Any
) -> None:
    """Leave NCCL out: it loads wherever its library is installed, but needs GPUs. Collectives go through gloo."""
    communicator.group = group
    communicator.device = device
    communicator.available = False
    communicator.disabled = True


def _share_cores(original: Callable[..., Any], *, numa_index: int, world_size: int) -> Any:
    """Share the cores among the ranks when there are more ranks than NUMA nodes, which SGLang refuses by default."""
    from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

    if "SGLANG_CPU_OMP_THREADS_BIND" in os.environ or world_size <= len(get_cpu_ids_by_node()):
        return original(numa_index=numa_index, world_size=world_size)
    import torch

    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(share)
    first = (numa_index * share) % len(cores)
    return ",".join(str(core) for core in cores[first : first + share])
