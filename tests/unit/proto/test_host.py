"""Identities."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ssd_proto.host import host_identity, new_incarnation


def test_processes_of_one_host_agree() -> None:
    command = [sys.executable, "-c", "from ssd_proto.host import host_identity; print(host_identity())"]
    assert subprocess.check_output(command, text=True).strip() == host_identity()


def test_users_of_one_host_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = host_identity()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert host_identity() != ours


def test_incarnations_differ_and_fit_a_signed_word() -> None:
    incarnations = {new_incarnation() for _ in range(1000)}
    assert len(incarnations) == 1000
    assert all(0 < incarnation < 2**63 for incarnation in incarnations)
