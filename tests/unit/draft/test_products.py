"""Rounded products beside exact ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sglang_ssd.cpu import packed_weights
from speculator_service.draft import products
from speculator_service.draft.products import Bfloat16Products, SGLangProducts, can_round

INPUT, OUTPUT = 192, 4096

needs_bfloat16 = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN has no bfloat16 on this machine",
)


class Layer(torch.nn.Linear):
    """A linear layer as SGLang has it, which counts its own products."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__(INPUT, OUTPUT, bias=biased)
        self.quant_method, self.calls = self, 0

    def apply(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        return F.linear(x, layer.weight, bias)


@needs_bfloat16
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@torch.no_grad()
def test_a_product_is_that_of_rounded_numbers(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    layer, x = Layer(biased=biased), torch.randn(rows, INPUT)
    got = Bfloat16Products().linear(layer)(x)
    bias = None if layer.bias is None else layer.bias.bfloat16().double()
    wanted = F.linear(x.bfloat16().double(), layer.weight.bfloat16().double(), bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)
    assert layer.calls == 0


@needs_bfloat16
@torch.no_grad()
def test_small_products_are_not_rounded() -> None:
    layer, x = Layer(biased=True), torch.randn(1, INPUT)
    assert products._LEAST_WORK < INPUT * OUTPUT, "the other test shows nothing"
    layer.weight, layer.bias = torch.nn.Parameter(layer.weight[:64]), torch.nn.Parameter(layer.bias[:64])
    assert torch.equal(Bfloat16Products().linear(layer)(x), F.linear(x, layer.weight, layer.bias))
    assert layer.calls == 1


@needs_bfloat16
@torch.no_grad()
def test_the_output_layer_has_no_padding() -> None:
    torch.manual_seed(0)
    head, x = torch.nn.Linear(INPUT, OUTPUT, bias=False), torch.randn(3, INPUT)
    model = SimpleNamespace(
        lm_head=head, logits_processor=SimpleNamespace(_compute_lm_head=lambda x, head: F.linear(x, head.weight))
    )
    exact, rounded = (kind.head(model, OUTPUT - 96)(x) for kind in (SGLangProducts(), Bfloat16Products()))
    assert exact.is_contiguous()
    assert exact.shape == rounded.shape == (3, OUTPUT - 96)
    torch.testing.assert_close(rounded, exact, rtol=2**-6, atol=0.02)


@pytest.mark.parametrize("shape", [(2, 3, 8, 5), (16, 40, 64, 350)], ids=["small", "large"])
def test_batched(shape: tuple[int, int, int, int]) -> None:
    """Rounded at most; and the leave to round is taken back."""
    h, n, k, m = shape
    torch.manual_seed(0)
    a, b = torch.randn(h, n, k), torch.randn(h, k, m)
    torch.testing.assert_close(Bfloat16Products().batched(a, b), torch.bmm(a, b), rtol=2**-6, atol=0.2)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # type: ignore[attr-defined]


def test_no_memory_for_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    model, enough = torch.nn.Linear(INPUT, OUTPUT, bias=False), 8 * INPUT * OUTPUT
    assert can_round(model, enough)
    assert not can_round(model, enough - 1)


def test_no_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert not can_round(torch.nn.Linear(INPUT, OUTPUT), 1 << 40)


@needs_bfloat16
def test_the_plugins_copy_is_given_up() -> None:
    layer = Layer(biased=False)
    setattr(layer, packed_weights._ATTRIBUTE, object())
    Bfloat16Products().linear(layer)
    assert packed_weights._ATTRIBUTE not in layer.__dict__
