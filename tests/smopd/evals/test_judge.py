"""API-Bank's judge against a scripted endpoint: its failures, the cache, and the command."""

import json
import threading
import time

import httpx
import pytest

from smopd.evals.api_bank import judge as judging
from smopd.evals.api_bank.judge import Judge, JudgeSettings, judgment
from tests.smopd.recipes import evaluated, write_lines

YES, NO = "Reasoning: same.\nJudgment: Yes", "Reasoning: other.\nJudgment: No"
CALL = {"name": "Find", "parameters": {"city": "Oslo"}}
URL = "http://judge/v1"


def completion(text, **message) -> str:
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]})


class Endpoint:
    """Replies in turn from a script; the last entry repeats.

    An entry is a body for status 200, (status, body), or None for no connection.
    """

    def __init__(self, *script):
        self.script, self.requests, self.headers = script, [], []
        self.most_at_once = self.now = 0
        self.lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        with self.lock:
            entry = self.script[min(len(self.requests), len(self.script) - 1)]
            self.requests.append({"url": str(request.url), **json.loads(request.content)})
            self.headers.append(request.headers)
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
        time.sleep(0.002)
        with self.lock:
            self.now -= 1
        if entry is None:
            raise httpx.ConnectError("no connection")
        status, text = (200, entry) if isinstance(entry, str) else entry
        return httpx.Response(status, text=text, headers={"content-type": "application/json"})


@pytest.fixture
def endpoint(monkeypatch):
    """Makes an endpoint that the openai client reaches, with a back-off of a millisecond."""
    import openai  # here, as it takes seconds

    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.001)
    make_client = openai.OpenAI

    def start(*script) -> Endpoint:
        served = Endpoint(*script)

        def client(**options):
            return make_client(**options, http_client=httpx.Client(transport=httpx.MockTransport(served)))

        monkeypatch.setattr(openai, "OpenAI", client)
        return served

    return start


def ask(tmp_path, questions=1, **settings):
    own = JudgeSettings(url=URL, **{"retries": 2, "concurrency": 1, "model": "m", **settings})
    judge = Judge(own, tmp_path / "cache")
    requests = [judge.request(f"<user> {i} </user>", "gold", "pred") for i in range(questions)]
    return judge, judge.verdicts(requests)


@pytest.mark.parametrize(
    "text, kind",
    [
        (YES, "yes"),
        (NO, "no"),
        ("Reasoning: a\n\n**Judgment:** **Yes**\n", "yes"),
        ("reasoning: a\njudgment: <no>.", "no"),
        ("<think>Judgment: No? I cannot help.</think>\n" + YES, "yes"),
        ("Reasoning: a\nJudgment: Yes or No", "other_format"),
        ("Judgment: Yes\nJudgment: No", "other_format"),
        ("Judgment: Yes\nBut the user wanted Rome.", "other_format"),
        ('{"judgment": "Yes"}', "other_format"),
        ("Judgment:" + " " * 1_000_000 + "Yes", "yes"),
        (" *" * 500_000 + "Judgment", "other_format"),
    ],
)
def test_judgments(text, kind):
    assert judgment(text) == kind


@pytest.mark.parametrize(
    "script, kind, requests, said",
    [
        ([completion(YES)], "yes", 1, "Judgment: Yes"),
        ([completion(None)], "other_format", 1, ""),
        ([completion(None, refusal="No way.")], "other_format", 1, "No way."),
        ([(400, '{"error": {"code": "data_inspection_failed"}}')], "other_format", 1, "data_inspection"),
        ([(503, ""), (429, ""), completion(NO)], "no", 3, "Judgment: No"),
        ([(502, "bad gateway")], "failed", 3, "status 502: bad gateway"),
        ([(401, "who are you")], "failed", 1, "status 401: who are you"),
        (['{"choices": []}'], "failed", 1, "no chat completion: IndexError"),
        ([None, completion(YES)], "yes", 2, "Judgment: Yes"),
    ],
)
def test_each_way_an_endpoint_answers(endpoint, tmp_path, script, kind, requests, said):
    served = endpoint(*script)
    _, (found,) = ask(tmp_path)
    assert found.kind == kind and said in found.text
    assert len(served.requests) == requests
    assert len(list((tmp_path / "cache").glob("*.json"))) == (kind != "failed")


def test_a_dead_endpoint_is_given_up(endpoint, tmp_path):
    endpoint(None)
    judge, found = ask(tmp_path, questions=40, retries=0)
    assert {each.kind for each in found} == {"failed"} and found[0].text.startswith("APIConnectionError")
    assert judge.asked == judging.GIVE_UP_AFTER and found[-1].text == "skipped after 32 consecutive failures"
    endpoint(*[None] * 20, completion(YES), None)
    assert ask(tmp_path / "more", questions=41, retries=0)[0].asked == 41, "not in a row"


