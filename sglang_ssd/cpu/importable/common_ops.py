"""The module that ``sgl_kernel`` imports when it finds no native library for this machine.

Its folder is put on ``sys.path`` by ``sglang_ssd.cpu.activate``; child processes inherit that path, so that they find
the operators even where ``sgl_kernel`` is imported before their plugins are loaded.
"""

from __future__ import annotations

from sglang_ssd.cpu import operators

operators.register()
