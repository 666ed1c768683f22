"""Preference models as rewards: what they score, errors, a worker process, and a server at a URL."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from smopd.engine.errors import NoServer
from smopd.engine.models.loading import UnusableModel
from smopd.engine.preference import LocalPreferenceModel, RemotePreferenceModel
from smopd.engine.remote.servers import RetryPolicy
from smopd.rewards import preference_model
from smopd.rewards.pool import RewardPool, RewardSpec
from smopd.rewards.preference_model import preference_reward
from tests.smopd.rewards.tiny_preference import PLAIN_TEMPLATE, byte_tokenizer, config, save

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Name a colour of the rainbow, please"},
]
PROMPTS = ["How are you?", tuple(CHAT), "x", "How are you?", CHAT[:2], "Long " * 30]
COMPLETIONS = ["Fine.", "Blue, or any other", "", "Fine.", "Good day", "yes"]
QUICK = RetryPolicy(deadline_seconds=20.0, retries=2, backoff_seconds=0.01, concurrency=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a preference model, and the model."""
    folder = tmp_path_factory.mktemp("preference")
    return str(folder), save(folder, byte_tokenizer())


def reward(folder, prompts=PROMPTS, completions=COMPLETIONS, **settings):
    return preference_reward(prompts, completions, model=folder, **{"max_tokens": 512, **settings})


def ids_of(prompt, completion, tokenizer):
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    chat.append({"role": "assistant", "content": completion})
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def truth(network, ids):
    """The head at the last position of one unpadded row."""
    states = network.model(input_ids=torch.tensor([list(ids)])).last_hidden_state
    return float(network.score(states[0, -1]))


