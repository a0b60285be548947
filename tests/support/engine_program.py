"""A program that uses `sglang.Engine` offline: reads requests as JSON from stdin, writes the answers to a file.

python -m tests.support.engine_program OUTPUT.json < REQUESTS.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import sglang


async def streamed(engine: sglang.Engine, prompt: str, sampling: dict[str, Any]) -> dict[str, Any]:
    """The last chunk of a streamed completion."""
    chunks = [chunk async for chunk in await engine.async_generate(prompt, sampling, stream=True)]
    return chunks[-1]


async def together(engine: sglang.Engine, prompts: list[str], sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Completions of requests that run at the same time, half of them streamed."""
    tasks = [
        streamed(engine, prompt, sampling) if position % 2 else engine.async_generate(prompt, sampling)
        for position, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*tasks))


def main() -> None:
    work = json.load(sys.stdin)
    with sglang.Engine(**work["engine"]) as engine:
        prompts, sampling = work["prompts"], work["sampling"]
        answers = {
            "batch": engine.generate(prompts, sampling),
            "stream": list(engine.generate(prompts[0], sampling, stream=True)),
            "async": engine.loop.run_until_complete(together(engine, prompts, sampling)),
        }
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