def test_what_is_sent(endpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    served = endpoint(completion(YES))
    settings = JudgeSettings(url=URL + "/", model="m", key_variable="JUDGE_KEY")
    judge, dialogue = Judge(settings, tmp_path), "<user> {gold} \ud800 {pred} </user>"
    judge.verdicts([judge.request(dialogue, '{"a": "{pred}"}', "")])
    (request,), (headers,) = served.requests, served.headers
    prompt = request.pop("messages")[0]["content"]
    sampling = {"temperature": 0.0, "max_tokens": 1024}
    assert request == {"url": f"{URL}/chat/completions", "model": "m", **sampling}
    assert headers["authorization"] == "Bearer s3cret"
    before, after = judging.PROMPT.split("{dialogue}")
    after = after.replace("{gold}", '{"a": "\0"}').replace("{pred}", judging.NO_CALL)
    assert prompt == before + dialogue.replace("\ud800", r"\ud800") + after.replace("\0", "{pred}")


def test_nothing_is_asked_twice(endpoint, tmp_path):
    served = endpoint(completion(YES), (500, "x"), (500, "x"), (500, "x"), completion(NO))
    judge, found = ask(tmp_path, questions=2)
    assert [each.kind for each in found] == ["yes", "failed"] and (judge.asked, judge.cached) == (2, 0)
    judge, found = ask(tmp_path, questions=2)
    assert [each.kind for each in found] == ["yes", "no"] and (judge.asked, judge.cached) == (1, 1)
    judge, again = ask(tmp_path, questions=2)
    assert again == found and (judge.asked, judge.cached) == (0, 2) and len(served.requests) == 5
    ask(tmp_path, questions=2, model="other")
    assert len(served.requests) == 7
    next(iter((tmp_path / "cache").glob("*.json"))).write_text("{")  # torn: asked again
    for model in ("m", "other"):
        ask(tmp_path, questions=2, model=model)
    assert len(served.requests) == 8
    served = endpoint(completion(YES))
    judge = Judge(JudgeSettings(url=URL, concurrency=3), tmp_path / "other")
    requests = [judge.request(f"<user> {i % 12} </user>", "g", "p") for i in range(24)]
    assert [each.kind for each in judge.verdicts(requests)] == ["yes"] * 24
    assert len(served.requests) == 12 and 1 <= served.most_at_once <= 3


def evaluate_with(tmp_path, *arguments):
    """Three items of level 1, one of each of the others; the first and last response are exact."""
    wrong = {"name": "Find", "parameters": {"city": "oslo"}}
    for level, n in ((1, 3), (2, 1), (3, 1)):
        rows = [{"system": "s", "user": f"<user> {level}-{i} </user>", "answer": [CALL]} for i in range(n)]
        (tmp_path / f"level-{level}-api_processed.json").write_text(json.dumps(rows))
    said = [json.dumps(call) for call in (CALL, wrong, None, wrong, CALL)]
    responses = [{"response": f"<tool_call>\n{text}\n</tool_call>"} for text in said]
    given = write_lines(tmp_path / "given.jsonl", responses)
    return evaluated("api_bank", tmp_path / "o", "--responses", given, "--data", tmp_path, *arguments)


def test_the_command_judges_failures_only(endpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    served = endpoint(completion(YES), completion(NO), (500, "down"), completion("Hm."))
    options = ["--judge.url", URL, "--judge.key-variable", "JUDGE_KEY", "--judge.concurrency", "1"]
    options += ["--judge.retries", "0", "--compare"]
    result, rows = evaluate_with(tmp_path, *options)
    assert [row["verdict"] for row in rows] == [None, "yes", "no", "failed", None]
    assert [row["correct"] for row in rows] == [True, True, False, None, True]
    prompts = [request["messages"][0]["content"] for request in served.requests]
    assert len(prompts) == 3 and prompts[2].count("<user> 2-0 </user>") == 1
    assert [result[f"judge_{key}"] for key in ("L1", "L2", "L3", "average")] == [2 / 3, 0.0, 1.0, 0.6]
    assert [result[key] for key in ("L1", "L2", "L3", "overall")] == [1 / 3, 0.0, 1.0, 0.4]
    assert (result["judge_failed"], result["judge_failed/L2"], result["judge_no/L1"]) == (1, 1, 1)
    assert (result["judge"]["asked"], result["judge"]["model"]) == (3, "qwen3.7-plus")
    assert result["paper"]["Qwen2.5-1.5B SMOPD"]["judge_average"] == 0.871
    assert "s3cret" not in (tmp_path / "o/api_bank.json").read_text()
    shown = capsys.readouterr().out
    assert "1 failures have no verdict and count as not rescued" in shown and "Judge Avg (%)" in shown
    result, rows = evaluate_with(tmp_path, *options)
    assert rows[3]["verdict"] == "other_format" and not rows[3]["correct"]
    assert (result["judge_failed"], result["judge"]["asked"], result["judge"]["cached"]) == (0, 1, 2)
