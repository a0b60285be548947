"""What `activate` does to a fresh SGLang process, and when it keeps its hands off."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from sglang_ssd import cpu


def run_python(code: str) -> str:
    """Output of ``code`` in a fresh interpreter, which inherits nothing of what this process was made to be."""
    made = ("SGLANG_USE_CPU_ENGINE", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in made}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_keeps_off_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_activated", False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert cpu.activate() is False


def test_keeps_off_where_sgl_kernel_is_a_cpu_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    monkeypatch.setattr(cpu, "_activated", False)
    assert not cpu._has_native_operators()
    (package / "common_ops.abi3.so").touch()
    assert cpu._has_native_operators()
    assert cpu.activate() is False


@pytest.mark.e2e
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_process_becomes_a_cpu_process() -> None:
    out = run_python(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.utils import is_cpu
        import sgl_kernel, torch
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.speculative import eagle_utils
        assert is_cpu()
        assert "torch_cpu" in ATTENTION_BACKENDS
        assert torch.ops.sgl_kernel.verify_tree_greedy_cpu
        assert eagle_utils.top_p_renorm_prob is not None
        assert eagle_utils._verify_uses_greedy(is_all_greedy=False, is_cpu=True) is False
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.arg_groups.platform_hook import handle_cpu_backends
        for named in (None, "torch_native"):
            args = ServerArgs(model_path="m", device="cpu", attention_backend=named)
            handle_cpu_backends(args)
            print(resolving_view(args).attention_backend)
        """
    )
    assert out.split()[-2:] == ["torch_cpu", "torch_native"]


@pytest.mark.e2e
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_child_process_finds_the_operators_before_its_plugins_are_loaded() -> None:
    """SGLang's child processes import ``sgl_kernel`` while they unpickle their task."""
    out = run_python(
        """
        import multiprocessing, subprocess
        from sglang_ssd.cpu import activate
        if __name__ == "__main__":
            from sglang.srt.utils import is_cpu
            assert not is_cpu()  # as in a program that imports sglang.Engine before any plugin is loaded
            assert activate() and activate()
            assert is_cpu()
            child = multiprocessing.get_context("spawn").Process(
                target=exec, args=("import sgl_kernel, torch; torch.ops.sgl_kernel.fill_bonus_tokens_cpu",)
            )
            child.start()
            child.join(250)
            print("exit", child.exitcode)
        """
    )
    assert "exit 0" in out


@pytest.mark.e2e
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_another_program_that_it_starts_is_not_disturbed() -> None:
    """It inherits the environment, and imports SGLang's kernels before it loads plugins."""
    run_python(
        """
        import subprocess, sys
        from sglang.srt.plugins import load_plugins
        load_plugins()
        subprocess.run([sys.executable, "-c", "import sgl_kernel"], check=True)
        """
    )