def test_the_head_at_the_last_token_whatever_the_batch(model):
    folder, network = model
    expected = [
        truth(network, ids_of(prompt, text, byte_tokenizer()))
        for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    assert len(set(expected)) == 5 and max(expected) - min(expected) > 0.1
    together = reward(folder)
    assert together == pytest.approx(expected, abs=1e-5)
    alone = [reward(folder, [p], [c])[0] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert alone == pytest.approx(expected, abs=1e-5)
    assert reward(folder, batch_tokens=100) == pytest.approx(expected, abs=1e-5)
    assert reward(folder, PROMPTS[::-1], COMPLETIONS[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    assert together[0] == together[3], "equal chats have exactly equal scores"
    assert together == torch.tensor(together, dtype=torch.float32).tolist()
    assert reward(folder, sign=-1) == [-value for value in together]
    assert reward(folder, [], []) == []


def test_templates_and_truncation(model, tmp_path, caplog):
    folder, network = model
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN_TEMPLATE)
    plain = byte_tokenizer(template=PLAIN_TEMPLATE)
    ids = [ids_of(prompt, text, plain) for prompt, text in zip(PROMPTS, COMPLETIONS, strict=True)]
    expected = [truth(network, each) for each in ids]
    assert reward(folder, template=PLAIN_TEMPLATE) == pytest.approx(expected, abs=1e-5)
    assert reward(folder, template=str(file)) == pytest.approx(expected, abs=1e-5)
    cut = [truth(network, each[-20:]) for each in ids]
    assert cut != pytest.approx(expected, abs=1e-3)
    assert reward(folder, template=PLAIN_TEMPLATE, max_tokens=20) == pytest.approx(cut, abs=1e-5)
    assert "of 5 of 6 chats only the last 20 tokens are read" in caplog.text
    first = [truth(network, each[:20]) for each in ids]
    right = reward(folder, template=PLAIN_TEMPLATE, max_tokens=20, truncation_side="right")
    assert right == pytest.approx(first, abs=1e-5) and first != pytest.approx(cut, abs=1e-3)
    assert "of 5 of 6 chats only the first 20 tokens are read" in caplog.text
    picky = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
        PLAIN_TEMPLATE
    )
    values = reward(folder, template=picky)
    assert [value is None for value in values] == [False, True, False, False, True, False]
    assert [v for v in values if v is not None] == pytest.approx(
        [expected[i] for i in (0, 2, 3, 5)], abs=1e-5
    )
    assert "refuses 2 of 6 chats: no system" in caplog.text
    with pytest.raises(ValueError, match="refuses every chat: no system"):
        reward(folder, PROMPTS[1:2], COMPLETIONS[1:2], template=picky)
    assert reward(folder, ["a", "b"], ["", "c"], template="{{ messages[1]['content'] }}")[0] is None


def test_the_model_is_loaded_once(model, tmp_path, monkeypatch):
    network = save(tmp_path, byte_tokenizer(), seed=3)
    loads = []

    class Counting(LocalPreferenceModel):
        def __init__(self, *arguments):
            loads.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(preference_model, "LocalPreferenceModel", Counting)
    first = reward(str(tmp_path))
    assert reward(str(tmp_path), template=PLAIN_TEMPLATE) != first == reward(str(tmp_path), sign=1)
    assert len(loads) == 1 and network is not None
    other = [value - here for value, here in zip(reward(model[0]), first, strict=True)]
    assert max(map(abs, other)) > 0.01, "another model is another reward"


def test_what_is_no_preference_model_is_one_line(model, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, Qwen2ForCausalLM

    def mistake(kind, match, folder):
        with pytest.raises(kind, match=match) as caught:
            reward(str(folder))
        assert "\n" not in str(caught.value)

    save(tmp_path / "two", byte_tokenizer(), labels=2)
    mistake(
        UnusableModel, r"one output: score.weight has shape \(2, 64\), expected \(1, 64\)", tmp_path / "two"
    )
    causal = tmp_path / "causal"
    Qwen2ForCausalLM(config(byte_tokenizer())).save_pretrained(causal)
    byte_tokenizer().save_pretrained(causal)
    mistake(UnusableModel, "lack score.weight .* was not trained as a preference model", causal)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **sizes))
    bert.save_pretrained(tmp_path / "bert")
    mistake(UnusableModel, "no linear head `score` over single tokens", tmp_path / "bert")
    mistake(FileNotFoundError, "no such folder", tmp_path / "absent")
    save(tmp_path / "bare", byte_tokenizer(template=None))
    mistake(ValueError, "has no chat template; expected one as `template`", tmp_path / "bare")
    (tmp_path / "two" / "model.safetensors").unlink()
    mistake(FileNotFoundError, "two: cannot be loaded", tmp_path / "two")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sign": 0}, "sign is 0, expected 1 or -1"),
        ({"sign": "1"}, "sign is a str"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number of 1 or more"),
        ({"batch_tokens": 1.5}, "batch_tokens is 1.5"),
        ({"truncation_side": "middle"}, "truncation_side is 'middle', expected 'left' or 'right'"),
        ({"max_tokens": 2048}, "max_tokens is 2048, expected at most the 512"),
        ({"template": ["a"] * 6}, "template is a list; is 'template' a column of the data"),
        ({"template": "no_such.jinja"}, "template no_such.jinja: no such file"),
        ({"prompts": [None] * 6}, r"prompts\[0\] is 'None', expected a text or chat messages"),
        ({"prompts": ["a"]}, "got 1 prompts, expected 6"),
    ],
)
def test_a_wrong_argument_is_named(model, settings, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        reward(model[0], **settings)


@pytest.mark.slow
def test_two_models_are_two_dimensions_in_workers(model, tmp_path):
    """Each worker imports torch, holds its model and is called twice."""
    save(tmp_path / "other", byte_tokenizer(template=None), seed=1)
    function = "smopd.rewards.preference_model:preference_reward"
    second = {"model": str(tmp_path / "other"), "sign": -1, "template": PLAIN_TEMPLATE, "max_tokens": 64}
    rewards = [
        RewardSpec("helpful", function, {"model": model[0], "max_tokens": 512}),
        RewardSpec("harmless", function, second),
    ]
    expected = [reward(model[0]), reward(second["model"], sign=-1, template=PLAIN_TEMPLATE, max_tokens=64)]
    columns = {"ground_truth": ["t"] * len(PROMPTS)}
    with RewardPool(rewards, deadline_seconds=600, startup_seconds=900, log_path=tmp_path / "log") as pool:
        pool.probe()
        for _ in range(2):
            scored = pool.score(PROMPTS, COMPLETIONS, columns)
            assert not scored.last_errors, scored.last_errors
            assert scored.values_RK.T.tolist() == [pytest.approx(each, abs=1e-5) for each in expected]
    assert set(scored.restarts.values()) == {0}


class Endpoint:
    """A loopback server with vLLM's /v1/models and /classify; the score of ids is their sum over 16.

    script: count of calls to /classify -> what goes wrong there, or None: a status, or a body.
    """

    def __init__(self, script=lambda count: None, longest=512):
        self.bodies, self.calls = [], 0
        endpoint = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"data": [{"id": "judge", "max_model_len": longest}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    endpoint.calls += 1
                    wrong = script(endpoint.calls)
                    endpoint.bodies.append((self.path, body))
                if isinstance(wrong, int):
                    self.reply(wrong, {"error": "as scripted"})
                    return
                rows = [
                    {"index": i, "label": "LABEL_0", "probs": [sum(ids) / 16], "num_classes": 1}
                    for i, ids in enumerate(body["input"])
                ]
                self.reply(200, wrong or {"object": "list", "model": "judge", "data": rows[::-1]})

            def reply(self, status, content):
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint():
    made = []

    def make(*arguments, **settings):
        made.append(Endpoint(*arguments, **settings))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def test_a_server_is_sent_our_ids_and_asked_again_when_busy(model, endpoint):
    server = endpoint(lambda count: 503 if count == 1 else None)
    ids = [ids_of(p, c, byte_tokenizer()) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    values = reward(model[0], url=server.url, batch_tokens=200, sign=-1)
    assert values == [-sum(each) / 16 for each in ids]
    assert {path for path, _ in server.bodies} == {"/classify"}
    settings = [{k: v for k, v in body.items() if k != "input"} for _, body in server.bodies]
    assert settings[0] == {"model": "judge", "use_activation": False, "add_special_tokens": False}
    assert all(each == settings[0] for each in settings)
    sent = [tuple(row) for _, body in server.bodies for row in body["input"]]
    assert set(sent) == {tuple(each) for each in ids} and len(server.bodies) > 2


@pytest.mark.parametrize(
    "wrong, message",
    [
        (400, "/classify: status 400"),
        (500, "status 500"),
        (
            {"data": [{"index": i, "probs": [0.5, 0.5]} for i in range(2)]},
            "got scores .* expected one finite",
        ),
        ({"data": []}, "got scores .* expected one finite number for each of 2"),
        ({"data": [{"index": i, "probs": [1.0]} for i in range(3)]}, "got scores .* for each of 2"),
        ({"data": [{"index": i, "probs": [float("nan")]} for i in range(2)]}, "got scores .* for each of 2"),
        ({"embedding": []}, "gave a bad answer .*KeyError"),
    ],
)
def test_a_server_that_misbehaves_is_named(endpoint, wrong, message):
    server = endpoint(lambda count: wrong)
    remote = RemotePreferenceModel([server.url], QUICK)
    with pytest.raises(NoServer, match=f"{server.url}: .*{message}"):
        remote.score([(1, 2), (3,)], 100)
    assert server.calls <= 1 + QUICK.retries
