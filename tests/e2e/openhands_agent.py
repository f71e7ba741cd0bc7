"""An OpenHands agent, as a user of its SDK would write it with our adapter. Run by its Python.

Arguments: base URL, window, task; works in the current folder. The key is in KVWS_API_KEY.
"""

from __future__ import annotations

import os
import sys

from openhands.sdk import Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool

from kvws.harness_adapters import openhands
from kvws.harness_adapters.address import ServerAddress


def main(base_url: str, window_tokens: str, task: str, stream: str) -> None:
    address = ServerAddress(base_url, os.environ["KVWS_API_KEY"], int(window_tokens), "simulated")
    agent = Agent(
        llm=openhands.llm(address, stream=stream == "stream"),
        condenser=openhands.condenser(),
        tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)],
    )
    callbacks = {"token_callbacks": [lambda _: None]} if stream == "stream" else {}
    conversation = Conversation(agent=agent, workspace=os.getcwd(), **callbacks)
    conversation.send_message(task)
    conversation.run()
    print(f"ended as {conversation.state.execution_status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
