"""Products with packed weights are those of PyTorch, and always with the weights of the moment."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_ssd.cpu import packed_weights
from sglang_ssd.cpu.packed_weights import PackedWeight, pack
from tests.unit.cpu.test_activation import run_python

TINY_TARGET = Path(__file__).parents[2] / "models" / "tiny-target"
PROMPT = list(range(5, 50, 3))
NUM_TOKENS = 12

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is without oneDNN")


class UnquantizedLinearMethod:
    """Named as SGLang's."""


class Linear(torch.nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


class Model(torch.nn.Module):
    """One layer and an output layer, which SGLang calls as `product` and `logits` do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.output = Linear(512, 256), Linear(2048, 256)
        self.output.quant_method = None  # as that of an embedding it is of another kind
        self.fallbacks = 0

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_weights._apply(self._plain, self.layer.quant_method, self.layer, x, bias)

    def logits(self, x: torch.Tensor, **processor: object) -> torch.Tensor:
        settings = SimpleNamespace(**{"use_fp32_lm_head": False, "rl_on_policy_target": None, **processor})
        return packed_weights._compute_lm_head(self._plain, settings, x, self.output)

    def _plain(self, *arguments: Any) -> torch.Tensor:
        self.fallbacks += 1
        layer, x = sorted(arguments[1:3], key=lambda argument: isinstance(argument, torch.Tensor))
        return F.linear(x, layer.weight, arguments[3])


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    model = Model()
    pack(model)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (40,), (300,), (2, 3)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_product(dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this machine")
    torch.manual_seed(1)
    weight, x = torch.randn(320, 192, dtype=dtype), torch.randn(*shape, 192, dtype=dtype)
    bias = torch.randn(320, dtype=dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = PackedWeight(weight).product(x, bias)
    assert got.dtype == dtype
    assert got.shape == (*shape, 320)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.5)


def test_is_used_where_it_pays(model: Model) -> None:
    few, many = torch.randn(1, 256), torch.randn(7, 256)
    torch.testing.assert_close(model.product(many), F.linear(many, model.layer.weight), rtol=0, atol=1e-4)
    torch.testing.assert_close(model.logits(few), F.linear(few, model.output.weight), rtol=0, atol=1e-4)
    assert model.fallbacks == 0
    model.product(few)
    assert model.fallbacks == 1


@pytest.mark.parametrize("x", [torch.randn(7, 256, dtype=torch.float64), torch.empty(0, 256)], ids=["dtype", "empty"])
def test_other_products_are_left_to_sglang(model: Model, x: torch.Tensor) -> None:
    assert not model.layer.packed_weight.serves(model.layer.weight, x)


def test_settings_of_the_output_layer_are_left_to_sglang(model: Model) -> None:
    x = torch.randn(7, 256)
    model.logits(x, use_fp32_lm_head=True)
    model.logits(x, rl_on_policy_target="fsdp")
    assert model.fallbacks == 2


def test_a_replaced_weight_is_not_mistaken(model: Model) -> None:
    x = torch.randn(7, 256)
    model.layer.weight = torch.nn.Parameter(torch.randn(512, 256), requires_grad=False)
    assert torch.equal(model.product(x), F.linear(x, model.layer.weight))


def test_an_output_layer_that_is_replaced_is_packed_again(model: Model) -> None:
    x = torch.randn(7, 256)
    model.logits(x)
    model.output.weight = torch.nn.Parameter(torch.randn(1024, 256), requires_grad=False)
    torch.testing.assert_close(model.logits(x), F.linear(x, model.output.weight), rtol=0, atol=1e-4)
    assert model.fallbacks == 0


def test_adapters_are_left_to_sglang(model: Model) -> None:
    model.output.set_lora = lambda: None
    model.logits(torch.randn(7, 256))
    assert model.fallbacks == 1


def test_a_change_packs_again(model: Model) -> None:
    x = torch.randn(7, 256)
    before = model.product(x), model.logits(x)
    updater = SimpleNamespace(get_model=lambda: model)
    packed_weights._unpack_changing(updater)
    for layer in (model.layer, model.output):
        layer.weight.data.neg_()  # as SGLang's loaders do it: the version of the parameter stays
    torch.testing.assert_close(model.product(x), -before[0], rtol=0, atol=1e-4)  # as between the parts of a change
    torch.testing.assert_close(model.logits(x), -before[1], rtol=0, atol=1e-4)
    assert model.fallbacks == 1
    packed_weights._pack_changed(None, updater)
    torch.testing.assert_close(model.product(x), -before[0], rtol=0, atol=1e-4)
    assert model.fallbacks == 1


def test_too_little_memory(model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt import utils

    packed_weights.unpack(model)
    monkeypatch.setattr(utils, "get_available_gpu_memory", lambda *_: 0.001)
    x = torch.randn(7, 256)
    with caplog.at_level(logging.WARNING):
        pack(model)
        for _ in range(2):
            assert torch.equal(model.product(x), F.linear(x, model.layer.weight))
            assert torch.equal(model.logits(x), F.linear(x, model.output.weight))
    assert model.fallbacks == 4
    assert caplog.text.count("weights are not packed") == 2  # once for the layers, once for the output layer


@pytest.mark.e2e
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("switch", ["1", "0"])
def test_all_that_is_hooked_exists(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """SGLang only logs it if there is no such name."""
    monkeypatch.setenv(packed_weights.SWITCH, switch)
    out = run_python(
        """
        from sglang.srt.plugins import load_plugins
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang_ssd.cpu.packed_weights import CHANGES, COMPLETED, LOADED, PRODUCTS
        load_plugins()
        print("hooked:", len({LOADED, *PRODUCTS, *CHANGES, *COMPLETED} & HookRegistry._patched))
        """
    )
    hooked = {packed_weights.LOADED, *packed_weights.PRODUCTS, *packed_weights.CHANGES}
    assert f"hooked: {len(hooked) if switch == '1' else 0}" in out


def _negated(path: str, folder: Path) -> str:
    """A copy of the model whose last layer does the opposite, and whose output layer prefers other tokens."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    name = f"model.layers.{last}.mlp.down_proj.weight"
    head = "model.embed_tokens.weight"  # the two are tied
    save_file({**weights, name: -weights[name], head: weights[head].roll(1, 0).contiguous()}, file, {"format": "pt"})
    return str(folder)


def _greedy(path: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    return list(answer[0, len(PROMPT) :].tolist())


@pytest.mark.e2e
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_weights_of_a_real_engine_are_updated(tmp_path: Path) -> None:
    """Greedy tokens are those of the weights of the moment, by the Transformers library."""
    original = str(TINY_TARGET)
    negated = _negated(original, tmp_path / "negated")
    out = run_python(
        f"""
        import json, sglang

        engine = sglang.Engine(model_path={original!r}, device="cpu", dtype="float32", max_total_tokens=4096)
        sampling = {{"temperature": 0, "max_new_tokens": {NUM_TOKENS}, "ignore_eos": True}}
        answers = []
        for path in ({original!r}, {negated!r}, {original!r}):
            assert engine.update_weights_from_disk(path)[0]
            answers.append(engine.generate(input_ids={PROMPT}, sampling_params=sampling)["output_ids"])
        engine.shutdown()
        print("answers:", json.dumps(answers))
        """
    )
    wanted = [_greedy(original), _greedy(negated), _greedy(original)]
    assert wanted[0] != wanted[1]
    assert json.loads(out.rpartition("answers:")[2]) == wanted
