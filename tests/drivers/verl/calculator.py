"""A toy tool for `multi_turn.function_tool_path`, and the parser of the calls that a random model makes of it."""

import json
import re
import time

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

SECONDS = 0.3  # so that some wait for it when their group is decided, or the weights change


@function_tool
def calculator(numbers: list[int]) -> str:
    """Adds numbers up.

    Args:
        numbers: what to add.
    """
    time.sleep(SECONDS)
    return f"sum {sum(numbers)}"


@ToolParser.register("digits")
class Digits(ToolParser):
    """The first digit ends a turn, and is a call."""

    @property
    def stop_token_ids(self):
        return self.tokenizer.convert_tokens_to_ids(list("0123456789"))

    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids)
        digits = [int(digit) for digit in re.findall("[0-9]", text)]
        arguments = json.dumps({"numbers": digits})
        return text, [FunctionCall(name="calculator", arguments=arguments)] if digits else []
