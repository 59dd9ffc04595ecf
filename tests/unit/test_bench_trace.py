"""Traces and workloads of `bench-serve`, and what is reported of them."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import __main__ as serve
from benchmarks.serve.clients import Job, Outcome, Target, prompt_ids, run_trace
from benchmarks.serve.report import by_popularity, report
from benchmarks.shared.trace import (
    POPULARITIES,
    TraceInvalid,
    TraceRequest,
    punica,
    read_trace,
    slora,
    write_trace,
)

NAMES = tuple(f"a{index}" for index in range(50))
GOOD = {"time": 0.5, "adapter": "a", "prompt_tokens": 3, "output_tokens": 4}


def test_written_trace_reads_back_in_the_order_of_its_times(tmp_path: Path) -> None:
    requests = (TraceRequest(2.0, "b", 3, 4), TraceRequest(0.5, "", 1, 1))
    write_trace(tmp_path / "t.jsonl", requests)
    assert read_trace(tmp_path / "t.jsonl", 16) == (requests[1], requests[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be a JSON object"),
        (json.dumps({**GOOD, "tenant": "x"}), "field 'tenant' is unknown; fields are time,"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "time"}), "field 'time' is missing"),
        (json.dumps({**GOOD, "time": -1}), "time is -1; must be seconds from 0 to 604800"),
        (json.dumps({**GOOD, "time": True}), "time is True"),
        ('{"time": NaN, "adapter": "a", "prompt_tokens": 1, "output_tokens": 1}', "time is nan"),
        (json.dumps({**GOOD, "adapter": 5}), "adapter is 5; must be text of at most 128"),
        (json.dumps({**GOOD, "adapter": "x" * 129}), "must be text of at most 128"),
        (json.dumps({**GOOD, "prompt_tokens": 0}), "prompt_tokens is 0; must be a whole number"),
        (json.dumps({**GOOD, "output_tokens": 2.5}), "output_tokens is 2.5"),
        (json.dumps({**GOOD, "output_tokens": 14}), "is 17; must be at most 16 (--context-tokens)"),
    ],
)
def test_bad_line_is_named_with_field_value_and_limit(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(TraceInvalid) as refused:
        read_trace(path, 16)
    assert str(refused.value).startswith("t.jsonl line 2: ")
    assert said in str(refused.value)


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    with pytest.raises(TraceInvalid, match="no request"):
        read_trace(tmp_path / "t.jsonl", 16)


def test_slora_workload_has_its_rate_popularity_and_lengths() -> None:
    requests = slora(NAMES, per_s=50.0, seconds=100.0, seed=1)
    assert requests == slora(NAMES, per_s=50.0, seconds=100.0, seed=1)
    assert len(requests) == pytest.approx(5000, rel=0.05)
    assert all(0 < one.time < 100 for one in requests)
    counts = Counter(one.adapter for one in requests)
    harmonic = sum(1 / rank for rank in range(1, 51))
    assert counts["a0"] / len(requests) == pytest.approx(1 / harmonic, rel=0.1)
    assert counts["a0"] / counts["a3"] == pytest.approx(4, rel=0.3)
    lengths = [one.prompt_tokens for one in requests]
    assert (min(lengths) >= 8, max(lengths) <= 512) == (True, True)
    assert statistics.mean(lengths) == pytest.approx(260, rel=0.05)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_punica_workload_has_its_popularity_and_fits_the_context(popularity: str) -> None:
    requests = punica(NAMES, popularity, 50.0, 50.0, seed=1, context_tokens=256)
    counts = Counter(one.adapter for one in requests)
    least, most = {"identical": (1, 1), "zipf": (40, 50)}.get(popularity, (45, 50))
    assert least <= len(counts) <= most
    if popularity == "zipf":
        assert counts["a0"] / counts["a3"] == pytest.approx(8, rel=0.3)
    if popularity == "distinct":
        assert max(counts.values()) <= 1 + min(counts.values())
    if popularity == "uniform":
        assert max(counts.values()) < 4 * min(counts.values())
    assert all(one.prompt_tokens + one.output_tokens <= 257 for one in requests)
    assert statistics.median(one.prompt_tokens for one in requests) == pytest.approx(17, abs=2)


def test_prompts_of_a_trace_differ_from_their_beginning_and_stay_in_the_vocabulary() -> None:
    jobs = [Job(number, TraceRequest(0.0, "", 20, 1)) for number in range(3000)]
    prompts = [prompt_ids(job, 1000) for job in jobs]
    assert len({tuple(prompt[:2]) for prompt in prompts}) == len(prompts)
    assert all(len(prompt) == 20 and 0 < min(prompt) <= max(prompt) < 1000 for prompt in prompts)
    assert len(prompt_ids(Job(5, TraceRequest(0.0, "", 1, 1)), 1000)) == 1


def outcome(number: int, adapter: str, first_s: float = -1.0, ended_s: float = -1.0) -> Outcome:
    request = TraceRequest(float(number), adapter, 8, 3)
    return Outcome(Job(number, request), float(number), first_s, ended_s, ended_s, 3)


def test_report_divides_adapters_into_tenths_by_popularity() -> None:
    ranked = [f"a{index}" for index in range(20)]
    outcomes = [
        outcome(0, "a0", 0.5, 2.5), outcome(1, "a1", 3.0, 5.0), outcome(2, "a19"),
        outcome(3, "a19", 9.0),
    ]  # fmt: skip
    found = report(outcomes, ranked, cut_s=10.0)
    assert [group.requests for group in found.deciles] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found.deciles[0].share_started == 1.0
    assert found.deciles[-1].share_started == 0.5
    assert (found.total.finished, found.finished_per_s) == (2, 0.2)
    assert found.deciles[0].ttft_p50 == pytest.approx(1.25)
    assert found.deciles[0].tpot_p50 == pytest.approx(1.0)


def test_window_of_a_run_that_was_not_cut_ends_with_its_last_request() -> None:
    found = report([outcome(0, "a", 0.5, 2.0)], ["a"], cut_s=10.0)
    assert found.window_s == 2.0
    refused = Outcome(Job(1, TraceRequest(1.0, "a", 1, 1)), 1.0, error="QUEUE_FULL")
    found = report([outcome(0, "a", 0.5, 2.0), refused], ["a"], cut_s=10.0)
    assert (found.window_s, found.errors) == (2.0, (("QUEUE_FULL", 1),))


def test_popularity_of_a_trace_is_counted() -> None:
    requests = [TraceRequest(0.0, name, 1, 1) for name in ("b", "c", "b", "a", "c", "b")]
    assert by_popularity(requests) == ["b", "c", "a"]


class FakeCompletions(BaseHTTPRequestHandler):
    """A server with OpenAI's completions: three tokens, each an event; `slow` never answers."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))  # type: ignore[attr-defined]
        if body["model"] == "missing":
            self.send_error(404, "no such model")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        if body["model"] == "slow":
            self.server.ended.wait(10)  # type: ignore[attr-defined]
            return
        for _ in range(3):
            self._event({"choices": [{"text": "x"}]})
            time.sleep(0.02)
        self._event({"choices": [], "usage": {"completion_tokens": 3}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def completions() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeCompletions)
    server.bodies, server.ended = [], threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.ended.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_openai_server_is_driven_with_token_ids_and_a_stream(
    completions: ThreadingHTTPServer,
) -> None:
    target = Target(f"http://127.0.0.1:{completions.server_port}", "base", 500)
    requests = [
        TraceRequest(0.0, "lora", 5, 3), TraceRequest(0.05, "", 4, 3),
        TraceRequest(0.1, "missing", 4, 3), TraceRequest(0.1, "slow", 4, 3),
    ]  # fmt: skip
    outcomes = run_trace(target, requests, cut_s=1.5, workers=1)
    done, base, missing, slow = outcomes
    assert (done.tokens, base.tokens) == (3, 3)
    assert done.ended_s >= done.last_s > done.first_s >= done.sent_s >= 0
    assert done.tpot_s == pytest.approx(0.02, rel=0.9)
    assert missing.error.startswith("HTTP 404")
    assert (slow.error, slow.first_s, slow.ended_s) == ("", -1.0, -1.0)
    bodies = dict((body["model"], body) for _, body in completions.bodies)  # type: ignore[attr-defined]
    assert bodies.keys() == {"lora", "base", "missing", "slow"}
    assert len(bodies["lora"]["prompt"]) == 5
    assert (bodies["lora"]["max_tokens"], bodies["lora"]["stream"]) == (3, True)


def test_target_mode_reads_the_trace_and_names_a_bad_line(
    tmp_path: Path, completions: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://127.0.0.1:{completions.server_port}"
    trace = tmp_path / "mine.jsonl"
    trace.write_text(json.dumps({**GOOD, "time": 0.0}))
    arguments = ["--target", address, "--trace", str(trace), "--results", str(tmp_path / "rows")]
    assert serve.main([*arguments, "--workers", "1", "--cut", "5"]) == 0
    assert "TTFT p50" in capsys.readouterr().out
    trace.write_text(json.dumps({**GOOD, "time": "now"}))
    assert serve.main(arguments) == 2
    assert "mine.jsonl line 1: time is 'now'" in capsys.readouterr().err
