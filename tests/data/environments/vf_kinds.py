"""Tasksets of verifiers for the tests: one that can be used, and one for each reason why one cannot."""

from __future__ import annotations

import os
import time

import verifiers.v1 as vf

if kind := os.environ.get("RAISES_AT_IMPORT"):
    raise SystemExit(3) if kind == "exit" else KeyError("SOME_API_KEY")


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        match trace.last_message.content:
            case "crash":
                raise KeyError("crash")
            case "no number":
                return float("nan")
            case "loud":
                print("loud " * 1_000_000)  # noqa: T201
            case "hang":
                time.sleep(1000)
        return float(trace.last_message.content.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_message.content) < 4)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumConfig(vf.TasksetConfig):
    number: int = 6
    kind: str = ""
    hint: str = "Give the number."


class Toolset(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b


class ToolTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Toolset(vf.ToolsetConfig())]


class SandboxTask(SumTask):
    @vf.reward
    async def ran(self, runtime) -> float:
        return 1.0


class SetupTask(SumTask):
    async def setup(self, trace, runtime) -> None:
        pass


class VerifierTask(SumTask):
    async def stage_verifier(self, trace, runtime) -> None:
        pass


class ContainerTask(SumTask):
    NEEDS_CONTAINER = True


class StopTask(SumTask):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 3


class NoRewardTask(vf.Task[SumData]):
    pass


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
PROMPTS = {"user": None, "no messages": [], "image": [{"role": "user", "content": IMAGE}]}
KINDS = {
    "": SumTask,
    "tool": ToolTask,
    "sandbox": SandboxTask,
    "setup": SetupTask,
    "verifier": VerifierTask,
    "container": ContainerTask,
    "stop": StopTask,
    "no reward": NoRewardTask,
}


class OtherTask(SumTask):
    @vf.reward
    async def another(self, trace: vf.Trace) -> float:
        return 1.0


KINDS["other"] = OtherTask


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(1, self.config.number + 1):
            if self.config.kind == "broken" and n == 3:
                raise OSError("no network")
            prompt = PROMPTS.get(self.config.kind, f"What is {n} + {n}?")
            data = SumData(prompt=prompt, system_prompt=self.config.hint, answer=str(2 * n))
            yield KINDS.get(self.config.kind, SumTask)(data, self.config.task)


__all__ = ["SumTaskset"]
