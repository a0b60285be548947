"""Make the checkpoints of `launch/quickstart --chat` if needed and print where: target, draft, token map."""

from __future__ import annotations

import argparse
import sys

from chat.pair import chat_pair
from children import end_on_signals, say

from ssd_proto.errors import ConfigError


def main() -> int:
    argparse.ArgumentParser(prog="launch/chat-models", description=__doc__).parse_args()
    end_on_signals()
    try:
        pair = chat_pair(say)
    except ConfigError as error:
        say(f"launch/chat-models: {error}")
        return 2
    except KeyboardInterrupt:
        say("\nlaunch/chat-models: interrupted; nothing is left half made")
        return 130
    sys.stdout.write(f"{pair.target}\n{pair.draft}\n{pair.token_map}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
