"""Compiled functions where Numba may keep them on disk, and where it may not."""

from __future__ import annotations

import logging
from typing import Any

import numba
import pytest

from speculator_service import compiled as module
from speculator_service.compiled import compiled, compiled_for


def twice(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize("compile_", [compiled, compiled_for("int64(int64)")], ids=["when called", "at once"])
def test_without_a_folder_to_write_to(
    compile_: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on, and says once what to do."""

    def njit(*signature: str, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'x'")
        return numba.njit(*signature, **options)

    module._warn.cache_clear()
    monkeypatch.setattr(module, "njit", njit)
    with caplog.at_level(logging.WARNING):
        assert [compile_(twice)(3), compile_(twice)(4)] == [6, 8]
    assert [record.getMessage() for record in caplog.records if "NUMBA_CACHE_DIR" in record.getMessage()] != []
    assert len(caplog.records) == 1
    module._warn.cache_clear()


def test_other_types_than_those_named_are_an_error() -> None:
    function = compiled_for("int64(int64)")(twice)
    assert function(3) == 6
    with pytest.raises(TypeError, match="No matching definition"):
        function("3")
