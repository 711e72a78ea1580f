"""The rollouts that `rollalloc advise` judges: an existing log, or a profile that it samples first."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

from rich.console import Console

from rollalloc.advise.profile_folder import PROMPTS_DRAWN, ROLLOUTS_EACH
from rollalloc.cli.options import (
    RunOptions,
    SamplingOptions,
    changed_options,
    fields_in,
    folder,
    in_no_panel,
    listed,
    on_output,
    place,
)
from rollalloc.cli.progress import leave, say, staged
from rollalloc.cli.reading import Reading
from rollalloc.generate.endpoint import Endpoint

on_profile, on_server = map(fields_in, ("Sampling a profile", "A served model"))
_OF_SERVER = ("served_model", "concurrency", "request_limit", "retries", "price")  # options of --endpoint
_NOT_SERVED = ("model", "task", "device", "kv_tokens", "max_rows")  # options of a model in this process
_OF_LOGS = ("format", "weights", "group_size", "rows")  # options for reading other frameworks' logs


@dataclass(frozen=True, kw_only=True)
class Asked(Reading, SamplingOptions):
    """Options for reading a log, for sampling a model, and for the export."""

    reward: str | None = in_no_panel(
        None,
        "With a log: reward fields or columns to sum, comma-separated. With --model: the reward function, "
        "package.module:function or file.py:function, called as verl's compute_score.",
    )
    sample_prompts: int | None = on_profile(None, f"Maximum number of prompts to sample (default: {PROMPTS_DRAWN}).")
    sample_n: int | None = on_profile(None, f"Rollouts per prompt (default: {ROLLOUTS_EACH}).")
    endpoint: str | None = on_server(
        None, "Sample at an OpenAI-compatible server instead, e.g. http://localhost:8000/v1; OPENAI_API_KEY is its key."
    )
    served_model: str | None = on_server(None, "Name under which the server serves the model.")
    concurrency: int = on_server(Endpoint.concurrency, "Maximum number of parallel requests.")
    request_limit: float = on_server(Endpoint.limit_s, "Time limit of a request, in seconds.")
    retries: int = on_server(Endpoint.retries, "Retries of a failed request.")
    price: str | None = on_server(
        None, "Two prices per million tokens, for prompts and for answers, e.g. 0.15,0.60, to show the cost."
    )
    out: Path | None = on_output(
        None, "Folder of the profile; an unfinished one continues (default: a new folder in runs/).", parser=folder
    )
    overwrite: bool = on_output(False, "First delete the files of another profile in the folder.", "--overwrite")

    export: Path | None = on_output(
        None, "Write a curriculum to this Parquet file: each prompt's success rate and sampling weight.", parser=place
    )
    mix: str = on_output("variance", "Weights for --export: variance, uniform, gaussian:MEAN,DEVIATION or foresight.")

    def log(self, path: str | None, seed: int) -> tuple[str, Reading]:
        """The log to judge, and how to read it. Without a path, a profile is sampled and used as the log.

        Raises:
            ValueError: there is neither a log nor a model, or there are both; an option does not apply; or
                `sample_profile` raises an error.
        """
        if path is not None:
            if options := changed_options(self, _OF_SAMPLING):
                raise ValueError(
                    f"{options}: does not apply to a log; leave it out, or give no log and sample a profile"
                )
            return path, self
        if self.task is None and self.model is None and self.endpoint is None:
            raise ValueError(
                "give a log of rollouts; or, to sample a profile, give --task, or --prompts and --reward with either "
                "--model or --endpoint"
            )
        if self.endpoint is None and (options := changed_options(self, _OF_SERVER)):
            raise ValueError(f"{options}: applies only with --endpoint; leave it out, or give --endpoint")
        if self.endpoint is not None and (options := changed_options(self, _NOT_SERVED)):
            raise ValueError(
                f"{options}: cannot be used with --endpoint, because the server generates the rollouts; leave it out"
            )
        if self.endpoint is not None and not (self.served_model or "").strip():
            raise ValueError("--endpoint also needs --served-model, the name under which the server serves the model")
        if options := changed_options(self, _OF_LOGS):
            raise ValueError(f"{options}: does not apply when a profile is sampled; leave it out")
        return str(self._profile(seed)), replace(self, reward=None)

    def _profile(self, seed: int) -> Path:
        """Sample a profile, or continue one, and return its folder."""
        from rollalloc.advise.sampled_profile import sample_profile
        from rollalloc.cli.sources import run_of
        from rollalloc.tasks.presets import with_task_files
        from rollalloc.train.loading import one_thread

        console = Console(stderr=True)
        options = RunOptions(**{each.name: getattr(self, each.name) for each in fields(SamplingOptions)})
        if self.endpoint is not None:
            options = replace(options, model=self.served_model)
        run = run_of(
            options, "grpo", {}, seed
        )  # only its data, reward and sampling are used; grpo goes with one prompt, too
        if self.task:
            one_thread()
        name = run.task.replace("/", "-") or Path(run.model).resolve().name
        place = self.out or Path("runs") / f"profile-{name}-{seed}"
        how: dict[str, Any] = {"prompts": self.sample_prompts, "n": self.sample_n}
        how = {name: value for name, value in how.items() if value is not None}
        say(console, f"the profile is kept in {place}; run the same command again to continue it")
        try:
            with staged() as shown:
                how |= {"seed": seed, "overwrite": self.overwrite, "progress": shown}
                if self.endpoint is None:
                    return sample_profile(with_task_files(run, self.tasks, shown), place, **how)
                from rollalloc.advise.served import sample_served

                limits = {"concurrency": self.concurrency, "retries": self.retries}
                server = Endpoint(url=self.endpoint, limit_s=self.request_limit, **limits)
                how |= {"prices": self._prices(), "say": lambda text: say(console, text)}
                return sample_served(run, server, place, **how)
        except KeyboardInterrupt:
            since = "the last whole wave" if self.endpoint is None else "the answers"
            leave(console, f"stopped; run the same command again to continue from {since} in {place}", SIGINT)

    def _prices(self) -> tuple[float, float] | None:
        """Prices per million tokens of prompts and of answers, or None."""
        if self.price is None:
            return None
        prices = listed("--price", self.price, float, "0.15,0.60")
        if len(prices) != 2 or not all(0 <= price < 1e6 for price in prices):
            raise ValueError(
                f"--price: expected two prices, for prompts and for answers, got {self.price!r}; e.g. 0.15,0.60"
            )
        return prices[0], prices[1]


_OF_BOTH = {"export", "mix", *(each.name for each in fields(Reading))}
_OF_SAMPLING = tuple(each.name for each in fields(Asked) if each.name not in _OF_BOTH)
