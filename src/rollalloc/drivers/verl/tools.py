# pyright: reportMissingImports=false
# (verl and what it needs live in an environment of their own: constraints/verl-cpu.txt)
"""verl's agent loop with tools, changed so that lengths are exact and a tool cannot end the worker."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import AgentState, ToolAgentLoop
from verl.tools.schemas import ToolResponse

from rollalloc.drivers.verl.client import LIVE


@register("tool_agent")
class ToolLoop(ToolAgentLoop):
    """Replaces verl's loop of the same name."""

    async def _handle_generating_state(
        self, agent_data: Any, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Generate at most as many tokens as fit into the response. verl would generate more and cut them off."""
        room = self.response_length - len(agent_data.response_mask)
        limited = sampling_params | {"max_tokens": min(room, sampling_params.get("max_tokens", room))}
        return await super()._handle_generating_state(agent_data, limited, ignore_termination)

    async def _handle_processing_tools_state(self, agent_data: Any) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        if state is AgentState.TERMINATED and (live := LIVE.get()) is not None:
            live.truncated = True  # verl ended it because the tool's answer does not fit; the row does not show this
        return state

    async def _call_tool(self, tool_call: Any, *args: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call a tool as verl does, but survive a tool that calls `exit`, which would end the worker."""
        try:
            return await super()._call_tool(tool_call, *args)
        except (SystemExit, KeyboardInterrupt) as error:
            return ToolResponse(text=f"Error executing tool '{tool_call.name}': {type(error).__name__}"), 0.0, {}
